"""Many replays of one job under several policies, and what they come to."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from broker.lab.markets import Site
from broker.lab.offline_optimum import find_optimum, list_intervals
from broker.lab.replay import Case, Outcome, replay
from broker.spot.policies import ORACLES, load_policy

# The optimum's plan may cost at most about so much more than the best: its search is ten times as fast as at 0.02 %.
OPTIMUM_TOLERANCE = 0.003
# Changes of markets that the optimum is searched over where its count is left open: 1,000 take about 0.5 s.
OPTIMA_CHANGES = 2_500


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A case and the hour of its recordings at which the job is submitted."""

    case: Case
    from_hour: float


@dataclass(frozen=True, kw_only=True)
class Score:
    """One policy over all scenes. USD and hours; `over_optimum` is `usd_mean` over the study's `optimum_usd_mean`, less
    one, so that it ranks policies as their costs do. Hours of jobs are from submission to end."""

    policy: str
    is_oracle: bool
    replays: int
    usd_mean: float
    usd_p95: float
    hours_mean: float
    hours_p95: float
    preemptions_mean: float
    late: int
    spot_share: float
    over_optimum: float | None = None


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """`optimum_usd_mean` is of all scenes: where `optima` lacks some, as `estimate_optimum` fills them in."""

    scores: tuple[Score, ...]
    scenes: tuple[Scene, ...]
    outcomes: tuple[tuple[Outcome, ...], ...]  # by policy, by scene
    optima: tuple[float | None, ...]  # by scene; None where it was not looked for
    optimum_usd_mean: float | None = None


def run_study(
    scenes: Sequence[Scene],
    policies: Sequence[str],
    *,
    optima_count: int | None,
    tell: Callable[[int, int, str], None] | None = None,
) -> Benchmark:
    """Every policy on every scene; the optimum on `optima_count` of them, evenly spread, or on as many as
    `OPTIMA_CHANGES` allows. `tell` hears (steps done, steps in all, what is done next)."""
    assert scenes and policies
    chosen = pick_evenly(len(scenes), count_optima(scenes) if optima_count is None else optima_count)
    steps, done = len(scenes) * len(policies) + len(chosen), 0

    def step(name: str) -> None:
        nonlocal done
        if tell is not None:
            tell(done, steps, name)
        done += 1

    outcomes = []
    for name in policies:
        policy, is_oracle = load_policy(name), name in ORACLES
        found = []
        for scene in scenes:
            step(name)
            found.append(replay(scene.case, policy, scene.from_hour, is_oracle=is_oracle))
        outcomes.append(tuple(found))
    optima = list[float | None]([None] * len(scenes))
    for index in chosen:
        step("optimum")
        optima[index] = _find_optimum(scenes[index])
    best = estimate_optimum(outcomes, optima)
    scores = tuple(_score(name, found, best) for name, found in zip(policies, outcomes, strict=True))
    return Benchmark(
        scores=scores, scenes=tuple(scenes), outcomes=tuple(outcomes), optima=tuple(optima), optimum_usd_mean=best
    )


def count_optima(scenes: Sequence[Scene]) -> int:
    """Of how many scenes the optimum is soon found; at least one."""
    counted: dict[int, int] = {}  # scenes of one group of markets change about as often
    for scene in scenes:
        case = scene.case
        if id(case) not in counted:
            counted[id(case)] = len(list_intervals(case.sites, scene.from_hour, case.deadline_hours))
    changes = sum(counted[id(scene.case)] for scene in scenes) / len(scenes)
    return max(1, min(len(scenes), round(OPTIMA_CHANGES / max(1.0, changes))))


def estimate_optimum(outcomes: Sequence[Sequence[Outcome]], optima: Sequence[float | None]) -> float | None:
    """Mean optimum of all scenes; None where none is known.

    Where some are not known, the known ones' share of what the cheapest policy paid on the very same scenes is taken
    for all. One denominator for all policies: those that are compared on other scenes than their mean cost could rank
    the other way round.
    """
    known = [(index, best) for index, best in enumerate(optima) if best is not None]
    if not known:
        return None
    found = sum(best for _, best in known)
    if len(known) == len(optima):
        return found / len(known)
    cheapest = min(outcomes, key=lambda each: sum(one.usd for one in each))
    paid = sum(cheapest[index].usd for index, _ in known)
    return found / paid * sum(each.usd for each in cheapest) / len(cheapest)


def _find_optimum(scene: Scene) -> float | None:
    best = find_optimum(
        scene.case.sites, work_hours=scene.case.work_hours, deadline_hours=scene.case.deadline_hours,
        from_hour=scene.from_hour, tolerance=OPTIMUM_TOLERANCE,
    )  # fmt: skip
    return best if math.isfinite(best) else None


def spread_starts(sites: Sequence[Site], deadline_hours: float, count: int) -> list[float]:
    """Hours of submission, evenly spread over the longest recording; recordings repeat where a job outlasts them."""
    longest = max(site.trace.hours for site in sites)
    room = longest - deadline_hours if longest > deadline_hours else longest
    return [room * index / max(count, 1) for index in range(count)]


def pick_evenly(total: int, count: int) -> list[int]:
    count = min(max(count, 0), total)
    return [index * total // count for index in range(count)]


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that at least `share` of all do not exceed."""
    ranked = sorted(values)
    return ranked[max(math.ceil(share * len(ranked)) - 1, 0)]


def _score(name: str, outcomes: Sequence[Outcome], optimum_usd_mean: float | None) -> Score:
    count = len(outcomes)
    usd, hours = [each.usd for each in outcomes], [each.hours for each in outcomes]
    on_spot = sum(each.spot_hours for each in outcomes)
    paid = on_spot + sum(each.ondemand_hours for each in outcomes)
    return Score(
        policy=name,
        is_oracle=name in ORACLES,
        replays=count,
        usd_mean=sum(usd) / count,
        usd_p95=percentile(usd, 0.95),
        hours_mean=sum(hours) / count,
        hours_p95=percentile(hours, 0.95),
        preemptions_mean=sum(each.preemptions for each in outcomes) / count,
        late=sum(each.is_late for each in outcomes),
        spot_share=on_spot / paid if paid else 0.0,
        over_optimum=sum(usd) / count / optimum_usd_mean - 1 if optimum_usd_mean else None,
    )
