"""How close spot policies come to the omniscient optimum, and how fast: `python -m tests.bench.bench_spot`.

Not collected by pytest. Without `--traces` the project's own generated markets are used. A folder may hold traces
itself, or in folders below it: each folder named in `--together`, or holding traces with prices, is one market of
several zones. The adaptive policy is judged leave-one-out: its prior is fitted to all other traces. Prices: a spot hour
costs 1 / 3.1 of an on-demand hour where a trace has none. `--overlaps 0.5 1` also replays the policies with jobs that
work on through half of a start on spot, and through all of it, which bills both sets of machines meanwhile.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from broker.lab.benchmark import spread_starts
from broker.lab.markets import Site, make_site
from broker.lab.offline_optimum import find_optimum
from broker.lab.replay import Case, replay
from broker.lab.traces import Trace, make_default_traces, make_trace, parse_trace
from broker.spot.policies import ORACLES, adaptive, load_policy
from broker.spot.policies.base import Candidate, Decision, JobView, Wait
from broker.spot.prior import Prior, fit_prior

SLACKS = (1.08, 1.17, 1.33, 1.5, 2.0)
STARTS_HOURS = (0.02, 0.05, 0.1, 0.2, 0.5)
QUICK = ((1.17, 1.5), (0.05, 0.2))
POLICIES = ("greedy", "uniform-progress", "next-spot", "adaptive")
WORK_HOURS, WORK_HOURS_SHORT, SHORT_HOURS = 48.0, 12.0, 100.0
SINGLE_RATIO_MAX, ADVERSARY_RATIO_MAX, DECISION_MS_MAX, REPLAYS_S_MAX = 1.05, 1.02, 5.0, 10.0


@dataclass(frozen=True, kw_only=True)
class Work:
    """One market (one trace, or several zones together) at one setting."""

    name: str
    traces: tuple[Trace, ...]
    prior: Prior
    slack: float
    start_hours: float
    starts: int
    policies: Sequence[str] = POLICIES
    overlaps: Sequence[float] = (0.0,)  # the shares of a start through which a working job works on
    notice_hours: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Ratio:
    market: str
    policy: str
    slack: float
    start_hours: float
    ratio: float  # to the optimum
    is_late: bool


def measure(work: Work) -> list[Ratio]:
    """Replay all policies at all starts."""
    sites = tuple(place_trace(trace, work.traces, work.start_hours) for trace in work.traces)
    longest = max(trace.hours for trace in work.traces)
    hours = WORK_HOURS if longest > SHORT_HOURS else WORK_HOURS_SHORT
    deadline = hours * work.slack
    found = []
    for from_hour in spread_starts(sites, deadline, work.starts):
        best = find_optimum(sites, work_hours=hours, deadline_hours=deadline, from_hour=from_hour)
        for name, share in itertools.product(work.policies, work.overlaps):
            options = [sites] if len(sites) == 1 else [sites, *((site,) for site in sites)]
            for number, group in enumerate(options):
                case = Case(
                    sites=group, work_hours=hours, deadline_hours=deadline, notice_hours=work.notice_hours,
                    overlap_hours=share * work.start_hours,
                )  # fmt: skip
                policy = load_policy(name)
                if name == "adaptive":

                    def policy(view: JobView, candidates: Sequence[Candidate], /) -> Decision:
                        return adaptive.weigh(view, candidates, work.prior)

                outcome = replay(case, policy, from_hour, is_oracle=name in ORACLES)
                shown = f"{name}, overlap {share:g}" if share else name
                label = shown if number == 0 else f"{shown}, only {group[0].trace.name.rpartition('/')[2]}"
                found.append(
                    Ratio(
                        market=work.name, policy=label, slack=work.slack, start_hours=work.start_hours,
                        ratio=outcome.usd / best, is_late=outcome.is_late,
                    )
                )  # fmt: skip
    return found


def place_trace(trace: Trace, group: Sequence[Trace], start_hours: float) -> Site:
    """Make the sites of a trace; on-demand in the cheapest zone costs 1."""
    if len(group) == 1 or not trace.prices or not trace.ondemand_usd_hour:
        return make_site(trace, start_hours=start_hours)
    unit = min(each.ondemand_usd_hour or 1.0 for each in group)
    return make_site(
        trace, start_hours=start_hours,
        ondemand_usd_hour=trace.ondemand_usd_hour / unit, spot_usd_hour=trace.prices[0] / unit,
    )  # fmt: skip


def list_works(
    single: Sequence[Trace], multi: dict[str, Sequence[Trace]], starts: int, grid: tuple[Sequence[float], ...]
) -> Iterable[Work]:
    seen = {trace.name: trace.count_periods() for trace in single}
    for trace in single:
        others = [durations for name, durations in seen.items() if name != trace.name] or list(seen.values())
        for slack in grid[0]:
            for start in grid[1]:
                yield Work(
                    name=trace.name, traces=(trace,), prior=fit_prior(others), slack=slack, start_hours=start,
                    starts=starts,
                )  # fmt: skip
    for name, group in multi.items():
        zones = {each.name for each in group}
        others = [durations for key, durations in seen.items() if not any(zone in key for zone in zones)]
        for slack in grid[0]:
            for start in grid[1]:
                yield Work(
                    name=f"[{name}]", traces=tuple(group), prior=fit_prior(others or list(seen.values())), slack=slack,
                    start_hours=start, starts=max(1, starts // 4),
                )  # fmt: skip


def read_folder(folder: Path) -> tuple[list[Trace], dict[str, Sequence[Trace]]]:
    """Return the single traces and the groups of zones."""
    single, multi = list[Trace](), dict[str, Sequence[Trace]]()
    for place in sorted({file.parent for file in folder.rglob("*.json")}):
        traces = [parse_trace(file.read_bytes(), f"{place.name}/{file.stem}") for file in sorted(place.glob("*.json"))]
        if len(traces) > 1 and all(each.prices for each in traces):
            multi[place.name] = traces
        else:
            single += traces
    return single, multi


def adversaries() -> list[Trace]:
    def of(name: str, counts: Sequence[int]) -> Trace:
        return Trace(name=name, gap_hours=1 / 6, counts=tuple(counts))

    return [
        of("always shut", [0]), of("always open", [1]), of("alternating", [1, 0]), of("one of four", [1, 0, 0, 0]),
        of("half hours", [1, 1, 1, 0, 0, 0]), of("calm, then storm", [1] * 240 + [1, 0] * 180),
        of("storm, then calm", [1, 0] * 180 + [1] * 240), of("gone for good", [1] * 90 + [0] * 900),
    ]  # fmt: skip


class Report:
    def __init__(self) -> None:
        self.failures = list[str]()

    def say(self, text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def check(self, name: str, figure: str, is_met: bool) -> None:
        self.say(f"{name:<58}{figure:>14}{'' if is_met else '  MISSED'}")
        if not is_met:
            self.failures.append(name)


def show_ratios(report: Report, ratios: Sequence[Ratio], title: str, grid: tuple[Sequence[float], ...]) -> None:
    report.say(f"\n{title}: mean cost over the omniscient optimum (late)")
    slacks = "".join(f"{f'T/C {slack:g}':>10}" for slack in grid[0])
    starts = "".join(f"{f'd {start:g}':>8}" for start in grid[1])
    report.say(f"{'':<40}{'all':>7}{'late':>6}{slacks}{starts}")
    by_policy = defaultdict(list)
    for each in ratios:
        by_policy[each.policy].append(each)
    for policy, found in by_policy.items():
        line = f"{policy[:39]:<40}{mean(found):>7.3f}{sum(each.is_late for each in found):>6}"
        line += "".join(f"{mean([each for each in found if each.slack == slack]):>10.3f}" for slack in grid[0])
        line += "".join(f"{mean([each for each in found if each.start_hours == start]):>8.3f}" for start in grid[1])
        report.say(line)


def mean(found: Sequence[Ratio]) -> float:
    return sum(each.ratio for each in found) / len(found) if found else float("nan")


def play_adversary(trace: Trace) -> tuple[str, float, int, float]:
    """Return the name, the worst cost over on-demand, the number of late runs, and seconds of CPU time."""
    begin, worst, late = time.process_time(), 0.0, 0
    for slack in SLACKS:
        for start in STARTS_HOURS:
            site = make_site(trace, start_hours=start)
            case = Case(sites=(site,), work_hours=WORK_HOURS, deadline_hours=WORK_HOURS * slack)
            found = replay(case, load_policy("adaptive"))
            late += found.is_late
            worst = max(worst, found.usd / (WORK_HOURS + start))
    return trace.name, worst, late, time.process_time() - begin


def check_adversaries(report: Report, jobs: int) -> None:
    worst, late = 0.0, 0
    with multiprocessing.Pool(jobs) as pool:
        for name, each, missed, took in pool.imap_unordered(play_adversary, adversaries()):
            report.say(f"  {name:<30}{each:>8.3f} of on-demand{missed:>5} late{took:>8.1f} s of CPU")
            worst, late = max(worst, each), late + missed
    report.check("adversarial markets: late", str(late), late == 0)
    report.check("adversarial markets: worst cost over on-demand", f"{worst:.3f}", worst <= ADVERSARY_RATIO_MAX)


def check_speed(report: Report) -> None:
    sites = (make_site(make_trace("t", 1), start_hours=0.1),)
    case = Case(sites=sites, work_hours=WORK_HOURS, deadline_hours=WORK_HOURS * 1.5)
    hours = spread_starts(sites, WORK_HOURS * 1.5, 1000)
    for name in POLICIES:
        begin = time.process_time()
        for hour in hours:
            replay(case, load_policy(name), hour, is_oracle=name in ORACLES)
        took = time.process_time() - begin
        report.check(f"1,000 replays of two weeks, {name}", f"{took:.1f} s", took <= REPLAYS_S_MAX)
    group = tuple(make_site(make_trace(f"z{index}", 1, hours=48), start_hours=0.1) for index in range(100))
    seen = list[tuple[JobView, Sequence[Candidate]]]()

    def keep(view: JobView, candidates: Sequence[Candidate], /) -> Decision:
        seen.append((view, candidates))
        return Wait(hours=0.5) if len(seen) < 40 else load_policy("on-demand")(view, candidates)

    replay(Case(sites=group, work_hours=10, deadline_hours=40), keep)
    policy = load_policy("adaptive")
    for first in (True, False):
        begin = time.process_time()
        for view, candidates in seen:
            policy(view, candidates)
        took = (time.process_time() - begin) / len(seen) * 1e3
        name = "one decision among 100 zones" + (", tables made on the way" if first else "")
        report.check(name, f"{took:.2f} ms", first or took <= DECISION_MS_MAX)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--traces", type=Path)
    arguments.add_argument("--starts", type=int, default=16)
    arguments.add_argument("--quick", action="store_true", help="a part of the grid")
    arguments.add_argument("--jobs", type=int, default=2, help="processes")
    arguments.add_argument("--only", choices=("single", "multi", "adversaries", "speed"))
    arguments.add_argument("--start-hours", type=float, nargs="+", help="only these start-up times")
    arguments.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    arguments.add_argument("--overlaps", type=float, nargs="+", default=[], help="shares of a start that overlap")
    arguments.add_argument("--notice", type=float, default=0.0, help="preemption warning in seconds")
    arguments.add_argument("--check", action="store_true", help="fail where a bar is missed")
    given = arguments.parse_args()
    report, grid = Report(), QUICK if given.quick else (SLACKS, STARTS_HOURS)
    if given.start_hours:
        grid = (grid[0], given.start_hours)
    if given.traces:
        single, multi = read_folder(given.traces)
    else:
        single = [make_trace(f"made-{seed}", seed) for seed in range(12)]
        multi = {"made": make_default_traces(4)}
    works = [
        replace(each, policies=given.policies, overlaps=[0.0, *given.overlaps], notice_hours=given.notice / 3600)
        for each in list_works(single, multi, given.starts, grid)
        if given.only in (None, "multi" if len(each.traces) > 1 else "single")
    ]
    with multiprocessing.Pool(given.jobs) as pool:
        ratios = [each for found in pool.imap_unordered(measure, works) for each in found]
    alone = [each for each in ratios if not each.market.startswith("[")]
    if alone:
        show_ratios(report, alone, "one zone", grid)
        ours = [each for each in alone if each.policy == "adaptive"]
        report.check("adaptive, one zone, leave-one-out", f"{mean(ours):.4f}", mean(ours) <= SINGLE_RATIO_MAX)
    for market in sorted({each.market for each in ratios} - {each.market for each in alone}):
        show_ratios(report, [each for each in ratios if each.market == market], market, grid)
        zones = [each for each in ratios if each.market == market]
        best = min(
            mean([each for each in zones if each.policy == name])
            for name in {each.policy for each in zones}
            if "only" in name
        )
        ours = mean([each for each in zones if each.policy == "adaptive"])
        report.check(f"{market}: adaptive against the best policy in one zone", f"{ours / best:.3f}", ours < best)
    late = sum(each.is_late for each in ratios if each.policy.startswith("adaptive"))
    if ratios:
        report.check("adaptive: late", f"{late} of {sum(e.policy.startswith('adaptive') for e in ratios)}", late == 0)
    if given.only in (None, "adversaries"):
        check_adversaries(report, given.jobs)
    if given.only in (None, "speed"):
        check_speed(report)
    if given.check and report.failures:
        sys.exit(f"missed: {', '.join(report.failures)}")


if __name__ == "__main__":
    main()
