"""Hazards of preemption of spot machines, from published bands and from observations."""

from __future__ import annotations

import math

from broker.frozen import frozen

HOURS_A_MONTH = 730.0

# The advisor's top band is "over 20 %": 30 % is assumed, as its bound is not published.
_OVER_TWENTY_PERCENT = 30.0
# Clouds that publish no band: the middle of the advisor's five is assumed.
UNKNOWN_BAND_PERCENT = 15.0

# A band is a monthly statistic of one machine, so it weighs as much as a month of observing one machine.
PRIOR_NODE_HOURS = HOURS_A_MONTH

# One place in a hundred thousand is assumed to behave unlike its band and like the zones of public recordings, which
# close every few hours (see broker.spot.prior). Without this component, dozens of preemptions a day would hardly move
# the posterior away from the band.
UNLIKE_BAND_SHARE = 1e-5
UNLIKE_BAND_COUNT, UNLIKE_BAND_HOURS = 0.5, 2.0  # Gamma: mean 0.25 per hour, as broad as the recordings


@frozen
class Observation:
    """Observed preemptions of single nodes of one instance type at one place, and the spot node-hours of exposure.

    Both may be discounted by age, so they need not be integers.
    """

    preemptions: float
    node_hours: float


def hazard_per_node_hour(interruption_band: float | None) -> float:
    """Return preemptions per node-hour from a band's upper bound in percent per month.

    If a share p of machines is preempted within a month of T hours, the constant hazard is -ln(1 - p) / T.
    """
    band = UNKNOWN_BAND_PERCENT if interruption_band is None else interruption_band
    share = min(_OVER_TWENTY_PERCENT if band > 20 else band, 99.0) / 100
    return -math.log1p(-share) / HOURS_A_MONTH


def mix_hazard(prior_per_node_hour: float, seen: Observation | None) -> float:
    """Return the posterior mean of preemptions per node-hour under a mixture of two Gamma priors.

    One component says that the band holds: Gamma(h0 B, B) with mean h0 and weight B = PRIOR_NODE_HOURS. The other says
    that the place is unlike its band: Gamma(UNLIKE_BAND_COUNT, UNLIKE_BAND_HOURS). k preemptions in t node-hours are
    Poisson, so Gamma(a, b) is updated to Gamma(a + k, b + t), and each component is reweighted by its marginal
    likelihood of the observations.
    """
    if seen is None:
        return prior_per_node_hour
    k, t = seen.preemptions, seen.node_hours
    assert k >= 0 and t >= 0
    count = prior_per_node_hour * PRIOR_NODE_HOURS
    by_band, by_itself = (count + k) / (PRIOR_NODE_HOURS + t), (UNLIKE_BAND_COUNT + k) / (UNLIKE_BAND_HOURS + t)
    if by_itself <= by_band or count <= 0:
        return by_band
    odds = UNLIKE_BAND_SHARE * math.exp(
        min(_log_chance(UNLIKE_BAND_COUNT, UNLIKE_BAND_HOURS, k, t) - _log_chance(count, PRIOR_NODE_HOURS, k, t), 700)
    )
    return by_band + (by_itself - by_band) * odds / (1 + odds)


def _log_chance(count: float, hours: float, k: float, t: float) -> float:
    """Return the log marginal likelihood of k preemptions in t hours under Gamma(count, hours), up to a constant."""
    return math.lgamma(count + k) - math.lgamma(count) + count * math.log(hours) - (count + k) * math.log(hours + t)
