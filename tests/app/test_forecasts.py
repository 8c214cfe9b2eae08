"""The forecast of a live job: the plan of its rest, less what its machines have behind them."""

from __future__ import annotations

import pytest

from broker.app.forecasts import read_rest, read_start_hours
from broker.optimizer.forecast import forecast_plan
from broker.types.forecasts import NOT_BEGUN, BegunStart
from tests.optimizer.market import offer, plan

GOAL = "goal: {work: 40h, deadline: 60h, confidence: 0.01}"
TEXT = f"resources: {{accelerators: H100:8%s}}\n{GOAL}\ncheckpoint: {{restart: 30m}}"
START_HOURS = 0.5
UNBILLED_HOURS = 50 / 3600  # aws: 30 s until a lost node is noticed, and 20 s until the next one is running


@pytest.mark.parametrize("hours", [0.0, 0.1, START_HOURS])
def test_the_rest_on_spot_has_the_rest_of_the_first_start(hours: float) -> None:
    made = plan(TEXT % ", use_spot: true", [offer()])
    whole = forecast_plan(made)
    assert whole is not None and read_start_hours(made) == START_HOURS
    found = read_rest(made, 7.0, BegunStart(hours=hours, is_spot=True), deadline_hours=60.0)
    for name in ("p10", "p50", "p90"):
        assert getattr(found.hours_left, name) == pytest.approx(getattr(whole.hours, name) - hours)
        paid_usd = 10.0 * max(hours - UNBILLED_HOURS, 0.0)
        assert getattr(found.usd, name) == pytest.approx(7.0 + getattr(whole.usd, name) - paid_usd)
    assert found.preemptions == whole.preemptions
    assert found.deadline_chance is not None and whole.deadline_chance is not None
    assert found.deadline_chance >= whole.deadline_chance and (
        hours > 0 or found.deadline_chance == whole.deadline_chance
    )


@pytest.mark.parametrize("is_spot", [False, True])
def test_the_rest_on_demand_begins_anew_only_on_other_machines(is_spot: bool) -> None:
    made = plan(TEXT % ", use_spot: false", [offer()])
    found = read_rest(made, 7.0, BegunStart(hours=START_HOURS, is_spot=is_spot), deadline_hours=40.2)
    assert found.hours_left.p50 == pytest.approx(40.0 + START_HOURS * is_spot)
    billed_hours = 40.0 + (START_HOURS - UNBILLED_HOURS) * is_spot
    assert found.usd.p50 == pytest.approx(7.0 + 40.0 * billed_hours)
    assert found.deadline_chance == (0.0 if is_spot else 1.0)
    assert read_rest(made, 7.0, NOT_BEGUN, deadline_hours=None).deadline_chance is None
