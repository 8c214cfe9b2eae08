"""The value of machines of two kinds in one job: `python -m tests.bench.bench_kinds`.

Not collected by pytest. Each setting (prices, speed, work, deadline) has several draws of a market of slow machines and
one of fast ones. The job runs on either kind alone and on both. Its mean cost on both is compared with that on the
better kind of the setting, and with the better kind of each draw, which is known in hindsight only. Markets are drawn
from a seed; with `--traces DIR` (as for `tests.bench.bench_spot`) they are recordings.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from broker.lab.markets import Site, make_site
from broker.lab.replay import Case, replay
from broker.lab.traces import Trace
from broker.spot.policies import load_policy
from tests.bench.bench_spot import read_folder

RATIO_MAX = 1.01
TICKS, TICK_HOURS = 1500, 1 / 6
SPEEDS, ONDEMAND_RATIOS = (1.5, 2.2, 3.0), (0.8, 1.0, 1.3)  # of the fast kind: speed, price of work over the slow one's
SLACKS = (0.7, 1.1, 1.3, 2.0)  # deadline / work of the slow kind: at 0.7 only the fast one can be in time
WORK_HOURS = (10.0, 30.0)


@dataclass(frozen=True, kw_only=True)
class KindsResult:
    """One replay: the USD on each kind alone and on both; whether it was late although one kind could be in time."""

    alone_usd: tuple[float, float]  # slow, fast; infinite if late
    both_usd: float
    is_late: bool


def draw_trace(draw: random.Random, name: str, open_hours: float, closed_hours: float) -> Trace:
    """Draw a market whose open and closed periods last these hours on average."""
    counts, is_open = list[int](), draw.random() < open_hours / (open_hours + closed_hours)
    while len(counts) < TICKS:
        mean = open_hours if is_open else closed_hours
        counts += [int(is_open)] * max(1, round(draw.expovariate(1 / mean) / TICK_HOURS))
        is_open = not is_open
    return Trace(name=name, gap_hours=TICK_HOURS, counts=tuple(counts[:TICKS]))


def make_kind(
    trace: Trace, kind: str, *, speed: float, ondemand_usd_hour: float, spot_usd_hour: float, start_hours: float
) -> Site:
    """Return a site with machines that work `speed` times as fast as those that the work is counted on."""
    site = make_site(
        replace(trace, prices=()), start_hours=start_hours, ondemand_usd_hour=ondemand_usd_hour,
        spot_usd_hour=spot_usd_hour,
    )  # fmt: skip
    offer = replace(site.spot.offer, instance_type=kind)
    return replace(
        site, spot=replace(site.spot, offer=offer), ondemand=replace(site.ondemand, offer=offer), spot_speed=speed,
        ondemand_speed=speed,
    )  # fmt: skip


def draw_kinds(seed: int, repeat: int, traces: Sequence[Trace] = ()) -> tuple[list[Site], list[Site], Case]:
    """Draw the sites of the slow and of the fast kind, and a job with both: a setting by seed, markets by both."""
    draw, markets = random.Random(seed), random.Random(f"{seed}/{repeat}")
    start, speed, zones = draw.choice((0.05, 0.1, 0.3)), draw.choice(SPEEDS), draw.choice((1, 1, 2))

    def draw_sites(kind: str, factor: float, usd_hour: float, share: float, opens: Sequence[int]) -> list[Site]:
        means = draw.choice(opens), draw.choice((1, 4, 10))
        return [
            make_kind(
                markets.choice(traces) if traces else draw_trace(markets, f"{kind}{zone}", *means), kind, speed=factor,
                ondemand_usd_hour=usd_hour, spot_usd_hour=usd_hour * share, start_hours=start,
            )
            for zone in range(zones)
        ]  # fmt: skip

    slow = draw_sites("slow", 1.0, 1.0, draw.choice((0.3, 0.4, 0.5)), (2, 6, 20))
    fast_usd = speed * draw.choice(ONDEMAND_RATIOS)
    fast = draw_sites("fast", speed, fast_usd, draw.choice((0.3, 0.45, 0.6)), (1, 4, 12))
    work = draw.choice(WORK_HOURS)
    case = Case(
        sites=(*slow, *fast), work_hours=work, deadline_hours=work * draw.choice(SLACKS) + start,
        save_every_hours=draw.choice((0.0, 0.25)),
    )  # fmt: skip
    return slow, fast, case


def compare_kinds(seed: int, repeat: int, traces: Sequence[Trace] = ()) -> KindsResult:
    """Replay the job of a setting on either kind alone and on both."""
    slow, fast, case = draw_kinds(seed, repeat, traces)
    policy = load_policy("adaptive")
    hour = random.Random(f"{seed}/{repeat}/hour").uniform(0.0, 100.0) if traces else 0.0
    alone = [replay(replace(case, sites=tuple(sites)), policy, hour) for sites in (slow, fast)]
    both = replay(case, policy, hour)
    is_hopeless = case.work_hours / fast[0].ondemand_speed + fast[0].start_hours > case.deadline_hours
    slow_usd, fast_usd = (math.inf if each.is_late else each.usd for each in alone)
    return KindsResult(alone_usd=(slow_usd, fast_usd), both_usd=both.usd, is_late=both.is_late and not is_hopeless)


def rate_setting(found: Sequence[KindsResult]) -> float:
    """Return the mean cost on both kinds over that on the better one alone."""
    return sum(each.both_usd for each in found) / min(sum(each.alone_usd[kind] for each in found) for kind in (0, 1))


def main(arguments: Sequence[str]) -> int:
    """Print the comparison; return 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, help="a folder of recordings; default: drawn markets")
    parser.add_argument("--settings", type=int, default=40)
    parser.add_argument("--draws", type=int, default=4)
    given = parser.parse_args(arguments)
    traces = list[Trace]()
    if given.traces:
        single, multi = read_folder(given.traces)
        traces = [*single, *(each for group in multi.values() for each in group)]
    found = [[compare_kinds(seed, each, traces) for each in range(given.draws)] for seed in range(given.settings)]
    ratios = sorted(map(rate_setting, found))
    replays = [each for group in found for each in group]
    hindsight = sum(each.both_usd for each in replays) / sum(min(each.alone_usd) for each in replays)
    mean, late = sum(ratios) / len(ratios), sum(each.is_late for each in replays)
    print(
        f"{len(ratios)} settings, {len(replays)} replays: cost on both kinds over that on the better one {mean:.3f} on "
        f"average ({ratios[0]:.2f} to {ratios[-1]:.2f}); total over the better one of each draw, known in hindsight, "
        f"{hindsight:.3f}; {late} late"
    )
    is_met = mean <= RATIO_MAX and not late
    print(f"bar: <= {RATIO_MAX} on average and none late: {'met' if is_met else 'MISSED'}")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
