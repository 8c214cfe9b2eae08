"""How accurate the forecasts of `plan` are: `python -m tests.bench.bench_forecast --traces DIR --runs TABLE.json`.

Not collected by pytest. DIR holds one folder of recordings for each family (or set BROKER_TRACES); TABLE is made of the
same folder by `python -m broker.lab.recorded_runs`. Each run in the table is forecast by the market model from the runs
of all *other* families, and compared with its outcome. `--check` fails if a bar is missed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from broker.lab.markets import Site, make_site
from broker.lab.recorded_runs import list_cells, list_markets, read_families
from broker.lab.replay import Case as ReplayCase
from broker.lab.replay import ReplayOutcome, replay
from broker.lab.trace_files import read_traces
from broker.lab.traces import Trace
from broker.spot.market_model import NOTHING, MarketEvidence, forecast_run
from broker.spot.policies import load_policy
from broker.spot.recorded_runs import RecordedRun, Scenario, interpolate_runs, parse_scenarios

SPOT_USD = 1 / 3.1  # of on-demand
LEVELS = (0.5, 0.8, 0.9)
SHARES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
LIMITS = (1.05, 1.15, 1.3, 1.6, 2.0, 3.0, 5.0)  # deadlines of jobs on spot alone, over work
COVERAGE_OFF_MAX, BIAS_MAX, RELIABILITY_OFF_MAX = 0.05, 0.05, 0.05
BINS = 5
TIE = 0.002  # runs that differ by less, as a share of the work, count as equal
BEFORE_HOURS, SEEN_HOURS_MIN = 48.0, 0.05  # of own history, where it is given
# Work, deadline over work, start, spot price, hours between checkpoints.
BETWEEN = (
    (24.0, 1.5, 0.15, SPOT_USD, 0.0), (24.0, 1.2, 0.1, SPOT_USD, 0.0), (24.0, 2.5, 0.1, SPOT_USD, 0.0),
    (6.0, 1.5, 0.1, SPOT_USD, 0.0), (90.0, 1.4, 0.2, SPOT_USD, 0.0), (24.0, 1.5, 0.15, 0.8, 0.0),
    (24.0, 1.5, 0.15, SPOT_USD, 0.3),
)  # fmt: skip
CHOICE_SLACKS, CHOICE_STARTS = (1.2, 1.5), 6
CHOICE_MAX, DEARER_MAX = 1.03, 1.02

Value = Callable[[RecordedRun], float]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run of one scenario, and what was known of the market when it began."""

    scenario: Scenario
    work: float
    deadline: float | None
    start: float
    actual: RecordedRun
    preemptions: float
    open_hours: float
    is_open: bool


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Quantiles at `SHARES`, means, and the chances that cost and time are at most a figure."""

    usd: Sequence[float]
    usd_mean: float
    hours_mean: float
    within_usd: Callable[[float], float]
    within: Callable[[float], float]


def usd(run: RecordedRun) -> float:
    return run.spot_hours * SPOT_USD + run.ondemand_hours


def hours(run: RecordedRun) -> float:
    return run.hours


def list_cases(scenarios: Sequence[Scenario], folder: Path) -> list[Case]:
    markets = {market.name: market for market in list_markets(read_families(folder))}
    counted: dict[str, int] = defaultdict(int)
    sizes: dict[str, int] = defaultdict(int)
    for each in scenarios:
        sizes[each.market] += 1
    found = []
    for scenario in scenarios:
        traces = markets[scenario.market].traces
        index = counted[scenario.market]
        counted[scenario.market] += 1
        from_hour = max(trace.hours for trace in traces) * (index + 0.5) / sizes[scenario.market]
        preempted, opened = watch_gang(traces[0], from_hour)
        for cell, (work, deadline, start) in enumerate(list_cells()):
            allowed = None if deadline is None else work * deadline + start
            (actual,) = interpolate_own(scenario, cell, work)
            found.append(
                Case(
                    scenario=scenario, work=work, deadline=allowed, start=start, actual=actual,
                    preemptions=preempted, open_hours=opened, is_open=scenario.is_open,
                )
            )  # fmt: skip
    return found


def watch_gang(trace: Trace, hour: float) -> tuple[float, float]:
    """(preemptions, spot hours) of an own gang at one place in the two days before, of periods that outlive a start."""
    preempted, opened, until = 0.0, 0.0, min(hour, trace.hours)
    for (since, is_open), (closed, _) in itertools.pairwise([*trace.changes, (trace.hours, False)]):
        begin, end = max(since, hour - BEFORE_HOURS, 0.0), min(closed, until)
        if is_open and end - begin >= SEEN_HOURS_MIN:
            opened += end - begin
            preempted += closed <= until
    return preempted, opened


def interpolate_own(scenario: Scenario, cell: int, work: float) -> Iterator[RecordedRun]:
    yield RecordedRun(
        spot_hours=scenario.spot[cell] * work / 1000,
        ondemand_hours=scenario.ondemand[cell] * work / 1000,
        hours=scenario.hours[cell] * work / 1000,
        preemptions=scenario.preemptions[cell],
    )


def forecast_by_model(case: Case, others: Sequence[Scenario], evidence: MarketEvidence) -> Forecast:
    found = forecast_run(
        work_hours=case.work, deadline_hours=case.deadline, start_hours=case.start, places=case.scenario.places,
        evidence=evidence, scenarios=others,
    )  # fmt: skip
    return Forecast(
        usd=found.quantiles(usd, SHARES),
        usd_mean=found.mean(usd),
        hours_mean=found.mean(hours),
        within_usd=lambda limit: found.chance(lambda run: usd(run) <= limit),
        within=lambda limit: found.chance(lambda run: run.hours <= limit),
    )


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Figures of one forecaster; coverage by level, reliability by bin as (forecast, actual, count)."""

    usd_coverage: Sequence[float]
    hours_coverage: Sequence[float]
    usd_bias: float
    hours_bias: float
    usd_loss: float  # mean quantile loss over the actual mean: sharpness and accuracy in one figure
    bins: Sequence[tuple[float, float, int]]
    brier: float
    climatology: float


