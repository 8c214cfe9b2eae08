"""A node that slows its gang down is named once, and a pause is none."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from broker.jobs.stragglers import RATIO_MIN, STEPS_MIN, Straggler, StragglerWatch
from broker.types import OwnTime


def at(step: int, *own_s: float) -> list[OwnTime]:
    return [OwnTime(rank=rank, step=step, own_s=seconds) for rank, seconds in enumerate(own_s)]


def watch(*steps: Sequence[float]) -> list[Straggler]:
    watch = StragglerWatch()
    return [each for step, times in enumerate(steps) for each in watch.observe(at(step, *times))]


def test_slow_node_is_named_once_with_the_usual_time() -> None:
    found = watch(*[(0.8, 0.8, 1.3)] * (3 * STEPS_MIN))
    assert found == [Straggler(rank=2, own_s=1.3, usual_s=0.8)]


def test_node_that_is_a_little_slower_is_not_named() -> None:
    assert watch(*[(0.8, 0.8, 1.1)] * 50) == []


def test_pause_of_a_few_steps_is_not_named() -> None:
    pause, usual = (0.8, 0.8, 9.0), (0.8, 0.8, 0.8)
    assert watch(*[*[pause] * (STEPS_MIN - 1), usual] * 4) == []


def test_one_step_that_is_read_often_counts_once() -> None:
    watch = StragglerWatch()
    assert [each for _ in range(50) for each in watch.observe(at(7, 0.8, 0.8, 9.0))] == []


def test_single_node_and_gangs_that_report_nothing_have_no_stragglers() -> None:
    assert watch(*[(9.0,)] * 50) == [] and watch(*[()] * 50) == []


@given(st.lists(st.floats(0.01, 1.0), min_size=2, max_size=8))
def test_gang_within_the_ratio_has_no_stragglers(seconds: list[float]) -> None:
    even = [max(seconds) / RATIO_MIN + each * (1 - 1 / RATIO_MIN) for each in seconds]
    assert max(even) <= RATIO_MIN * min(even)
    assert watch(*[even] * 20) == []
