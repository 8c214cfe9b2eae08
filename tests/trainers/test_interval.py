"""How often a run saves itself."""

import itertools
import math

import pytest

from trainers.environment import Environment, read_environment
from trainers.interval import AUTOMATIC, INTERVAL_S_MAX, STEPS_FIRST, Pacer, find_interval_s


def count_time(interval_s: float, stall_s: float, hazard_per_hour: float) -> float:
    """Time to finish over work, failures arriving at random (Daly's eq. 13 without restart)."""
    mean_s = 3600 / hazard_per_hour
    return mean_s * math.expm1((interval_s + stall_s) / mean_s) / interval_s


@pytest.mark.parametrize("stall_s", [0.5, 5.0, 40.0])
@pytest.mark.parametrize("hazard_per_hour", [0.5, 4.0, 30.0])
def test_interval_takes_hardly_more_time_than_the_best_of_all(stall_s: float, hazard_per_hour: float) -> None:
    chosen = find_interval_s(stall_s, 0.0, hazard_per_hour)
    best = min(count_time(second / 10, stall_s, hazard_per_hour) for second in range(5, 18000, 5))
    assert count_time(chosen, stall_s, hazard_per_hour) <= best * 1.001
    assert count_time(2 * chosen, stall_s, hazard_per_hour) > best * 1.001


def test_interval_is_bounded_by_slow_writes_and_a_maximum() -> None:
    assert find_interval_s(0.0, 20.0, 1.0) == 200.0  # a tenth of the time
    assert find_interval_s(10.0, 0.0, 0.0) == find_interval_s(300.0, 0.0, 0.01) == INTERVAL_S_MAX
    assert find_interval_s(10.0, 4000.0, 1.0) == 4000.0  # no sooner than the last is written
    assert find_interval_s(9000.0, 0.0, 1.0) == INTERVAL_S_MAX


def list_saves(
    pacer: Pacer, clock: list[float], steps: int, step_s: float, stall_s: float, *, begin: int = 0
) -> list[int]:
    saves = []
    for step in range(begin + 1, begin + steps + 1):
        clock[0] += step_s
        if pacer.is_due(step):
            pacer.note(step, stall_s=stall_s, write_s=0.1)
            saves.append(step)
    return saves


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("trainers.interval.time.perf_counter", lambda: now[0])
    return now


@pytest.mark.parametrize(
    ("environment", "interval_s"),
    [
        (Environment(hazard_per_hour=1.0), find_interval_s(2.0, 0.1, 1.0)),
        (Environment(hazard_per_hour=16.0), find_interval_s(2.0, 0.1, 16.0)),
        (Environment(hazard_per_hour=16.0, checkpoint_every_s=50.0), 50.0),
    ],
    ids=["calm", "wild", "received"],
)
def test_run_saves_by_measured_and_received_values(
    clock: list[float], environment: Environment, interval_s: float
) -> None:
    pacer = Pacer(AUTOMATIC, environment, lambda value: value)
    saves = list_saves(pacer, clock, 1000, step_s=0.5, stall_s=2.0)
    assert saves[:2] == [STEPS_FIRST, 2 * STEPS_FIRST]
    assert {later - sooner for sooner, later in itertools.pairwise(saves[1:])} == {round(interval_s / 0.5)}


def test_interval_follows_the_speed_since_the_last_save(clock: list[float]) -> None:
    """After a resize, steps take half as long: the interval in steps doubles, so that it stays the same in seconds."""
    pacer = Pacer(AUTOMATIC, Environment(checkpoint_every_s=50.0), lambda value: value)
    slow = list_saves(pacer, clock, 400, step_s=1.0, stall_s=2.0)
    fast = list_saves(pacer, clock, 800, step_s=0.5, stall_s=2.0, begin=400)
    assert slow[-1] - slow[-2] == 50 and fast[-1] - fast[-2] == 100


def test_every_rank_follows_the_first(clock: list[float]) -> None:
    shared: list[int] = []

    def share(value: int) -> int:
        shared.append(value)
        return value

    first = Pacer(AUTOMATIC, Environment(), share)
    saves = list_saves(first, clock, 3000, step_s=0.5, stall_s=2.0)
    answers = iter(shared)
    other = Pacer(AUTOMATIC, Environment(hazard_per_hour=99.0), lambda _: next(answers))
    assert list_saves(other, clock, 3000, step_s=0.7, stall_s=9.0) == saves


def test_every_steps_flag_fixes_the_interval(clock: list[float]) -> None:
    for every_steps, expected in ((7, [7, 14, 21, 28]), (0, [])):
        pacer = Pacer(every_steps, Environment(checkpoint_every_s=1.0), lambda value: value)
        assert list_saves(pacer, clock, 30, step_s=5.0, stall_s=0.1) == expected


def test_next_attempt_prefers_received_values_to_those_of_the_last_one(clock: list[float]) -> None:
    """The broker gives each attempt the values of its place; a flag overrides the interval, and that the hazard."""
    given = {"BROKER_HAZARD_PER_HOUR": "16", "BROKER_CHECKPOINT_EVERY_S": "50"}
    first = Pacer(AUTOMATIC, read_environment(given), lambda value: value)
    saves = list_saves(first, clock, 300, step_s=0.5, stall_s=2.0)
    assert saves[-1] - saves[-2] == 100
    second = Pacer(
        AUTOMATIC, read_environment({**given, "BROKER_CHECKPOINT_EVERY_S": "5"}), lambda value: value, step=205
    )
    saves = list_saves(second, clock, 60, step_s=0.5, stall_s=2.0, begin=205)
    assert saves[:4] == [210, 215, 225, 235]
    third = Pacer(AUTOMATIC, read_environment({"BROKER_HAZARD_PER_HOUR": "16"}), lambda value: value)
    saves = list_saves(third, clock, 300, step_s=0.5, stall_s=2.0)
    assert saves[-1] - saves[-2] == round(find_interval_s(2.0, 0.1, 16.0) / 0.5)
    fixed = Pacer(7, read_environment(given), lambda value: value)
    assert list_saves(fixed, clock, 21, step_s=0.5, stall_s=2.0) == [7, 14, 21]


def test_environment_that_is_not_a_number_is_ignored() -> None:
    found = read_environment({"BROKER_HAZARD_PER_HOUR": "0.25", "BROKER_CHECKPOINT_EVERY_S": "often"})
    assert (found.hazard_per_hour, found.checkpoint_every_s) == (0.25, None)
    assert read_environment({"BROKER_HAZARD_PER_HOUR": "-1"}).hazard_per_hour is None