def judge(cases: Sequence[Case], forecasts: Sequence[Forecast]) -> Marks:
    """Weigh every family equally, whatever the number of its recordings."""
    counts: dict[str, int] = defaultdict(int)
    for each in cases:
        counts[each.scenario.family] += 1
    weights = [1 / counts[each.scenario.family] for each in cases]
    spent = [usd(each.actual) / each.work for each in cases]
    taken = [each.actual.hours / each.work for each in cases]
    total = sum(weights)

    def mean(values: Sequence[float]) -> float:
        return sum(weight * value for weight, value in zip(weights, values, strict=True)) / total

    ranks = [
        (_rank(each.within_usd, usd(case.actual), case), _rank(each.within, case.actual.hours, case))
        for case, each in zip(cases, forecasts, strict=True)
    ]
    loss = [
        sum(max((usd(c.actual) - q) * s, (q - usd(c.actual)) * (1 - s)) for q, s in zip(f.usd, SHARES, strict=True))
        / c.work / len(SHARES)
        for c, f in zip(cases, forecasts, strict=True)
    ]  # fmt: skip
    bins, brier, climatology = judge_chances(cases, forecasts, weights)
    return Marks(
        usd_coverage=[mean([_cover(level, rank) for rank, _ in ranks]) for level in LEVELS],
        hours_coverage=[mean([_cover(level, rank) for _, rank in ranks]) for level in LEVELS],
        usd_bias=mean([f.usd_mean / c.work for c, f in zip(cases, forecasts, strict=True)]) / mean(spent) - 1,
        hours_bias=mean([f.hours_mean / c.work for c, f in zip(cases, forecasts, strict=True)]) / mean(taken) - 1,
        usd_loss=mean(loss) / mean(spent),
        bins=bins,
        brier=brier,
        climatology=climatology,
    )


def _rank(within: Callable[[float], float], actual: float, case: Case) -> tuple[float, float]:
    """The chances that less came about and that no more did. They differ where many runs are alike, such as those that
    were never interrupted: they are spread over all of that range."""
    return within(actual - TIE * case.work), within(actual + TIE * case.work)


def _cover(level: float, rank: tuple[float, float]) -> float:
    low, high = (1 - level) / 2, (1 + level) / 2
    if rank[1] - rank[0] < 1e-9:
        return float(low <= rank[0] <= high)
    return max(min(high, rank[1]) - max(low, rank[0]), 0.0) / (rank[1] - rank[0])


