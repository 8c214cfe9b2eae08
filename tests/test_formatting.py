"""Amounts and lists in the form that people read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.formatting import format_hours, format_usd, join_choices


@pytest.mark.parametrize(
    ("amount", "shown"),
    [(None, "-"), (0.0, "0.00"), (0.05, "0.0500"), (1.0, "1.00"), (4784.541, "4,784.54"), (1234567.0, "1,234,567.00")],
)
def test_amounts_have_thousands_separators_and_more_decimals_below_one(amount: float | None, shown: str) -> None:
    assert format_usd(amount) == shown


@given(st.floats(0, 1e9, allow_nan=False))
def test_displayed_amount_is_the_amount_within_half_of_its_last_decimal(amount: float) -> None:
    shown = format_usd(amount)
    assert "e" not in shown
    assert float(shown.replace(",", "")) == pytest.approx(amount, abs=0.51 * 10.0 ** -len(shown.partition(".")[2]))


@pytest.mark.parametrize(
    ("hours", "shown"),
    [(5 * (600 / 3600), "50m 00s"), (0.1, "6m 00s"), (40 + 5 / 60, "40h 05m"), (1.99 / 60, "1m 59s"), (None, "-")],
)
def test_whole_minutes_are_not_shown_as_a_second_less(hours: float | None, shown: str) -> None:
    assert format_hours(hours) == shown
    if hours is not None:
        assert format_hours(hours - 1e-13) == shown, "the rounding error of a sum of hours"


@pytest.mark.parametrize(("choices", "shown"), [(["a"], "a"), (["a", "b"], "a or b"), (["a", "b", "c"], "a, b or c")])
def test_alternatives_are_joined_as_in_a_sentence(choices: list[str], shown: str) -> None:
    assert join_choices(choices) == shown
