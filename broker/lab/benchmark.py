"""Benchmark of spot policies: many replays of one job under each, with summary statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from broker.lab.markets import Site
from broker.lab.offline_optimum import list_intervals
from broker.lab.parts import Scene, run_parts
from broker.lab.replay import ReplayOutcome
from broker.spot.policies import ORACLES

# The total of market changes over which the optimum is searched by default: 1,000 take about 0.5 s.
OPTIMA_CHANGES = 2_500


@dataclass(frozen=True, kw_only=True)
class Score:
    """The result of one policy over all scenes, in USD and hours from submission to end.

    `over_optimum` is the share by which `usd_mean` exceeds the study's `optimum_usd_mean`; it ranks policies as their
    mean costs do.
    """

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
    """All results. `optimum_usd_mean` covers all scenes; `estimate_optimum` fills in those missing in `optima`."""

    scores: tuple[Score, ...]
    scenes: tuple[Scene, ...]
    outcomes: tuple[tuple[ReplayOutcome, ...], ...]  # by policy, by scene
    optima: tuple[float | None, ...]  # by scene; None if it was not computed
    optimum_usd_mean: float | None = None


def run_study(
    scenes: Sequence[Scene],
    policies: Sequence[str],
    *,
    optima_count: int | None,
    on_step: Callable[[int, int, str], None] | None = None,
    workers: int = 1,
) -> Benchmark:
    """Replay every policy on every scene, in several processes if the study is large enough and `workers` allows it.

    The optimum is computed for `optima_count` scenes, evenly spread, or for as many as `OPTIMA_CHANGES` allows.
    `on_step` gets (completed steps, all steps, name of the next step).
    """
    assert scenes and policies
    chosen = pick_evenly(len(scenes), count_optima(scenes) if optima_count is None else optima_count)
    found: dict[str, dict[int, ReplayOutcome]] = {name: {} for name in policies}
    optima = list[float | None]([None] * len(scenes))
    tell = on_step or (lambda done, total, name: None)
    for part, results in run_parts(scenes, policies, chosen, workers=workers, on_step=tell):
        for index, result in zip(part.indices, results, strict=True):
            if isinstance(result, ReplayOutcome):
                found[part.name][index] = result
            else:
                optima[index] = result
    outcomes = [tuple(found[name][index] for index in range(len(scenes))) for name in policies]
    best = estimate_optimum(outcomes, optima)
    scores = tuple(_score(name, replays, best) for name, replays in zip(policies, outcomes, strict=True))
    return Benchmark(
        scores=scores, scenes=tuple(scenes), outcomes=tuple(outcomes), optima=tuple(optima), optimum_usd_mean=best
    )


def count_optima(scenes: Sequence[Scene]) -> int:
    """Return the number of scenes, at least one, for which the optimum can be computed quickly."""
    counted: dict[int, int] = {}  # scenes of one group of markets change about equally often
    for scene in scenes:
        case = scene.case
        if id(case) not in counted:
            counted[id(case)] = len(list_intervals(case.sites, scene.from_hour, case.deadline_hours))
    changes = sum(counted[id(scene.case)] for scene in scenes) / len(scenes)
    return max(1, min(len(scenes), round(OPTIMA_CHANGES / max(1.0, changes))))


def estimate_optimum(outcomes: Sequence[Sequence[ReplayOutcome]], optima: Sequence[float | None]) -> float | None:
    """Estimate the mean optimum of all scenes; None if no optimum is known.

    If some are missing, the known optima are extrapolated by their ratio to the cost of the cheapest policy on the same
    scenes. All policies share this denominator: with different scenes for the ratio and the mean cost, policies could
    rank the other way round.
    """
    computed = [(index, best) for index, best in enumerate(optima) if best is not None]
    if not computed:
        return None
    total = sum(best for _, best in computed)
    if len(computed) == len(optima):
        return total / len(computed)
    cheapest = min(outcomes, key=lambda replays: sum(outcome.usd for outcome in replays))
    paid = sum(cheapest[index].usd for index, _ in computed)
    return total / paid * sum(outcome.usd for outcome in cheapest) / len(cheapest)


def spread_starts(sites: Sequence[Site], deadline_hours: float, count: int) -> list[float]:
    """Return submission hours, evenly spread over the longest recording; recordings repeat if a job outlasts them."""
    longest = max(site.trace.hours for site in sites)
    room = longest - deadline_hours if longest > deadline_hours else longest
    return [room * index / max(count, 1) for index in range(count)]


def pick_evenly(total: int, count: int) -> list[int]:
    """Return `count` indices below `total`, evenly spread; at most `total` of them."""
    count = min(max(count, 0), total)
    return [index * total // count for index in range(count)]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of all values do not exceed."""
    ranked = sorted(values)
    return ranked[max(math.ceil(share * len(ranked)) - 1, 0)]


def _score(name: str, outcomes: Sequence[ReplayOutcome], optimum_usd_mean: float | None) -> Score:
    count = len(outcomes)
    usd, hours = [outcome.usd for outcome in outcomes], [outcome.hours for outcome in outcomes]
    on_spot = sum(outcome.spot_hours for outcome in outcomes)
    paid = on_spot + sum(outcome.ondemand_hours for outcome in outcomes)
    return Score(
        policy=name,
        is_oracle=name in ORACLES,
        replays=count,
        usd_mean=sum(usd) / count,
        usd_p95=percentile(usd, 0.95),
        hours_mean=sum(hours) / count,
        hours_p95=percentile(hours, 0.95),
        preemptions_mean=sum(outcome.preemptions for outcome in outcomes) / count,
        late=sum(outcome.is_late for outcome in outcomes),
        spot_share=on_spot / paid if paid else 0.0,
        over_optimum=sum(usd) / count / optimum_usd_mean - 1 if optimum_usd_mean else None,
    )
