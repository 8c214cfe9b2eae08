"""A node that slows its gang down is named once; a pause is not a slow node."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from broker.jobs.stragglers import (
    APART_S_MIN,
    RATIO_MIN,
    REPLACED_MAX,
    SLOW_S_MIN,
    STEPS_MIN,
    Replacement,
    Rest,
    Straggler,
    StragglerWatch,
    choose_replacement,
    estimate_gain,
)
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


def follow(*steps: Sequence[float], step_s: float = 10.0) -> tuple[StragglerWatch, float]:
    """Watch a gang whose steps take `step_s`; return the watch and the time of its last step."""
    watch = StragglerWatch()
    for step, times in enumerate(steps):
        watch.observe(at(step, *times), now_s=step * step_s)
    return watch, (len(steps) - 1) * step_s


def test_node_lasts_once_it_has_been_slow_for_two_minutes() -> None:
    slow = (0.8, 0.8, 1.3)
    early, now_s = follow(*[slow] * (STEPS_MIN + 11))
    assert not early.list_lasting(now_s)
    late, now_s = follow(*[slow] * (STEPS_MIN + 12))
    assert late.list_lasting(now_s) == [Straggler(rank=2, own_s=1.3, usual_s=0.8)]
    assert now_s == SLOW_S_MIN + 10.0 * (STEPS_MIN - 1)


def test_slow_node_stays_slow_between_both_ratios_and_recovers_below_them() -> None:
    slow, between, usual = (0.8, 0.8, 1.3), (0.8, 0.8, 1.1), (0.8, 0.8, 0.8)
    watch, now_s = follow(*[slow] * 20, *[between] * 50)
    assert [each.rank for each in watch.list_lasting(now_s)] == [2]
    watch, now_s = follow(*[slow] * 20, *[usual] * (STEPS_MIN - 1), between, *[usual] * (STEPS_MIN - 1))
    assert [each.rank for each in watch.list_lasting(now_s)] == [2], "too few usual steps in a row"
    watch, now_s = follow(*[slow] * 20, *[usual] * STEPS_MIN, *[slow] * STEPS_MIN)
    assert not watch.list_lasting(now_s), "it begins again"


SLOW = Straggler(rank=2, own_s=1.3, usual_s=0.8)


def make_rest(*, left: int, total: bool = True, checkpoint_step: int | None = 900) -> Rest:
    return Rest(step=1000, total=1000 + left if total else None, checkpoint_step=checkpoint_step, start_s=180.0)


def test_gain_is_the_time_lost_in_the_remaining_steps_and_the_cost_a_restart() -> None:
    gain = estimate_gain(SLOW, make_rest(left=10_000))
    assert (round(gain.saved_s), round(gain.cost_s)) == (5000, 310) and gain.pays
    assert not estimate_gain(SLOW, make_rest(left=1000)).pays  # 500 s
    assert not estimate_gain(SLOW, make_rest(left=10_000, total=False)).pays, "the end is unknown"
    assert round(estimate_gain(SLOW, make_rest(left=10_000, checkpoint_step=None)).cost_s) == 1480
    assert estimate_gain(SLOW, make_rest(left=10**9)).saved_s < 6 * 3600


def test_replacements_are_few_far_apart_and_one_for_each_rank() -> None:
    def choose(*earlier: tuple[int, float], lasting: Sequence[Straggler] = (SLOW,)) -> int | None:
        done = [Replacement(rank=rank, time_s=time_s) for rank, time_s in earlier]
        found = choose_replacement(lasting, make_rest(left=10_000), done, now_s=1e6)
        return found[0].rank if found else None

    old_s = 1e6 - APART_S_MIN
    assert choose() == 2
    assert choose((2, old_s)) is None, "the new node of this rank is slow too"
    assert choose((0, old_s)) == 2 and choose((0, old_s + 1)) is None
    assert choose(*[(rank, 0.0) for rank in range(5, 5 + REPLACED_MAX)]) is None
    other = Straggler(rank=1, own_s=1.25, usual_s=0.8)
    assert choose((2, old_s), lasting=[SLOW, other]) == 1


@given(st.floats(0.01, 100), st.floats(1.5, 100), st.integers(0, 10**7), st.integers(0, 10**5), st.floats(0, 10**4))
def test_a_replacement_that_pays_saves_twice_its_cost(
    usual_s: float, ratio: float, left: int, since: int, start_s: float
) -> None:
    rest = Rest(step=since, total=since + left, checkpoint_step=0, start_s=start_s)
    gain = estimate_gain(Straggler(rank=0, own_s=ratio * usual_s, usual_s=usual_s), rest)
    with_slow_s, replaced_s = left * ratio * usual_s, left * usual_s + gain.cost_s
    assert not gain.pays or replaced_s <= with_slow_s - gain.cost_s + 1e-6 * with_slow_s
