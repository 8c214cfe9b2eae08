"""The error budget: time that is not used up is spent, time that is overspent is earned back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.serve.error_budget import SPENT_SHARE, ErrorBudget


def test_calm_lowers_the_pressure_and_shortages_raise_it() -> None:
    calm = ErrorBudget().observe(48.0, is_short=False)
    short = calm.observe(3.0, is_short=True)
    assert ErrorBudget().find_pressure(0.99) == 1
    assert calm.find_pressure(0.99) < 1 < short.find_pressure(0.99)


def test_spending_as_planned_keeps_the_pressure_at_one() -> None:
    budget = ErrorBudget(hours=1000.0, short_hours=1000.0 * SPENT_SHARE * 0.01)
    assert budget.find_pressure(0.99) == pytest.approx(1)


def test_old_shortages_are_forgotten() -> None:
    short = ErrorBudget().observe(3.0, is_short=True)
    for _ in range(24 * 28):
        short = short.observe(1.0, is_short=False)
    assert short.find_pressure(0.99) < 1


@given(st.floats(0.01, 0.99999), st.lists(st.tuples(st.floats(0, 50), st.booleans()), max_size=20))
def test_pressure_is_bounded_and_a_shortage_never_lowers_it(
    availability: float, seen: list[tuple[float, bool]]
) -> None:
    budget = ErrorBudget()
    for hours, is_short in seen:
        budget = budget.observe(hours, is_short=is_short)
    pressure = budget.find_pressure(availability)
    assert 0 < pressure < 21
    assert budget.observe(1.0, is_short=True).find_pressure(availability) >= pressure * 0.99 or pressure > 20
