"""The error budget of a service: how much of the allowed time with too few replicas is used up. Pure.

Availability is a share of time, so time that is not used up may be spent: on fewer spare replicas while markets are
calm. If too much is used up, because losses are more frequent or more correlated than the model assumes, more are kept.

    1 % of the time allowed, so 1.68 h of a week
    two days without a shortage       0.48 h saved      pressure exp(-0.48 / 1.68) = 0.75
    then 3 h with too few replicas    2.49 h too much   pressure exp( 2.49 / 1.68) = 4.4
"""

from __future__ import annotations

import math
from dataclasses import replace

from broker.frozen import frozen

WINDOW_HOURS = 7 * 24.0  # older observations are forgotten exponentially
EXPONENT_MAX = 3.0  # a pressure of at most 20
# A shortage lasts about one cold start. There are few in a week, but more than the model predicts in markets worse than
# those it was fitted to: half of the allowed time is reserved for that.
SPENT_SHARE = 0.5


def find_allowed_share(availability: float) -> float:
    """Return the share of time with too few replicas that a service spends."""
    return max(SPENT_SHARE * (1 - availability), 1e-9)


@frozen
class ErrorBudget:
    """Hours observed, and those of them with too few ready replicas, both discounted by age."""

    hours: float = 0.0
    short_hours: float = 0.0

    def observe(self, hours: float, *, is_short: bool) -> ErrorBudget:
        """Add an observation of this duration."""
        kept = math.exp(-hours / WINDOW_HOURS)
        return replace(
            self, hours=self.hours * kept + hours, short_hours=self.short_hours * kept + (hours if is_short else 0.0)
        )

    def find_pressure(self, availability: float) -> float:
        """Return the factor on the penalty of a shortage: 1 while the budget is spent at the allowed rate."""
        allowed = find_allowed_share(availability)
        exponent = (self.short_hours - allowed * self.hours) / (allowed * WINDOW_HOURS)
        return math.exp(min(exponent, EXPONENT_MAX))
