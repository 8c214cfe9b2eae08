"""Many replays of one job under several policies, and what they come to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from broker.spot.markets import Site
from broker.spot.optimum import find_optimum
from broker.spot.policies import ORACLES, load_policy
from broker.spot.replay import Case, Outcome, replay


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A case and the hour of its recordings at which the job is submitted."""

    case: Case
    from_hour: float


@dataclass(frozen=True, kw_only=True)
class Score:
    """One policy over all scenes. USD and hours; `over_optimum` is the mean ratio to the optimum where that is known,
    less one. Hours of jobs are from submission to end."""

    policy: str
    is_oracle: bool
    replays: int
    usd_mean: float
    usd_p95: float
    hours_mean: float
    hours_p95: float
    preemptions_mean: float
    moves_mean: float
    late: int
    spot_share: float
    over_optimum: float | None = None


@dataclass(frozen=True, kw_only=True)
class Study:
    scores: tuple[Score, ...]
    scenes: tuple[Scene, ...]
    outcomes: tuple[tuple[Outcome, ...], ...]  # by policy, by scene
    optima: tuple[float | None, ...]  # by scene; None where it was not looked for


def run_study(scenes: Sequence[Scene], policies: Sequence[str], *, optima_count: int) -> Study:
    """Every policy on every scene; the optimum on `optima_count` of them, evenly spread."""
    assert scenes and policies
    optima = list[float | None]([None] * len(scenes))
    for index in pick_evenly(len(scenes), optima_count):
        scene = scenes[index]
        best = find_optimum(
            scene.case.sites,
            work_hours=scene.case.work_hours,
            deadline_hours=scene.case.deadline_hours,
            from_hour=scene.from_hour,
        )
        optima[index] = best if math.isfinite(best) else None
    outcomes, scores = [], []
    for name in policies:
        policy, is_oracle = load_policy(name), name in ORACLES
        found = tuple(replay(scene.case, policy, scene.from_hour, is_oracle=is_oracle) for scene in scenes)
        outcomes.append(found)
        scores.append(_score(name, found, optima))
    return Study(scores=tuple(scores), scenes=tuple(scenes), outcomes=tuple(outcomes), optima=tuple(optima))


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


def _score(name: str, outcomes: Sequence[Outcome], optima: Sequence[float | None]) -> Score:
    count = len(outcomes)
    usd, hours = [each.usd for each in outcomes], [each.hours for each in outcomes]
    ratios = [each.usd / best for each, best in zip(outcomes, optima, strict=True) if best]
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
        moves_mean=sum(each.moves for each in outcomes) / count,
        late=sum(each.is_late for each in outcomes),
        spot_share=on_spot / paid if paid else 0.0,
        over_optimum=sum(ratios) / len(ratios) - 1 if ratios else None,
    )
