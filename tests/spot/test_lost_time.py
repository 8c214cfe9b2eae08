"""Probabilities of deadline and budget, compared with simulations of the same process."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.spot.lost_time import LostTime

# segments, stretch, hazard, recovery (hours): calm, long and short stretches, one stretch, expensive recoveries, rough
CASES = [
    (40, 0.5, 0.05, 0.1),
    (20, 2.0, 0.2, 0.5),
    (5, 5.0, 0.1, 0.05),
    (1, 10.0, 0.05, 0.1),
    (200, 0.1, 0.5, 0.02),
    (50, 0.5, 0.02, 2.0),
    (10, 3.0, 0.5, 0.2),
]
SAMPLES = 4000
# A probability of 0.5 has a standard error of 0.008 with `SAMPLES` samples: four of these, plus 0.002 for the series.
TOLERANCE = 0.034


def draw_losses(draw: random.Random, segments: int, stretch: float, hazard: float, recovery: float) -> list[float]:
    """Return the cost of each preemption of one run, in order."""
    costs = []
    for _ in range(segments):
        while (strike := draw.expovariate(hazard)) < stretch:
            costs.append(strike + recovery)
    return costs


@pytest.mark.parametrize("case", CASES)
def test_chance_to_finish_agrees_with_a_simulation(case: tuple[int, float, float, float]) -> None:
    segments, stretch, hazard, recovery = case
    losses = LostTime(segments=segments, stretch=stretch, hazard=hazard)
    draw = random.Random(11)
    totals = [sum(draw_losses(draw, *case)) for _ in range(SAMPLES)]
    typical = losses.mean_count * (stretch / 2 + recovery)
    for slack in (0.0, 0.3 * typical, 0.7 * typical, typical, 1.4 * typical, 2 * typical):
        simulated = sum(total <= slack for total in totals) / SAMPLES
        assert losses.finish_chance(slack, recovery) == pytest.approx(simulated, abs=TOLERANCE)


@pytest.mark.parametrize("case", CASES)
def test_preemptions_until_the_switch_agree_with_a_simulation(case: tuple[int, float, float, float]) -> None:
    segments, stretch, hazard, recovery = case
    losses = LostTime(segments=segments, stretch=stretch, hazard=hazard)
    slack = 0.8 * losses.mean_count * (stretch / 2 + recovery)
    draw, counts, switches = random.Random(5), [], 0
    for _ in range(SAMPLES):
        total = count = 0.0
        for cost in draw_losses(draw, *case):
            total, count = total + cost, count + 1
            if total > slack:
                switches += 1
                break
        counts.append(count)
    expected, chance = losses.expect_until(slack, recovery)
    assert expected == pytest.approx(sum(counts) / SAMPLES, rel=0.05, abs=0.03)
    assert chance == pytest.approx(switches / SAMPLES, abs=TOLERANCE)


def test_sums_of_many_lost_times_agree_with_repeated_integration() -> None:
    """Compare the Edgeworth series with the exact distribution on a fine grid."""
    hazard, stretch, cells = 0.3, 2.0, 400
    losses = LostTime(segments=10, stretch=stretch, hazard=hazard)
    step = stretch / cells
    weights = [math.exp(-hazard * step * (i + 0.5)) for i in range(cells)]
    one = [w / sum(weights) for w in weights]
    density = one
    for count in range(2, 6):
        running, total = [0.0], 0.0
        for value in density:
            total += value
            running.append(total)
        # convolution with e^{-Ht} on [0, s]: an exponential moving window
        decay, result, window = math.exp(-hazard * step), [], 0.0
        for i in range(len(density) + cells - 1):
            entering = density[i] if i < len(density) else 0.0
            leaving = density[i - cells] if 0 <= i - cells < len(density) else 0.0
            window = window * decay + entering - leaving * decay**cells
            result.append(window * one[0])
        density = result
        for share in (0.2, 0.4, 0.5, 0.7, 0.9):
            cut = int(share * len(density))
            limit = (cut + count / 2 - 0.5 + 0.5) * step
            exact = sum(density[:cut]) + density[cut] / 2
            assert losses.within_chance(count, limit) == pytest.approx(exact, abs=0.005)


@given(
    st.floats(1, 500), st.floats(0.01, 10), st.floats(1e-5, 0.5), st.floats(0, 2), st.floats(0, 200), st.floats(0, 50)
)
@settings(deadline=None, max_examples=60)
def test_chance_grows_with_slack_and_stays_a_chance(
    segments: float, stretch: float, hazard: float, recovery: float, slack: float, more: float
) -> None:
    losses = LostTime(segments=segments, stretch=stretch, hazard=hazard)
    one, other = losses.finish_chance(slack, recovery), losses.finish_chance(slack + more, recovery)
    assert 0 <= one <= 1
    assert one <= other + 0.004  # the error of the series


def test_no_slack_leaves_only_runs_without_preemption() -> None:
    losses = LostTime(segments=10, stretch=1.0, hazard=0.05)
    assert losses.finish_chance(0.0, 0.1) == pytest.approx(math.exp(-0.5))
    assert losses.finish_chance(-1e-9, 0.1) == 0
    assert losses.finish_chance(1e6, 0.1) == pytest.approx(1)


def test_thousands_of_preemptions_are_as_good_as_normal() -> None:
    losses = LostTime(segments=100_000, stretch=1.0, hazard=0.2)
    mean = losses.mean_count * (0.5 + 0.1)
    assert losses.finish_chance(0.9 * mean, 0.1) < 0.01
    assert losses.finish_chance(1.1 * mean, 0.1) > 0.99
