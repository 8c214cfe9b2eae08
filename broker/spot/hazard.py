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

# One place in a hundred thousand is taken to be nothing like its band, but like the zones of public recordings: they
# close every few hours (see broker.spot.prior). Without that, dozens of preemptions a day would hardly count against a
# band.
UNLIKE_BAND_SHARE = 1e-5
UNLIKE_BAND_COUNT, UNLIKE_BAND_HOURS = 0.5, 2.0  # Gamma: a mean of 0.25 an hour, as broad as the recordings are


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
    """Preemptions per node-hour after seeing some: the mean of a mixture of two Gamma posteriors.

    Either the band holds: Gamma(h0 B, B) with mean h0 and weight B = PRIOR_NODE_HOURS. Or the place is unlike its band:
    Gamma(UNLIKE_BAND_COUNT, UNLIKE_BAND_HOURS). k preemptions in t node-hours are Poisson, so each Gamma(a, b) becomes
    Gamma(a + k, b + t), and how far each is believed goes by the chance that it gave to what was seen.
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
    """Of k preemptions in t hours where the hazard is Gamma(count, hours), but for what all priors have in common."""
    return math.lgamma(count + k) - math.lgamma(count) + count * math.log(hours) - (count + k) * math.log(hours + t)
