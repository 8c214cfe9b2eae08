"""Queue the runs of a node and reserve accelerators for them. Standard library only.

Runs begin in the order of their ids, and none overtakes a waiting one: small runs cannot starve a large one. A run
reserves whole accelerators, a fraction of one, or the whole node, and begins as soon as that is free. The reservation
is recorded in the run's own `state.json` and holds until the run is over, so it stays correct after any kill. The head
decides for all nodes of a cluster: if each node decided for itself, two runs that reach the nodes in different orders
could deadlock.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from broker.agent import agent_files as files

    Held = dict[str, Any]  # not evaluated on the nodes, which may have Python 3.8
else:
    import agent_files as files

UNITS = 10_000  # per accelerator: shares are added up as integers
WHOLE_NODE = {"cards": None, "share": 1.0}
PENDING = "PENDING"


def take(run_id: int, spec: Mapping[str, Any], record: Callable[..., None], given: Held | None = None) -> Held | None:
    """Reserve the run's accelerators; return `{"cards": [index, ...] or None, "share"}`, or None if it must wait.

    `record` stores it while no other run here can decide. `given`: the head's reservation, to be repeated here.
    """
    lock = files.try_lock(files.STATE / "turn.lock")
    if lock is None:
        return None  # another run is deciding: retried at the next tick
    try:
        waiting, held = read_others(run_id)
        if given is not None:
            reserved = given if fits(given, held) else None
        elif any(other < run_id for other in waiting):
            return None
        else:
            queue = spec.get("queue") or {}
            reserved = choose(queue.get("count"), int(queue.get("card_count") or 0), held)
        if reserved is not None:
            record(held=reserved)
        return reserved
    finally:
        os.close(lock)


def read_others(run_id: int) -> tuple[list[int], list[Held]]:
    """Return the ids of other waiting runs, and the reservations of the others."""
    waiting: list[int] = []
    held: list[Held] = []
    for other in files.list_run_ids():
        if other == run_id or files.is_over(other):
            continue
        state = files.read_json(files.run_folder(other) / "state.json") or {}
        if state.get("status", PENDING) == PENDING:
            waiting.append(other)
        else:
            held.append(read_held(state.get("held")))
    return waiting, held


def read_held(value: Any) -> Held:
    """Parse a reservation; the whole node if it is missing or invalid, as older agents only reserve whole nodes."""
    try:
        if value["cards"] is not None:
            return {"cards": [int(card) for card in value["cards"]], "share": float(value["share"])}
    except (TypeError, KeyError, ValueError):
        pass
    return dict(WHOLE_NODE)


def choose(count: float | None, card_count: int, held: Sequence[Held]) -> Held | None:
    """Return the reservation for `count` of `card_count` cards (None: the whole node), or None if the run must wait.

    A fraction goes to the fullest card with room, so that whole ones stay free: of two cards with 0.5 and 0 in use,
    0.5 more goes to the first, 0.7 to the second, and 2 must wait.
    """
    if count is None:
        return None if held else dict(WHOLE_NODE)
    used = add_up(held)
    if used is None:
        return None
    cards = range(card_count)
    if count < 1:
        candidates = [card for card in cards if used.get(card, 0) + to_units(count) <= UNITS]
        if not candidates:
            return None
        return {"cards": [max(candidates, key=lambda card: (used.get(card, 0), -card))], "share": count}
    free, needed = [card for card in cards if not used.get(card)], min(int(count), card_count)
    return {"cards": free[:needed], "share": 1.0} if len(free) >= needed else None


def fits(given: Held, held: Sequence[Held]) -> bool:
    """Return whether exactly these cards are free."""
    if given["cards"] is None:
        return not held
    used = add_up(held)
    return used is not None and all(used.get(card, 0) + to_units(given["share"]) <= UNITS for card in given["cards"])


def add_up(held: Sequence[Held]) -> dict[int, int] | None:
    """Return the units in use by card; None if a run has the whole node."""
    used: dict[int, int] = {}
    for reservation in held:
        if reservation["cards"] is None:
            return None
        for card in reservation["cards"]:
            used[card] = used.get(card, 0) + to_units(reservation["share"])
    return used


def to_units(share: float) -> int:
    """Return the share of a device in whole units, so that sums of shares are exact."""
    return round(share * UNITS)


def name_cards(held: Held | None, spec: Mapping[str, Any], around: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that shows the program its accelerators and no others.

    If `around`, the agent's own environment, is limited to some of the machine's accelerators, the run's are chosen
    from those; a limit to too few is left unchanged.
    """
    variable = (spec.get("queue") or {}).get("variable")
    if not variable or held is None or held["cards"] is None:
        return {}
    cards = [int(card) for card in held["cards"]]
    if variable not in around:
        return {variable: ",".join(map(str, cards))}
    names = [name.strip() for name in around[variable].split(",") if name.strip()]
    return {variable: ",".join(names[card] for card in cards)} if max(cards) < len(names) else {}
