"""The balancer and the placement of services: `python -m tests.bench.bench_serve [PART ...] [--recordings FOLDER]`.

Not collected by pytest; Linux. Parts, all by default:
    kills      50 open streams while replicas are killed with SIGKILL (--kills): broken and different streams, silences
    updates    rolling updates of replicas by hand, under load with open streams (--updates): failed requests
    rollouts   the same by `broker serve update`, with daemon and machines of the local cloud
    balancer   processor time per request beside that of a minimal proxy, time until a dead replica is out, and latency
               added at half load (`serve_requests.py`: open loop, counted from the scheduled times); with an API key,
               once over plain connections to replicas and once over TLS
    idle       memory of the balancer per idle stream (--streams), with TLS on no side, one and both
    placement  replicas on recordings: share of time with all of them ready, and cost over on-demand: both bars for
               4 replicas with a bound that knows the future, then each of --replicas and --cold-starts

`--recordings` names a folder of aligned recordings, one file per zone (`gap_seconds`, `data`, `prices`); without it the
project's own generated markets are used. Prices: a spot hour costs 0.35 of an on-demand hour where none is recorded.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.bench.serve_balancer import (
    AddedLatency,
    make_bed,
    measure_added_latency,
    measure_death_s,
    measure_idle_bytes,
    measure_request_cpu_ms,
)
from tests.bench.serve_placement import find_bound, read_market, replay
from tests.cli.conftest import Shell
from tests.serve.live_bed import LiveBed, survive, update
from tests.serve.live_load import LoadTally
from tests.serve.live_service import LiveService, roll
from tests.signals import signal_all

REQUEST_CPU_MS_MAX, DEAD_S_MAX, IDLE_MIB_MAX = 0.4, 0.2, 300.0  # the last is of 10,000 idle streams
ADDED_MS_MAX = 2.0
IDLE_STREAMS_ASKED = 10_000
PLACEMENT_BARS = ((3, 0.995, 0.60), (4, 0.99, 0.80))  # replicas ready, share of time, cost over on-demand
AVAILABILITIES = (0.9, 0.99, 0.995, 0.999)
DEATHS = 10


async def bench_kills(folder: Path, arguments: argparse.Namespace) -> bool:
    bed = LiveBed(folder, pause_s=0.05)
    async with bed.run(4):
        tally = await survive(bed, streams=50, kills=arguments.kills, tokens=40, seed=arguments.seed)
        load = bed.read_load()
    assert load is not None
    gaps = sorted(tally.gaps_s)
    show("kills with SIGKILL", arguments.kills)
    show("streams read to the end", tally.ended)
    show("streams continued elsewhere", load.resumed)
    show("streams broken (must be 0)", tally.broken + load.broken)
    show("streams that differ (must be 0)", tally.different)
    show(
        "longest silence of a stream, p50 / p99 s", f"{statistics.median(gaps):.2f} / {gaps[int(len(gaps) * 0.99)]:.2f}"
    )
    return not (tally.broken or load.broken or tally.different)


async def bench_updates(folder: Path, arguments: argparse.Namespace) -> bool:
    bed = LiveBed(folder, pause_s=0.02)
    async with bed.run(2):
        tally = await update(bed, updates=arguments.updates, clients=8, streams=16)
    return show_load(arguments.updates, tally)


async def bench_rollouts(folder: Path, arguments: argparse.Namespace) -> bool:
    shell = Shell(folder)
    try:
        tally = await roll(LiveService(shell, replicas=2), updates=arguments.updates, clients=4, streams=8)
    finally:
        signal_all(shell.find_processes("broker daemon"), signal.SIGTERM)
    return show_load(arguments.updates, tally)


def show_load(updates: int, tally: LoadTally) -> bool:
    show("rolling updates of 2 replicas", updates)
    show("requests meanwhile", tally.requests)
    show("failed requests (must be 0)", len(tally.errors))
    show("streams read to the end", tally.streams.ended)
    show("streams broken, different (must be 0)", f"{tally.streams.broken}, {tally.streams.different}")
    for error in tally.errors[:5]:
        show("", error)
    return tally.failed == 0


async def bench_balancer(folder: Path, arguments: argparse.Namespace) -> bool:
    is_good = True
    for is_encrypted in (False, True):
        print(f"  {'TLS' if is_encrypted else 'plain'} to replicas, metered by API key")
        bed = make_bed(folder / str(is_encrypted), is_encrypted=is_encrypted)
        async with bed.run(2):
            cpu_ms, bare_ms = await measure_request_cpu_ms(bed)
            dead_s = [await measure_death_s(bed) for _ in range(DEATHS)]
        show(f"processor time per request, ms (at most {REQUEST_CPU_MS_MAX})", f"{cpu_ms:.3f}")
        show("  of a proxy of 40 lines, plain and without keys; ratio", f"{bare_ms:.3f}; {cpu_ms / bare_ms:.2f}")
        show(
            f"dead replica out after, p50 / max s (at most {DEAD_S_MAX})",
            f"{statistics.median(dead_s):.3f} / {max(dead_s):.3f}",
        )
        added = await measure_added_latency(
            folder / f"latency-{is_encrypted}", is_encrypted=is_encrypted, cpu_ms=cpu_ms
        )
        is_good &= show_latency(added)
        is_good &= cpu_ms <= REQUEST_CPU_MS_MAX and max(dead_s) <= DEAD_S_MAX
    return is_good


def show_latency(added: AddedLatency) -> bool:
    """Show latencies at half load; return whether they are sound and within the bar."""
    cores = len(os.sched_getaffinity(0))
    show("highest rate by the balancer's processor time, requests/s", f"{added.capacity:.0f}")
    show(f"  of generator, balancer and engines on {cores} cores", f"{added.chain_rate:.0f}")
    show("half load: half of the smaller one, requests/s", f"{added.rate:.0f}")
    for name, each in (("balanced", added.balanced), ("direct", added.direct)):
        times = " / ".join(f"{ms:.2f}" for ms in (each.p50_ms, each.p99_ms, each.max_ms))
        show(f"  {name}, p50 / p99 / max ms ({each.count} requests, {each.failed} failed)", times)
        show("    p99 of turns, lowest / highest ms", f"{min(each.turn_p99s_ms):.2f} / {max(each.turn_p99s_ms):.2f}")
        busy = f"{each.late_p99_ms:.2f}; {each.generator_cpu_share:.0%}"
        show("    generator: p99 of lateness, ms; share of a core", busy)
    show("  the balancer's share of a core", f"{added.balancer_cpu_share:.0%}")
    difference = added.balanced.p50_ms - added.direct.p50_ms, added.balanced.p99_ms - added.direct.p99_ms
    show(f"added at half load, p50 / p99 ms (at most {ADDED_MS_MAX})", " / ".join(f"{each:.2f}" for each in difference))
    if not added.is_sound:
        show("  UNSOUND: the generator was late, or requests failed", "")
    return added.is_sound and difference[1] <= ADDED_MS_MAX


async def bench_idle(folder: Path, arguments: argparse.Namespace) -> bool:
    is_good = True
    for is_https, is_encrypted in ((False, False), (False, True), (True, False), (True, True)):
        bed = make_bed(folder / f"{is_https}{is_encrypted}", is_encrypted=is_encrypted, is_https=is_https)
        async with bed.run(2):
            idle_bytes = await measure_idle_bytes(bed, arguments.streams)
        idle_mib = idle_bytes * IDLE_STREAMS_ASKED / (1 << 20)
        sides = f"{'TLS' if is_https else 'plain'} to clients, {'TLS' if is_encrypted else 'plain'} to replicas"
        show(f"{sides}, KiB per idle stream ({arguments.streams} open)", f"{idle_bytes / 1024:.1f}")
        show(f"  10,000 of them, MiB (at most {IDLE_MIB_MAX:g})", f"{idle_mib:.0f}")
        is_good &= idle_mib <= IDLE_MIB_MAX
    return is_good


def show(name: str, value: object) -> None:
    print(f"  {name:<58} {value}")


async def bench_placement(folder: Path, arguments: argparse.Namespace) -> bool:
    """Print both bars and a table; return whether the availability reaches each bar (AWS recordings only)."""
    market = read_market(arguments.recordings)
    is_good = True
    for needed, share, cost_max in PLACEMENT_BARS:
        found = replay(market, needed=needed, availability=share)
        bound = find_bound(market, needed=needed, share=share)
        is_reached = found.share_ready(needed) >= share and found.usd_hour / 4 <= cost_max
        is_good &= is_reached
        show(f"{needed} of 4 ready (at least {share:.1%})", f"{found.share_ready(needed):.2%}")
        show(f"  cost over 4 on-demand (at most {cost_max:.2f})", f"{found.usd_hour / 4:.3f}; bound {bound / 4:.3f}")
    print("  ready  cold start  asked   ready   cost / on-demand  on-demand   spot")
    for count in arguments.replicas:
        for minutes in arguments.cold_starts:
            for availability in AVAILABILITIES:
                found = replay(market, needed=count, availability=availability, cold_start_hours=minutes / 60)
                print(
                    f"  {count:>5}  {minutes:>6} min  {availability:5.1%}  {found.share_ready(count):6.2%}"
                    f"  {found.usd_hour / count:16.3f}  {found.ondemand_mean:9.2f}  {found.spot_mean:5.2f}"
                )
    return is_good or arguments.recordings is None


PARTS: dict[str, Callable[[Path, argparse.Namespace], Awaitable[bool]]] = {
    "kills": bench_kills,
    "updates": bench_updates,
    "rollouts": bench_rollouts,
    "balancer": bench_balancer,
    "idle": bench_idle,
    "placement": bench_placement,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--recordings", type=Path)
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--cold-starts", type=int, nargs="+", default=[10], help="minutes")
    arguments = parser.parse_args()
    is_good = True
    for name in arguments.parts or PARTS:
        print(name)
        with tempfile.TemporaryDirectory() as folder:
            is_good &= asyncio.run(PARTS[name](Path(folder), arguments))  # type: ignore[arg-type]
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
