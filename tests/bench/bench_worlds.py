"""The cost of egress, common failures, production knowledge and slow starts: `python -m tests.bench.bench_worlds`.

Not collected by pytest. `--traces` is a folder as for `tests.bench.bench_spot`.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from broker.lab.benchmark import spread_starts
from broker.lab.markets import Site
from broker.lab.replay import Case, ReplayOutcome, replay
from broker.lab.traces import Trace
from broker.spot.policies import load_policy
from tests.bench.bench_spot import SHORT_HOURS, WORK_HOURS, WORK_HOURS_SHORT, place_trace, read_folder
from tests.bench.production_replay import double_rests, replay_production

SLACKS, START_HOURS = (1.17, 1.5), 0.1
EGRESS = (0.0, 0.5, 2.0, 8.0)  # of a move, in on-demand hours
MARGIN_HOURS = 0.5
SLOWER = 3.0  # starts take this many times as long as the policy assumes
Run = Callable[[Case, float], ReplayOutcome]


def run_adaptive(case: Case, hour: float) -> ReplayOutcome:
    return replay(case, load_policy("adaptive"), hour)


KNOWLEDGE: dict[str, Run] = {
    "watched": run_adaptive,
    "production": lambda case, hour: replay_production(case, load_policy("adaptive"), hour),
    "the same, refused places rest for longer": lambda case, hour: replay_production(
        case, load_policy("adaptive"), hour, probe=double_rests
    ),
    "with a budget: machines given up first, too": lambda case, hour: replay_production(
        case, load_policy("adaptive"), hour, keeps_machines=False, probe=double_rests
    ),
}
STARTS: dict[str, Run] = {
    "as told, without a margin": run_adaptive,
    "as told": lambda case, hour: run_adaptive(replace(case, look_hours=MARGIN_HOURS), hour),
    "starts x 3, on-demand 30 min late, told": lambda case, hour: run_adaptive(
        replace(
            case,
            sites=tuple(replace(site, start_hours=site.start_hours * SLOWER) for site in case.sites),
            look_hours=MARGIN_HOURS,
            ondemand_delay_hours=MARGIN_HOURS,
        ),
        hour,
    ),
    "the same, not told": lambda case, hour: run_adaptive(
        replace(case, look_hours=MARGIN_HOURS, start_factor=SLOWER, ondemand_delay_hours=MARGIN_HOURS), hour
    ),
}


def make_cases(traces: Sequence[Trace], count: int) -> list[tuple[Case, float]]:
    sites: tuple[Site, ...] = tuple(place_trace(trace, traces, START_HOURS) for trace in traces)
    hours = WORK_HOURS if max(trace.hours for trace in traces) > SHORT_HOURS else WORK_HOURS_SHORT
    return [
        (Case(sites=sites, work_hours=hours, deadline_hours=hours * slack, save_every_hours=0.0), hour)
        for slack in SLACKS
        for hour in spread_starts(sites, hours * slack, count)
    ]


def compare(title: str, cases: Sequence[tuple[Case, float]], runs: dict[str, Run]) -> None:
    """Print the total cost of each kind of run over that of the first, each case by its on-demand cost."""
    say(f"\n{title}, {len(cases)} replays")
    usd, late = defaultdict[str, float](float), defaultdict[str, int](int)
    for case, hour in cases:
        for name, run in runs.items():
            found = run(case, hour)
            usd[name] += found.usd / case.work_hours
            late[name] += found.is_late
    for name in runs:
        say(f"{name:<44}{usd[name] / usd[next(iter(runs))]:>8.3f}{late[name]:>6} late")


def close_together(traces: Sequence[Trace]) -> list[Trace]:
    """Return the zones with the availability of the first one, each with its own prices."""
    return [replace(trace, counts=traces[0].counts, gang=traces[0].gang) for trace in traces]


def measure_egress(name: str, traces: Sequence[Trace], count: int, *, is_common: bool = False) -> None:
    for egress in EGRESS:
        ratios = list[float]()
        for first in range(len(traces)):
            move = tuple(tuple(egress * (a != b) for b in range(len(traces))) for a in range(len(traces)))
            zones = [*traces[first:], *traces[:first]]
            cases = make_cases(close_together(zones) if is_common else zones, count)
            for slack in SLACKS:
                usd = {"adaptive": 0.0, "uniform-progress": 0.0}
                for case, hour in cases:
                    if case.deadline_hours == case.work_hours * slack:
                        for policy in usd:
                            usd[policy] += replay(replace(case, move_usd=move), load_policy(policy), hour).usd
                ratios.append(usd["adaptive"] / usd["uniform-progress"])
        say(f"{name:<20} egress {egress:>4g}: mean {sum(ratios) / len(ratios):.3f}, worst {max(ratios):.3f}")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--traces", type=Path, required=True)
    arguments.add_argument("--starts", type=int, default=1, help="submissions a case")
    arguments.add_argument("--only", choices=("egress", "common", "knowledge", "starts"))
    given = arguments.parse_args()
    single, multi = read_folder(given.traces)
    for part, title in (("egress", "each zone as recorded"), ("common", "all zones open and close as the first one")):
        if given.only in (None, part):
            say(
                f"cost over that of uniform progress, the data in each zone in turn, {title}; egress in on-demand hours"
            )
            for name, group in multi.items():
                measure_egress(name, group, given.starts, is_common=part == "common")
    if given.only in (None, "knowledge"):
        groups = [*((trace,) for trace in single[::5]), *multi.values()]
        compare("knowledge", [each for group in groups for each in make_cases(group, given.starts)], KNOWLEDGE)
    if given.only in (None, "starts"):
        cases = [each for trace in single[::2] for each in make_cases((trace,), given.starts)]
        compare("starts", [(replace(case, save_every_hours=0.25), hour) for case, hour in cases], STARTS)


if __name__ == "__main__":
    main()
