"""How often spot machines are taken away."""

from __future__ import annotations

import math

HOURS_A_MONTH = 730.0

# The advisor's top band is "over 20 %": 30 % is assumed, as its bound is not published.
_OVER_TWENTY_PERCENT = 30.0
# Clouds that publish no band: the middle of the advisor's five is assumed.
UNKNOWN_BAND_PERCENT = 15.0


def hazard_per_node_hour(interruption_band: float | None) -> float:
    """Preemptions per node-hour from a band's upper bound in percent a month.

    A share p of machines gone within a month of T hours is a constant hazard of -ln(1 - p) / T.
    """
    band = UNKNOWN_BAND_PERCENT if interruption_band is None else interruption_band
    share = min(_OVER_TWENTY_PERCENT if band > 20 else band, 99.0) / 100
    return -math.log1p(-share) / HOURS_A_MONTH