def judge_chances(
    cases: Sequence[Case], forecasts: Sequence[Forecast], weights: Sequence[float]
) -> tuple[list[tuple[float, float, int]], float, float]:
    """Judge the chance that jobs on spot alone are in time: with on-demand at the end, none is late."""
    said = list[tuple[float, float, float]]()
    for case, each, weight in zip(cases, forecasts, weights, strict=True):
        if case.deadline is None:
            for over in LIMITS:
                limit = case.work * over + case.start
                said.append((each.within(limit), float(case.actual.hours <= limit), weight))
    bins = list[tuple[float, float, int]]()
    for index in range(BINS):
        inside = [one for one in said if min(int(one[0] * BINS), BINS - 1) == index]
        total = sum(weight for _, _, weight in inside) or math.nan
        bins.append((sum(p * w for p, _, w in inside) / total, sum(a * w for _, a, w in inside) / total, len(inside)))
    total = sum(weight for _, _, weight in said)
    base = sum(actual * weight for _, actual, weight in said) / total
    brier = sum((chance - actual) ** 2 * weight for chance, actual, weight in said) / total
    return bins, brier, base * (1 - base)


def show(name: str, marks: Marks) -> None:
    def percents(values: Sequence[float]) -> str:
        return " ".join(f"{each * 100:5.1f}" for each in values)

    sys.stdout.write(
        f"{name}\n"
        f"  cost: within the 50/80/90 % interval {percents(marks.usd_coverage)} %, bias {marks.usd_bias:+.1%}, "
        f"quantile loss {marks.usd_loss:.4f}\n"
        f"  time: within the 50/80/90 % interval {percents(marks.hours_coverage)} %, bias {marks.hours_bias:+.1%}\n"
        f"  chance of the deadline, spot alone: Brier {marks.brier:.3f}, climatology {marks.climatology:.3f}; "
        "forecast/actual (count) "
        + ", ".join(f"{100 * said:.0f}/{100 * was:.0f} ({count})" for said, was, count in marks.bins)
        + "\n"
    )
    sys.stdout.flush()


def list_missed(marks: Marks) -> list[str]:
    found = []
    for name, covered in (("cost", marks.usd_coverage), ("time", marks.hours_coverage)):
        for level, share in zip(LEVELS, covered, strict=True):
            if abs(share - level) > COVERAGE_OFF_MAX:
                found.append(f"coverage of the {level:.0%} interval of {name}: {share:.1%}")
    if abs(marks.usd_bias) > BIAS_MAX:
        found.append(f"bias of mean cost: {marks.usd_bias:+.1%}")
    for said, was, count in marks.bins:
        if count and abs(said - was) > RELIABILITY_OFF_MAX:
            found.append(f"chance of the deadline: {said:.0%} said, {was:.0%} came true")
    if marks.brier >= marks.climatology:
        found.append(f"Brier score {marks.brier:.3f}, climatology {marks.climatology:.3f}")
    return found


def show_between(scenarios: Sequence[Scenario], folder: Path) -> None:
    """Replay terms between nodes of the table in the same markets; show forecasts of cost and time over replays."""
    markets = [each for each in list_markets(read_families(folder)) if len(each.traces) == 1]
    of = {each.name: [row for row in scenarios if row.market == each.name] for each in markets}
    sys.stdout.write(
        "between the nodes, over replays: work, deadline over work, start, spot price, save every (hours)\n"
    )
    for work, slack, start, price, every in BETWEEN:
        deadline = work * slack + start
        replayed = list[ReplayOutcome]()
        for market in markets:
            sites = tuple(make_site(each, start_hours=start, spot_usd_hour=price) for each in market.traces)
            case = ReplayCase(sites=sites, work_hours=work, deadline_hours=deadline, save_every_hours=every)
            longest, count = market.traces[0].hours, len(of[market.name])
            for index in range(count):
                replayed.append(replay(case, load_policy("adaptive"), longest * (index + 0.5) / count))
        lost = every / 2
        runs = interpolate_runs(
            [row for rows in of.values() for row in rows], work_hours=work, deadline_hours=deadline + lost,
            start_hours=start + lost,
        )  # fmt: skip
        cost = sum((each.spot_hours - lost) * price + each.ondemand_hours for each in runs)
        took = sum(each.hours - lost for each in runs)
        sys.stdout.write(
            f"  {work:g}, {slack:g}, {start:g}, {price:.2f}, {every:g}: "
            f"cost {cost / sum(each.usd for each in replayed):.3f}, "
            f"time {took / sum(each.hours for each in replayed):.3f}\n"
        )


