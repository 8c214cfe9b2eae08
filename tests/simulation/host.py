"""Faults of the machine that runs brokers and commands: its disk fills up, its power fails, its lid is closed."""

from __future__ import annotations

import asyncio
import json

from tests.simulation.universe import Universe

DISK_FULL_S = (15.0, 60.0, 180.0)
SUSPENDED_S = (20.0, 90.0, 300.0, 700.0)  # below the lease, which nothing renews meanwhile
OWNER_LOST_S = (10.0, 40.0)
HOME, AWAY = "account-1", "account-2"
AWAY_S = (20.0, 60.0, 150.0)
VISIT_POLL_S, VISIT_S = 30.0, 400.0  # longer than nodes must stay missing from lists to be believed gone
AWAY_BEFORE_S, AWAY_AFTER_S = 3.0, 6.0  # the network goes before the machine sleeps, and comes back after it wakes


def fill_disk(universe: Universe) -> None:
    """Fail every write of every process until a user notices."""
    universe.note_fault("disk:full")
    universe.file.is_full = True
    universe.loop.call_world(universe.random.choice(DISK_FULL_S), free_disk, universe)


def free_disk(universe: Universe) -> None:
    universe.file.is_full = False


def cut_power(universe: Universe) -> None:
    """Kill every process and lose the commits that were not synced, newest first."""
    universe.note_fault("power:cut")
    for process in list(universe.processes):
        if process.is_alive:
            universe.kills["power:cut"] += 1
            process.kill()
    lost = universe.file.cut_power(universe.random)
    universe.forget_what_was_seen()
    universe.say(f"{lost} commits are lost")


def suspend(universe: Universe) -> None:
    """Close a laptop's lid.

    Processes and their monotonic clock stand still; the wall clock and the nodes continue. The network is away for a
    moment before and after.
    """
    suspend_for(universe, universe.random.choice(SUSPENDED_S))


def suspend_for(universe: Universe, duration_s: float) -> None:
    if universe.is_suspended:
        return
    now_s = universe.loop.time()
    wakes_s = now_s + AWAY_BEFORE_S + duration_s
    for node in universe.list_live_nodes():
        windows = universe.gang.unreachable.setdefault(node.id, [])
        windows.append((now_s, now_s + AWAY_BEFORE_S + 0.5))
        windows.append((wakes_s - 0.5, wakes_s + AWAY_AFTER_S))
    universe.loop.call_world(AWAY_BEFORE_S, universe.fall_asleep)
    universe.loop.call_world(AWAY_BEFORE_S + duration_s, universe.wake_up)


def lose_owner(universe: Universe) -> None:
    """Empty the file that records the nodes' owner: nothing starts until it is restored."""
    universe.note_fault("owner:lost")
    universe.is_owner_lost = True
    universe.loop.call_world(universe.random.choice(OWNER_LOST_S), restore_owner, universe)


def restore_owner(universe: Universe) -> None:
    universe.is_owner_lost = False


def switch_login(universe: Universe) -> None:
    """Start brokers and commands from a shell logged in to another account, until a user notices."""
    if universe.account != HOME:
        return
    universe.note_fault("account:other")
    log_in(universe, AWAY)
    universe.loop.call_world(universe.random.choice(AWAY_S), log_in, universe, HOME)


def log_in(universe: Universe, account: str) -> None:
    """Log in to an account. Running processes keep their login, so they are ended and started again."""
    if universe.account != account:
        universe.say(f"log in to {account}")
        universe.account, universe.login_s = account, universe.loop.time()
        for process in list(universe.processes):
            process.kill()


async def visit_accounts(universe: Universe) -> None:
    """Log in to each account that still has nodes or intents, as a user does after the last fault."""
    while True:
        await asyncio.sleep(VISIT_POLL_S)
        if not universe.is_healed or universe.mix.leaves_broker_dead:
            continue
        left = _list_accounts(universe)
        others = sorted(left - {universe.account})
        is_done = universe.account not in left or universe.loop.time() - universe.login_s >= VISIT_S
        if others and is_done:
            log_in(universe, others[0])


def _list_accounts(universe: Universe) -> set[str]:
    """List the accounts with anything left to do."""
    left = {node.account for node in universe.list_live_nodes()}
    for (body,) in universe.read("SELECT body FROM intents WHERE outcome IS NULL"):
        left.add(json.loads(body)["account"])
    for (body,) in universe.read("SELECT CAST(body AS TEXT) FROM clusters"):
        left |= {node["account"] for node in json.loads(body)["nodes"]}
    return left - {""}


def mend(universe: Universe) -> None:
    """Stop all faults."""
    free_disk(universe)
    restore_owner(universe)
    universe.wake_up()
    log_in(universe, HOME)
