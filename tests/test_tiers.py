"""Similar cases are divided between the three commands, and none is lost."""

from __future__ import annotations

from typing import Any

from tests.tiers import spread


def list_marks(cases: list[Any]) -> list[str]:
    return [case.marks[0].name if hasattr(case, "marks") else "" for case in cases]


def test_each_case_is_in_one_tier() -> None:
    cases = spread(range(8), every=4, more=2)
    assert list_marks(cases) == ["", "exhaustive", "long", "exhaustive", "", "exhaustive", "long", "exhaustive"]
    assert [case if isinstance(case, int) else case.values[0] for case in cases] == list(range(8))


def test_values_of_several_arguments_stay_apart() -> None:
    first, second = cases = spread([("a", 1), ("b", 2)], every=2)
    assert first == ("a", 1) and second.values == ("b", 2) and list_marks(cases) == ["", "long"]


def test_no_case_may_be_left_to_the_default_suite() -> None:
    assert list_marks(spread("abc", every=0, more=2)) == ["long", "exhaustive", "long"]