def judge_choice(folder: Path) -> list[str]:
    """Zones with recorded prices: the policy over all of them against the policy in one, the cheapest by price at
    submission or the best in hindsight."""
    missed = []
    for group in sorted(each for each in folder.iterdir() if each.is_dir()):
        traces = read_traces(group)
        unit = min(each.ondemand_usd_hour or 1.0 for each in traces)
        sites = [
            make_site(
                each, start_hours=0.1, ondemand_usd_hour=(each.ondemand_usd_hour or unit) / unit,
                spot_usd_hour=each.prices[0] / unit,
            )
            for each in traces
        ]  # fmt: skip
        ours, best, dearest = 0.0, 0.0, 0.0
        for slack, index in itertools.product(CHOICE_SLACKS, range(CHOICE_STARTS)):
            hour = max(each.hours for each in traces) * (index + 0.5) / CHOICE_STARTS

            def cost(chosen: Sequence[Site], slack: float = slack, hour: float = hour) -> float:
                case = ReplayCase(sites=tuple(chosen), work_hours=24.0, deadline_hours=24.0 * slack + 0.1)
                return replay(case, load_policy("adaptive"), hour).usd

            alone = [cost([site]) for site in sites]
            prices = [site.read_step(site.find_step(hour))[2].usd_hour for site in sites]
            paid = cost(sites)
            ours, best = ours + paid, best + min(alone)
            dearest = max(dearest, paid / alone[prices.index(min(prices))])
        sys.stdout.write(
            f"choice in {group.name}: {ours / best:.3f} of the best place in hindsight, at most {dearest:.3f} of the "
            "cheapest by price\n"
        )
        if ours / best > CHOICE_MAX or dearest > DEARER_MAX:
            missed.append(f"choice in {group.name}")
    return missed


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--traces", type=Path, default=os.environ.get("BROKER_TRACES"), help="folder of families")
    arguments.add_argument("--runs", type=Path, required=True, help="table made by broker.lab.recorded_runs")
    arguments.add_argument(
        "--places", type=int, nargs="*", default=[1, 3, 6], help="only markets of this number of places"
    )
    arguments.add_argument("--recorded", action="store_true", help="judge no assembled groups, only recorded ones")
    arguments.add_argument("--between", action="store_true", help="replay terms that are no nodes of the table")
    arguments.add_argument("--zones", type=Path, help="judge the choice: folder of aligned zones with prices, by group")
    arguments.add_argument("--check", action="store_true", help="fail where a bar is missed")
    given = arguments.parse_args()
    if given.traces is None:
        arguments.error("pass --traces DIR or set BROKER_TRACES")
    scenarios = parse_scenarios(json.loads(given.runs.read_text()))
    cases = [
        each
        for each in list_cases(scenarios, Path(given.traces))
        if each.scenario.places in given.places and not (given.recorded and each.scenario.is_assembled)
    ]
    others = {
        family: [each for each in scenarios if each.family != family] for family in {each.family for each in scenarios}
    }
    sys.stdout.write(f"{len(cases)} runs in {len({each.scenario.market for each in cases})} markets\n")
    kinds: dict[str, Callable[[Case], MarketEvidence]] = {
        "market model, leave one family out, prior alone": lambda case: NOTHING,
        "  with availability at submission": lambda case: MarketEvidence(is_open=case.is_open),
        "  with own history of two days": lambda case: MarketEvidence(
            preemptions=case.preemptions, gang_hours=case.open_hours
        ),
        "  with both": lambda case: MarketEvidence(
            preemptions=case.preemptions, gang_hours=case.open_hours, is_open=case.is_open
        ),
    }
    marks = None
    for name, known in kinds.items():
        marks = judge(cases, [forecast_by_model(each, others[each.scenario.family], known(each)) for each in cases])
        show(name, marks)
    assert marks is not None
    missed = list_missed(marks)
    if given.between:
        show_between(scenarios, Path(given.traces))
    if given.zones:
        missed += judge_choice(given.zones)
    if given.check and missed:
        sys.exit("missed: " + "; ".join(missed))


if __name__ == "__main__":
    main()
