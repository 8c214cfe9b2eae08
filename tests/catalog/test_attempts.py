"""When the prices of a cloud are updated again: some hours after a success, at growing intervals after failures."""

from __future__ import annotations

import pytest

from broker.catalog.attempts import UpdateAttempt

HOUR_S = 3600.0


@pytest.mark.parametrize(
    ("failures", "wait_s"),
    [(0, 7 * HOUR_S), (1, 900.0), (2, 1800.0), (3, 3600.0), (7, 57_600.0), (8, 86_400.0), (20, 86_400.0)],
)
def test_an_update_is_due_after_its_interval(failures: int, wait_s: float) -> None:
    attempt = UpdateAttempt(attempted_s=1e9, failures=failures)
    assert attempt.find_next_s() == 1e9 + wait_s
    assert not attempt.is_due(1e9) and not attempt.is_due(1e9 + wait_s - 1) and attempt.is_due(1e9 + wait_s)
    assert attempt.is_due(1e9 - 1), "the clock was set back"


def test_an_attempt_has_not_failed_unless_it_says_so() -> None:
    assert UpdateAttempt(attempted_s=1e9).find_next_s() == 1e9 + 7 * HOUR_S
