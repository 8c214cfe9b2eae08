"""Each due time of a schedule starts one job or none, and is recorded once, whatever happens to its controllers."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest

from broker.jobs.scheduler import Scheduler
from broker.types import DueOutcome, Overlap
from tests.simulation.schedules import (
    ScheduledResult,
    ScheduledUniverse,
    SimulatedLauncher,
    make_scene,
    play_scheduled,
    play_seed,
)
from tests.tiers import exhaustive, long

RICH = (5, 3, 0)  # short histories of `make test`, in which all that it asks for occurs
MORE, MANY = 16, 46  # histories of `make test-slow` and `make test-exhaustive`
EVERY = (240, 60, 13)  # a kill at one of this many effects and commits in each of them


def check(result: ScheduledResult, label: str) -> None:
    assert not result.failure, f"{result.failure}\n  python -m tests.simulation.schedules {label} --trace"


def test_due_times_happen_once_in_histories_with_faults() -> None:
    outcomes, faults = Counter[DueOutcome](), Counter[str]()
    for seed in RICH:
        result = play_seed(seed)
        check(result, f"--seed {seed}")
        outcomes += result.outcomes
        faults += result.faults
    assert {DueOutcome.STARTED, DueOutcome.SKIPPED, DueOutcome.MISSED} <= set(outcomes)
    assert faults["kill:anytime"] and faults["store:cut off"], "faults were played"


@pytest.mark.parametrize(
    "every", [pytest.param(EVERY[0], marks=long), *(pytest.param(each, marks=exhaustive) for each in EVERY[1:])]
)
@pytest.mark.parametrize("overlap", Overlap)
def test_a_kill_at_any_effect_neither_loses_nor_doubles_a_due_time(overlap: Overlap, every: int) -> None:
    mix, play = make_scene(overlap)
    whole = play_scheduled(0, mix, play)
    check(whole, f"--kill-at 0 --overlap {overlap.value}")
    assert whole.kills == 0 and whole.outcomes[DueOutcome.STARTED] >= 3
    for kill_at in range(1 + EVERY.index(every), whole.points, every):
        result = play_scheduled(0, mix, play, kill_at=kill_at)
        check(result, f"--kill-at {kill_at} --overlap {overlap.value}")
        assert result.kills == 1


@pytest.mark.parametrize("count", [pytest.param(MORE, marks=long), pytest.param(MANY, marks=exhaustive)])
def test_more_histories_of_schedules(count: int) -> None:
    for seed in range(count):
        check(play_seed(seed), f"--seed {seed}")


class Torn:
    """A store whose transactions are torn into single statements."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def transaction(self) -> Any:
        return nullcontext()


def test_job_and_due_time_in_two_commits_are_caught() -> None:
    def make(universe: ScheduledUniverse, store: Any) -> Scheduler:
        torn: Any = Torn(store)
        return Scheduler(torn, launches=SimulatedLauncher(universe, store))

    mix, play = make_scene(Overlap.SKIP)
    with patch.object(ScheduledUniverse, "make_scheduler", make):
        assert play_scheduled(0, mix, play).failure.startswith("D2")
