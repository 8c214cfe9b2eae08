"""How long a cloud usually takes to answer, learned from its own answers: after that the next place is asked too.

The rule of TCP's retransmission timer (RFC 6298): smoothed mean and deviation, and four deviations of patience.
"""

from __future__ import annotations

from enum import StrEnum

from broker.nouns import noun
from broker.state.calls import Pace, PaceRows


class Answer(StrEnum):
    CREATED = "created"  # the create call was answered with the gang
    WHOLE = "whole"  # after that, every node runs


@noun
class HedgeLimits:
    """Seconds. `prior_s` stands where nothing was learned yet; the others bound what was learned."""

    prior_s: float
    least_s: float
    most_s: float


# EC2 answers RunInstances within seconds and GCE's operations within some ten; nodes boot in one to two minutes.
# The least keeps a busy machine from asking twice for nothing, the most keeps a slow day from ending all hedging.
LIMITS = {
    Answer.CREATED: HedgeLimits(prior_s=20.0, least_s=5.0, most_s=60.0),
    Answer.WHOLE: HedgeLimits(prior_s=120.0, least_s=30.0, most_s=300.0),
}


class HedgeTimer:
    def __init__(self, paces: PaceRows) -> None:
        self._paces = paces

    def measure_s(self, cloud: str, answer: Answer) -> float:
        """Seconds to wait for this answer before another place is asked as well."""
        return bound(self._paces.get(cloud, answer), LIMITS[answer])

    def note(self, cloud: str, answer: Answer, took_s: float) -> None:
        """Refusals and lost answers teach nothing: only what came is noted.

        At most the longest patience is learned: a wall clock that jumped, or a machine that slept, would otherwise
        count as an answer that took a day, and dozens of good ones would not undo it.
        """
        learned_s = min(LIMITS[answer].most_s, max(0.0, took_s))
        self._paces.learn(cloud, answer, lambda pace: learn(pace, learned_s))


def bound(pace: Pace | None, limits: HedgeLimits) -> float:
    if pace is None:
        return limits.prior_s
    return min(limits.most_s, max(limits.least_s, pace.mean_s + 4.0 * pace.deviation_s))


def learn(pace: Pace | None, took_s: float) -> Pace:
    if pace is None:
        return Pace(mean_s=took_s, deviation_s=took_s / 2)
    return Pace(
        mean_s=pace.mean_s + (took_s - pace.mean_s) / 8,
        deviation_s=pace.deviation_s + (abs(took_s - pace.mean_s) - pace.deviation_s) / 4,
    )
