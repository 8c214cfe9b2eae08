"""The hedge timer: learn a cloud's usual response time, and request another placement after that time.

Uses the rule of TCP's retransmission timer (RFC 6298): the smoothed mean plus four smoothed deviations.
"""

from __future__ import annotations

from enum import StrEnum

from broker.frozen import frozen
from broker.state.calls import ResponseTime, ResponseTimeRows


class Answer(StrEnum):
    """The two responses of a cloud whose times are measured."""

    CREATED = "created"  # the create call has returned the gang
    WHOLE = "whole"  # from then until every node is running


@frozen
class HedgeLimits:
    """Limits in seconds. `prior_s` applies before the first measurement; the others bound the learned value."""

    prior_s: float
    least_s: float
    most_s: float


# EC2 answers RunInstances within seconds, and GCE's operations take about ten seconds; nodes boot in one to two
# minutes. The minimum avoids unnecessary second requests from a busy machine; the maximum keeps hedging useful on a
# slow day.
LIMITS = {
    Answer.CREATED: HedgeLimits(prior_s=20.0, least_s=5.0, most_s=60.0),
    Answer.WHOLE: HedgeLimits(prior_s=120.0, least_s=30.0, most_s=300.0),
}


class HedgeTimer:
    """Learn the response times of clouds, and when to request a second placement."""

    def __init__(self, response_times: ResponseTimeRows) -> None:
        self._response_times = response_times

    def measure_s(self, cloud: str, answer: Answer) -> float:
        """Return the seconds to wait for this answer before also requesting another placement."""
        return bound(self._response_times.get(cloud, answer), LIMITS[answer])

    def expect_s(self, cloud: str, answer: Answer) -> float:
        """Return the mean seconds until this answer; 0 before the first measurement."""
        known = self._response_times.get(cloud, answer)
        return 0.0 if known is None else min(known.mean_s, LIMITS[answer].most_s)

    def note(self, cloud: str, answer: Answer, took_s: float) -> None:
        """Learn from an answer. Refusals and lost answers do not count.

        The learned value is capped at the maximum: otherwise, a clock jump or a suspended machine would count as an
        answer that took a day, which dozens of normal answers would not undo.
        """
        learned_s = min(LIMITS[answer].most_s, max(0.0, took_s))
        self._response_times.update(cloud, answer, lambda known: update_response_time(known, learned_s))


def bound(known: ResponseTime | None, limits: HedgeLimits) -> float:
    """Return the seconds to wait: mean plus four deviations (RFC 6298), within limits.

    Without measurements, return the prior.
    """
    if known is None:
        return limits.prior_s
    return min(limits.most_s, max(limits.least_s, known.mean_s + 4.0 * known.deviation_s))


def update_response_time(known: ResponseTime | None, took_s: float) -> ResponseTime:
    """Update mean and deviation with a measurement in seconds, with the weights 1/8 and 1/4 of RFC 6298."""
    if known is None:
        return ResponseTime(mean_s=took_s, deviation_s=took_s / 2)
    return ResponseTime(
        mean_s=known.mean_s + (took_s - known.mean_s) / 8,
        deviation_s=known.deviation_s + (abs(took_s - known.mean_s) - known.deviation_s) / 4,
    )
