"""How often spot machines are taken away: by published bands, and by what was seen."""

from __future__ import annotations

import math

from broker.nouns import noun

HOURS_A_MONTH = 730.0

# The advisor's top band is "over 20 %": 30 % is assumed, as its bound is not published.
_OVER_TWENTY_PERCENT = 30.0
# Clouds that publish no band: the middle of the advisor's five is assumed.
UNKNOWN_BAND_PERCENT = 15.0

# A band is a month's statistic of one machine: it weighs as much as a month of one machine that one watched oneself.
PRIOR_NODE_HOURS = HOURS_A_MONTH


@noun
class Observation:
    """What was seen of one instance type at one place: preemptions of single nodes, in so many spot node-hours.

    Both may be weighed by how old they are, so neither is a whole number."""

    preemptions: float
    node_hours: float


def hazard_per_node_hour(interruption_band: float | None) -> float:
    """Preemptions per node-hour from a band's upper bound in percent a month.

    A share p of machines gone within a month of T hours is a constant hazard of -ln(1 - p) / T.
    """
    band = UNKNOWN_BAND_PERCENT if interruption_band is None else interruption_band
    share = min(_OVER_TWENTY_PERCENT if band > 20 else band, 99.0) / 100
    return -math.log1p(-share) / HOURS_A_MONTH


def mix_hazard(prior_per_node_hour: float, seen: Observation | None) -> float:
    """Preemptions per node-hour after seeing some: the mean of a Gamma posterior.

    The prior is Gamma(h0 B, B) with mean h0 and weight B = PRIOR_NODE_HOURS; k preemptions in t node-hours are Poisson,
    which makes the posterior Gamma(h0 B + k, B + t), with mean (h0 B + k) / (B + t).
    """
    if seen is None:
        return prior_per_node_hour
    assert seen.preemptions >= 0 and seen.node_hours >= 0
    return (prior_per_node_hour * PRIOR_NODE_HOURS + seen.preemptions) / (PRIOR_NODE_HOURS + seen.node_hours)
