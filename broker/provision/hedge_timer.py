"""The hedge timer: learn how long a cloud usually takes to answer, and request another placement after that time.

Uses the rule of TCP's retransmission timer (RFC 6298): the smoothed mean plus four smoothed deviations.
"""

from __future__ import annotations

from enum import StrEnum

from broker.frozen import frozen
from broker.state.calls import ResponseTime, ResponseTimeRows


class Answer(StrEnum):
    """The two answers of a cloud whose response times are measured."""

    CREATED = "created"  # the create call has returned the gang
    WHOLE = "whole"  # from there, until every node runs


@frozen
class HedgeLimits:
    """Limits in seconds. `prior_s` applies before the first measurement; the others bound the learned value."""

    prior_s: float
    least_s: float
    most_s: float


# EC2 answers RunInstances within seconds and GCE's operations within some ten; nodes boot in one to two minutes.
# The minimum avoids needless second requests from a busy machine, the maximum keeps hedging alive on a slow day.
LIMITS = {
    Answer.CREATED: HedgeLimits(prior_s=20.0, least_s=5.0, most_s=60.0),
    Answer.WHOLE: HedgeLimits(prior_s=120.0, least_s=30.0, most_s=300.0),
}


class HedgeTimer:
    """Learn how long clouds take to answer, and when to request a second placement."""

    def __init__(self, response_times: ResponseTimeRows) -> None:
        self._response_times = response_times

    def measure_s(self, cloud: str, answer: Answer) -> float:
        """Return seconds to wait for this answer before another placement is requested as well."""
        return bound(self._response_times.get(cloud, answer), LIMITS[answer])

    def expect_s(self, cloud: str, answer: Answer) -> float:
        """Return the mean seconds until this answer; 0 before one was measured."""
        known = self._response_times.get(cloud, answer)
        return 0.0 if known is None else min(known.mean_s, LIMITS[answer].most_s)

    def note(self, cloud: str, answer: Answer, took_s: float) -> None:
        """Learn from an answer. Refusals and lost answers are not noted.

        The learned value is capped at the maximum: a wall clock that jumped, or a machine that slept, would otherwise
        count as an answer that took a day, and dozens of normal answers would not undo it.
        """
        learned_s = min(LIMITS[answer].most_s, max(0.0, took_s))
        self._response_times.learn(cloud, answer, lambda known: learn(known, learned_s))


def bound(known: ResponseTime | None, limits: HedgeLimits) -> float:
    """Return seconds to wait: mean plus four deviations (RFC 6298), within limits; without measurements, the prior."""
    if known is None:
        return limits.prior_s
    return min(limits.most_s, max(limits.least_s, known.mean_s + 4.0 * known.deviation_s))


def learn(known: ResponseTime | None, took_s: float) -> ResponseTime:
    """Update mean and deviation with a measurement in seconds, with the weights 1/8 and 1/4 of RFC 6298."""
    if known is None:
        return ResponseTime(mean_s=took_s, deviation_s=took_s / 2)
    return ResponseTime(
        mean_s=known.mean_s + (took_s - known.mean_s) / 8,
        deviation_s=known.deviation_s + (abs(took_s - known.mean_s) - known.deviation_s) / 4,
    )
