"""Hazards of preemption of spot machines from published bands and from observations of your own machines."""

from __future__ import annotations

import math

from broker.frozen import frozen

HOURS_A_MONTH = 730.0

# The advisor's top band is "over 20 %": 30 % is assumed because its bound is not published.
_OVER_TWENTY_PERCENT = 30.0
# Clouds that publish no band: the middle of the advisor's five is assumed.
UNKNOWN_BAND_PERCENT = 15.0


@frozen
class Observation:
    """Observed preemptions of single nodes of one instance type at one place, and the spot node-hours of exposure.

    Both may be discounted by age, so they need not be integers.
    """

    preemptions: float
    node_hours: float


def find_hazard_per_node_hour(interruption_band: float | None) -> float:
    """Return preemptions per node-hour from a band's upper bound in percent per month.

    If a share p of machines is preempted within a month of T hours, the constant hazard is -ln(1 - p) / T.
    """
    band = UNKNOWN_BAND_PERCENT if interruption_band is None else interruption_band
    share = min(_OVER_TWENTY_PERCENT if band > 20 else band, 99.0) / 100
    return -math.log1p(-share) / HOURS_A_MONTH
