"""Related writes are one commit, and all but progress is on the disk before the next effect.

Each call of a function that writes is counted in lives of jobs: plain, preempted, cancelled, refused and failing ones.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from broker.errors import TransientError
from broker.types import JobRecovery, Task
from tests.clouds.simulated import FaultRates
from tests.simulation.test_crashes import run_to_end
from tests.simulation.world import CrashingStore, World, make_plan

FULL, NORMAL = 2, 1  # SQLite's numbers of `synchronous`
# Function -> the most commits of one call. Those with two: the status before a search or an end, and its result.
COMMITS_MAX = {
    "Acquisition._record": 1,
    "Acquisition.begin_attempt": 1,
    "NodeCreator._note_account": 1,
    "Launcher._open_intent": 1,
    "Launcher._drive": 1,
    "Launcher.record": 1,
    "OutcomeRecorder._restart": 1,
    "OutcomeRecorder.end_job": 1,
    "OutcomeRecorder.finish_job": 1,
    "OutcomeRecorder.record_refusal": 1,
    "JobController._end": 2,
    "record_progress": 1,
    "JobController._start": 1,
    "ClusterBuilder._enter": 1,
    "Provisioner.down": 2,
    "Provisioner.refresh": 1,
    "AttemptTeardown.close": 1,
}
NOT_DURABLE = {
    "NodeCreator.create",  # only looks whether its intent is open, and whether it still leads
    "Launcher._end_unless_open",
    "record_progress",  # is seen again
    "HedgeTimer.note",
    "UnavailableOffers.note_failed_call",
    "copy_log",
}


class Commits:
    """The commits of each call of each function of `jobs` and `provision`, and how durable they were."""

    def __init__(self) -> None:
        self.calls: dict[str, dict[FrameType, int]] = defaultdict(lambda: defaultdict(int))
        self.levels: dict[str, set[int]] = defaultdict(set)

    def note(self, level: int) -> None:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            path = frame.f_code.co_filename
            if "/broker/jobs/" in path or "/broker/provision/" in path:
                name = frame.f_code.co_qualname
                self.calls[name][frame] += 1
                self.levels[name].add(level)
                return
            frame = frame.f_back

    def count_most(self, name: str) -> int:
        return max(self.calls[name].values(), default=0)


def live(folder: Path, scenario: str, *, task: Task | None = None, **faults: float) -> None:
    folder.mkdir()
    world = World(folder, faults=FaultRates(**faults), exit_codes=(3,) if scenario == "failing" else (), seed=3)
    if scenario == "no start":
        world.gang.start_error, scenario = TransientError("no route to host"), "plain"
    if task is not None:
        world.task = task
        world.job_id = world.store.jobs.add("j", task).id
    run_to_end(world, "plain" if scenario == "failing" else scenario, lambda task, avoid: make_plan(task))
    world.store.close()


@pytest.fixture
def commits(tmp_path: Path) -> Iterator[Commits]:
    found, commit = Commits(), CrashingStore._commit

    def note(store: CrashingStore) -> None:
        found.note(int(store.rows("PRAGMA synchronous")[0][0]))
        commit(store)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CrashingStore, "_commit", note)
        live(tmp_path / "plain", "plain")
        live(tmp_path / "preemption", "preemption")
        live(tmp_path / "cancel", "cancel")
        live(tmp_path / "refused", "plain", full=0.5, unknown_after=0.3, transient=0.2)
        live(tmp_path / "no start", "no start")
        recovery = JobRecovery(max_restarts_on_errors=1)
        live(tmp_path / "failing", "failing", task=Task(num_nodes=2, recovery=recovery))
        yield found


def test_related_changes_are_one_durable_commit_unless_observable_again(commits: Commits) -> None:
    assert {name: commits.count_most(name) for name in COMMITS_MAX} == COMMITS_MAX
    assert {name for name, levels in commits.levels.items() if levels != {FULL}} == NOT_DURABLE
