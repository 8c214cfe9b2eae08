"""The forecast of load adds replicas before a rise needs them, and nothing else."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.serve.forecasting import RATIO_MAX, LoadForecaster, LoadMinute, forecast_demand
from broker.serve.scaling import Demand, ScalingState, count_replicas, scale
from broker.types import ReplicaPolicy

POLICY = ReplicaPolicy(replicas_min=2, replicas_max=60, target_qps={"": 2.0}, downscale_delay_s=1200.0)
COLD_S, STEP_S = 600.0, 20.0


def make_minutes(*values: float) -> list[LoadMinute]:
    return [LoadMinute(qps=each, in_flight=2 * each) for each in values]


def test_rise_is_continued_to_the_end_of_a_cold_start() -> None:
    minutes = make_minutes(*range(2, 12))
    found = forecast_demand(minutes, Demand(qps=11.0, in_flight=22.0), lead_s=300)
    assert (found.qps, found.in_flight) == (pytest.approx(16.0), pytest.approx(32.0))
    assert forecast_demand(minutes, Demand(qps=11.0), lead_s=3600).qps == pytest.approx(21.0), (
        "not beyond what was seen"
    )
    assert forecast_demand(minutes, Demand(qps=7.0), lead_s=600).qps == RATIO_MAX * 7.0
    assert forecast_demand(minutes[:6], Demand(qps=7.0), lead_s=300).qps == 7.0, "too few minutes"


@given(
    values=st.lists(st.floats(0, 1e6), max_size=15),
    qps=st.floats(0, 1e6),
    in_flight=st.floats(0, 1e6),
    lead_s=st.floats(0, 7200),
    is_known=st.booleans(),
)
def test_forecast_only_adds_and_at_most_doubles(
    values: list[float], qps: float, in_flight: float, lead_s: float, *, is_known: bool
) -> None:
    demand = Demand(qps=qps, in_flight=in_flight, is_known=is_known)
    found = forecast_demand(make_minutes(*values), demand, lead_s=lead_s)
    assert qps <= found.qps <= RATIO_MAX * qps and in_flight <= found.in_flight <= RATIO_MAX * in_flight
    assert count_replicas(POLICY, found, wanted=9) >= count_replicas(POLICY, demand, wanted=9)


def test_gap_in_the_measurements_is_no_trend() -> None:
    forecaster = LoadForecaster()
    for second in range(0, 600, 5):
        forecaster.observe(Demand(qps=float(second)), now_s=float(second))
    assert len(forecaster.minutes) == 9 and forecaster.minutes[0].qps == pytest.approx(27.5)
    forecaster.observe(Demand(is_known=False), now_s=601.0)
    assert forecaster.minutes == ()
    for second in range(1000, 1130, 5):
        forecaster.observe(Demand(qps=1.0), now_s=float(second))
    assert len(forecaster.minutes) == 2
    forecaster.observe(Demand(qps=1.0), now_s=5000.0)
    assert forecaster.minutes == ()


def replay(load: Callable[[float], float], *, is_forecast: bool, hours: int) -> tuple[float, float]:
    """Return the replica hours that were missing, and those that were paid, under Poisson arrivals of this rate."""
    draw = random.Random(7)
    forecaster, state, starts = LoadForecaster(), ScalingState(wanted=2), [-COLD_S] * 2
    recent: list[int] = []
    missing = paid = 0.0
    for step in range(int(hours * 3600 / STEP_S)):
        now_s = step * STEP_S
        mean = load(now_s) * STEP_S
        arrivals = max(0, round(draw.gauss(mean, math.sqrt(mean))))
        recent = [*recent, arrivals][-3:]
        demand = Demand(qps=sum(recent) / (len(recent) * STEP_S))
        forecaster.observe(demand, now_s=now_s)
        seen = forecaster.forecast(demand, lead_s=COLD_S) if is_forecast else demand
        state = scale(POLICY, state, count_replicas(POLICY, seen, wanted=state.wanted), now_s=now_s)
        starts = starts[: state.wanted] + [now_s] * (state.wanted - len(starts))
        ready = sum(now_s - each >= COLD_S for each in starts)
        missing += max(0.0, load(now_s) / 2.0 - ready) * STEP_S / 3600
        paid += len(starts) * STEP_S / 3600
    return missing, paid


def test_rise_in_the_morning_misses_fewer_replicas_for_hardly_more() -> None:
    def day(now_s: float) -> float:
        return 30.0 - 25.0 * math.cos(2 * math.pi * now_s / 14_400)  # from 5 to 55 requests/s in two hours, and back

    (missing, paid), (missing_ahead, paid_ahead) = (replay(day, is_forecast=each, hours=8) for each in (False, True))
    assert missing_ahead < 0.5 * missing and paid_ahead < 1.15 * paid


@pytest.mark.parametrize("step", [0.0, 20.0])
def test_steady_load_and_sudden_steps_are_not_continued(step: float) -> None:
    def load(now_s: float) -> float:
        return 10.0 + step * (now_s // 3600 % 2)

    (_, paid), (_, paid_ahead) = (replay(load, is_forecast=each, hours=8) for each in (False, True))
    assert paid_ahead < 1.03 * paid


if __name__ == "__main__":
    for name, shape in (
        ("waves", lambda now_s: 30.0 - 25.0 * math.cos(2 * math.pi * now_s / 14_400)),
        ("steady", lambda now_s: 30.0),
        ("small steady", lambda now_s: 3.0),
        ("day", lambda now_s: 30.0 - 25.0 * math.cos(2 * math.pi * now_s / 86_400)),
        ("steps", lambda now_s: 10.0 + 20.0 * (now_s // 3600 % 2)),
    ):
        print(
            name,
            [tuple(round(part, 2) for part in replay(shape, is_forecast=each, hours=24)) for each in (False, True)],
        )
