"""A forecast as it is kept with a job, to be compared with what happened."""

from __future__ import annotations

from broker.nouns import noun

QUANTILES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)


@noun
class ForecastRecord:
    """The forecast at submission: quantiles, at `QUANTILES`, of USD and of hours from submission to end.

    Intervals are those of the market model, without any widening by the results of earlier jobs.
    """

    usd: tuple[float, ...]
    hours: tuple[float, ...]
    usd_mean: float
    hours_mean: float
    deadline_hours: float | None = None
    deadline_chance: float | None = None
