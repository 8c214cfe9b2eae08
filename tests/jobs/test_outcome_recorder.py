"""How attempts and jobs end: the outcome that is stored, the status, and the sentence for the user."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from broker.jobs.deaths import REWRITES_MAX
from broker.jobs.health import Verdict
from broker.jobs.job_limits import JobLimits, LimitReached
from broker.jobs.outcome_recorder import (
    END_S_MAX,
    REPEATS_MAX,
    OutcomeRecorder,
)
from broker.jobs.run_end import RunEnd
from broker.state.store import Store
from broker.types import (
    Attempt,
    EventKind,
    Goal,
    Job,
    JobRecovery,
    JobStatus,
    Node,
    NodeState,
    ObservedCheckpoints,
    Outcome,
    OutcomeKind,
    Placement,
    Progress,
    StorageMount,
    Task,
)
from tests.simulation.world import make_offer
from tests.state.samples import START_S, Hands

PLACEMENT = Placement(offer=make_offer("east1a"), is_spot=True, node_count=2)
BROKEN = Outcome(kind=OutcomeKind.GANG_BROKEN, detail="a reason", step=7)
FULL = 2  # SQLite's number of `synchronous`


class Stage:
    """One job with a running attempt."""

    def __init__(self, folder: Path, *, task: Task | None = None) -> None:
        self.clock = Hands()
        self.store = Store(folder / "state.db", clock=self.clock)
        self.job_id = self.store.jobs.add("j", task or Task()).id
        self.limits = JobLimits(self.store, self.clock)
        self.recorder = OutcomeRecorder(self.job_id, self.store, self.clock, self.limits)
        self.begin(1)
        self.store.jobs.set_status(self.job_id, JobStatus.RUNNING)

    @property
    def job(self) -> Job:
        found = self.store.jobs.get(self.job_id)
        assert found is not None
        return found

    @property
    def attempt(self) -> Attempt:
        return self.job.attempts[-1]

    def begin(self, number: int, cluster: str = "") -> None:
        started_s = self.clock.now_s()
        self.store.jobs.put_attempt(
            Attempt(
                job_id=self.job_id,
                number=number,
                cluster=cluster or f"c{number}",
                placement=PLACEMENT,
                started_s=started_s,
            )
        )

    def conclude(
        self,
        verdict: Verdict,
        returncode: int | None = None,
        *,
        step: int | None = None,
        lines: tuple[str, ...] = (),
        is_whole: bool = False,
        saved: ObservedCheckpoints | None = None,
    ) -> None:
        run = RunEnd(
            returncode=returncode,
            reason="a reason",
            progress=None if step is None else Progress(step=step),
            failed_rank=1,
            last_lines=lines,
            is_whole=is_whole,
            checkpoints=saved,
        )
        assert self.recorder.record_exit(self.job, self.attempt, verdict, run) == 0.0

    def see(self) -> tuple[JobStatus, Outcome | None, str, float | None]:
        return self.job.status, self.attempt.outcome, self.job.failure, self.attempt.lost_s

    def list_recorded(self) -> list[tuple[EventKind, str]]:
        return [(event.kind, event.message) for event in self.store.events.list(job_id=self.job_id)]


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def make_task(**recovery: object) -> Task:
    return Task(recovery=JobRecovery(**recovery))  # type: ignore[arg-type]


def test_a_success_ends_attempt_and_job(stage: Stage) -> None:
    stage.conclude(Verdict.SUCCEEDED, 0)
    assert stage.see() == (JobStatus.SUCCEEDED, Outcome(kind=OutcomeKind.SUCCEEDED), "", None)
    assert stage.job.outcome_kind is OutcomeKind.SUCCEEDED
    assert stage.list_recorded() == [(EventKind.ENDED, "SUCCEEDED")]


def test_a_lost_gang_makes_the_job_recover_as_of_the_loss(stage: Stage) -> None:
    stage.clock.time_s += 30.0
    stage.recorder.record_loss(stage.attempt, "node 0 gone", lost_s=START_S + 10.0)
    lost = Outcome(kind=OutcomeKind.PREEMPTED, detail="node 0 gone")
    assert stage.see() == (JobStatus.RECOVERING, lost, "", START_S + 10.0)
    assert stage.list_recorded() == [(EventKind.ATTEMPT_LOST, "preempted: node 0 gone")]
    stage.begin(2)
    stage.recorder.record_loss(stage.attempt, "again")
    assert stage.attempt.lost_s == START_S + 30.0, "without a known time, it is now"


def test_only_a_loss_on_spot_counts_as_a_preemption(stage: Stage) -> None:
    stage.store.jobs.put_attempt(replace(stage.attempt, placement=replace(PLACEMENT, is_spot=False)))
    stage.recorder.record_loss(stage.attempt, "node 0 gone", step=7)
    assert stage.attempt.outcome == Outcome(kind=OutcomeKind.NODE_LOST, detail="node 0 gone", step=7)
    stage.begin(2)
    stage.recorder.record_takedown(stage.attempt)
    assert stage.attempt.outcome == Outcome(kind=OutcomeKind.TAKEN_DOWN)
    told = [
        (EventKind.ATTEMPT_LOST, "node 0 gone after step 7"),
        (EventKind.ATTEMPT_LOST, "the cluster was taken down"),
    ]
    assert stage.list_recorded() == told


def test_an_expired_lease_is_not_a_preemption(stage: Stage) -> None:
    stage.recorder.record_lease_expiry(stage.attempt, "12 h", step=7, lost_s=START_S - 9.0)
    outcome = Outcome(kind=OutcomeKind.LEASE_EXPIRED, detail="12 h", step=7)
    assert stage.see() == (JobStatus.RECOVERING, outcome, "", START_S - 9.0)
    told = "the unattended allowance of 12 h expired after step 7; restarting on new nodes"
    assert stage.list_recorded() == [(EventKind.LEASE_EXPIRED, told)]


@pytest.mark.parametrize(
    ("verdict", "returncode", "status", "kind", "failure"),
    [
        (Verdict.FAILED, 3, JobStatus.FAILED, OutcomeKind.PROGRAM_FAILED, "`run` exited with code 3"),
        (Verdict.FAILED_SETUP, 4, JobStatus.FAILED_SETUP, OutcomeKind.SETUP_FAILED, "`setup` exited with code 4"),
        (Verdict.CANCELLED, None, JobStatus.CANCELLED, OutcomeKind.CANCELLED, "the run was cancelled on its cluster"),
    ],
)
def test_final_outcomes_end_the_job(
    stage: Stage, verdict: Verdict, returncode: int | None, status: JobStatus, kind: OutcomeKind, failure: str
) -> None:
    stage.conclude(verdict, returncode)
    assert stage.see() == (status, Outcome(kind=kind, exit_code=returncode), failure, None)
    assert stage.job.outcome_kind is kind
    assert stage.list_recorded() == [(EventKind.ENDED, f"{status.value}: {failure}")]


def test_a_program_is_restarted_as_often_as_the_task_allows(tmp_path: Path) -> None:
    stage = Stage(tmp_path, task=make_task(max_restarts_on_errors=1, recover_on_exit_codes=(75,)))
    for number, code in enumerate((3, 75), start=1):
        stage.clock.time_s += 5.0
        stage.conclude(Verdict.FAILED, code)
        assert stage.see() == (
            JobStatus.RECOVERING, Outcome(kind=OutcomeKind.PROGRAM_FAILED, exit_code=code,
            detail="it requested a restart, without progress" if code == 75 else ""), "", START_S + 5.0 * number,
        )  # fmt: skip
        stage.begin(number + 1)
    stage.conclude(Verdict.FAILED, 3)
    assert stage.job.status is JobStatus.FAILED
    assert [kind for kind, _ in stage.list_recorded()] == [
        EventKind.PROGRAM_RESTARTED,
        EventKind.PROGRAM_RESTARTED,
        EventKind.ENDED,
    ]


def test_listed_exit_codes_are_not_counted(tmp_path: Path) -> None:
    stage = Stage(tmp_path, task=make_task(max_restarts_on_errors=1, recover_on_exit_codes=(75,)))
    for number, code in enumerate((75, 75, 3), start=1):
        stage.conclude(Verdict.FAILED, code)
        assert stage.job.status is JobStatus.RECOVERING, number
        stage.begin(number + 1)
    stage.conclude(Verdict.FAILED, 3)
    assert stage.job.status is JobStatus.FAILED


def make_headway(stage: Stage, step: int) -> None:
    stage.store.jobs.set_progress(stage.job_id, Progress(step=step))


def test_a_program_that_is_killed_is_restarted_while_it_makes_headway(stage: Stage) -> None:
    for number, step in enumerate((7, 19, 40), start=1):
        make_headway(stage, step)
        stage.conclude(Verdict.FAILED, 137)
        cause = "SIGKILL: killed; running out of memory is the usual cause"
        outcome = Outcome(kind=OutcomeKind.PROGRAM_FAILED, detail=cause, step=step, exit_code=137)
        assert stage.see()[:2] == (JobStatus.RECOVERING, outcome)
        told = f"the program exited with code 137 ({cause}) at step {step}; restarting on new nodes"
        assert stage.list_recorded()[-1] == (EventKind.PROGRAM_RESTARTED, told)
        stage.begin(number + 1)


def test_a_program_that_dies_three_times_at_one_step_has_failed(stage: Stage) -> None:
    for number, (step, code) in enumerate([(7, 1), (5, 134), (7, 139)], start=1):
        assert stage.job.status is not JobStatus.FAILED
        make_headway(stage, step)
        stage.conclude(Verdict.FAILED, code)
        stage.begin(number + 1)
    assert stage.job.status is JobStatus.FAILED
    assert stage.job.failure == "`run` exited with code 139 (SIGSEGV: segmentation fault), 3 times at step 7"


def test_preemptions_between_two_deaths_at_one_step_are_not_headway(stage: Stage) -> None:
    for number in (1, 3):
        make_headway(stage, 7)
        stage.conclude(Verdict.FAILED, 1)
        stage.begin(number + 1)
        stage.recorder.record_loss(stage.attempt, "node 0 gone")
        stage.begin(number + 2)
    stage.conclude(Verdict.FAILED, 1)
    assert stage.job.status is JobStatus.FAILED


def see(*, number: int = 0, rewritten_s: float = 0.0, at_s: float = START_S) -> ObservedCheckpoints:
    return ObservedCheckpoints(number=number, unnumbered_s=rewritten_s, time_s=at_s)


def test_a_program_that_saves_but_reports_nothing_is_restarted_while_it_saves_further(stage: Stage) -> None:
    """As HF Trainer does; the same nodes are kept until a restart on them brings nothing."""
    kept: list[bool] = []
    for number, (code, saved) in enumerate([(1, 100), (137, 200), (137, 300), (1, 300), (1, 300)], start=1):
        assert stage.job.status is not JobStatus.FAILED
        stage.conclude(Verdict.FAILED, code, saved=see(number=saved), is_whole=True)
        kept.append(stage.attempt.kept_until_s is not None)
        told = stage.list_recorded()[-1][1]
        stage.begin(number + 1, "c1")
    assert kept == [True, True, True, False, False] and "restarting" not in told
    assert stage.job.failure == "`run` exited with code 1, 3 times after checkpoint 300"
    restarts = [text for kind, text in stage.list_recorded() if kind is EventKind.PROGRAM_RESTARTED]
    assert restarts[0] == "the program exited with code 1 after checkpoint 100; restarting on the same nodes"
    assert stage.job.attempts[1].checkpoints == see(number=200)


def test_a_program_that_overwrites_its_checkpoint_is_restarted_a_limited_number_of_times(stage: Stage) -> None:
    for number in range(1, REWRITES_MAX + 1):
        assert stage.job.status is not JobStatus.FAILED
        stage.conclude(Verdict.FAILED, 1, saved=see(rewritten_s=START_S + number))
        stage.begin(number + 1)
    assert stage.job.failure == f"`run` exited with code 1, {REWRITES_MAX} times without a reported step"


def test_checkpoints_from_before_the_job_are_not_its_progress(stage: Stage) -> None:
    """A retried job continues in the folder of the first one; its new code has a typo."""
    stage.conclude(Verdict.FAILED, 1, saved=see(number=100, at_s=stage.job.submitted_s - 1.0))
    assert (stage.job.status, stage.attempt.checkpoints) == (JobStatus.FAILED, None)


def test_new_checkpoints_of_a_program_that_reports_no_new_steps_are_not_progress(stage: Stage) -> None:
    """It starts from scratch each time and saves again."""
    for number in (1, 2, 3):
        assert stage.job.status is not JobStatus.FAILED
        make_headway(stage, 7)
        stage.conclude(Verdict.FAILED, 1, saved=see(number=number, rewritten_s=START_S + number))
        stage.begin(number + 1)
    assert stage.job.failure == "`run` exited with code 1, 3 times at step 7"


def test_a_number_of_restarts_in_the_task_counts_instead_of_headway(tmp_path: Path) -> None:
    stage = Stage(tmp_path, task=make_task(max_restarts_on_errors=0))
    make_headway(stage, 7)
    stage.conclude(Verdict.FAILED, 137)
    assert stage.job.status is JobStatus.FAILED


OURS = Task(run="python -m trainers.lm")
BUCKET = Task(
    run="python train.py", storage_mounts=(StorageMount(target="/ckpt", source=("s3://b",), mode="MOUNT_CACHED"),)
)
COPY = Task(run="python train.py", storage_mounts=(StorageMount(target="/data", source=("s3://b",), mode="COPY"),))


KILLED_RANK = ("Root Cause (first observed failure):", "  exitcode  : -9 (pid: 71)")  # of torchrun, which exits with 1


@pytest.mark.parametrize(
    ("task", "code", "lines", "is_restarted"),
    [
        *((OURS, 1, (), False), (OURS, 2, (), False), (OURS, 137, (), True), (OURS, 134, (), True)),
        *((BUCKET, 137, (), True), (BUCKET, 1, KILLED_RANK, True)),
        *((COPY, 137, (), False), (COPY, 1, KILLED_RANK, False)),
    ],
)
def test_before_any_step_only_a_signal_of_one_that_saves_is_worth_another_try(
    tmp_path: Path, task: Task, code: int, lines: tuple[str, ...], is_restarted: bool
) -> None:
    stage = Stage(tmp_path, task=task)
    stage.conclude(Verdict.FAILED, code, lines=lines)
    assert stage.job.status is (JobStatus.RECOVERING if is_restarted else JobStatus.FAILED)


def test_nodes_are_kept_if_all_are_well_until_a_restart_on_them_brings_no_headway(stage: Stage) -> None:
    kept: list[float | None] = []
    for number, (verdict, code, step) in enumerate(
        [(Verdict.FAILED, 137, 7), (Verdict.APART, None, 9), (Verdict.FAILED, 1, 9)], start=1
    ):
        make_headway(stage, step)
        stage.conclude(verdict, code, step=step, is_whole=True)
        assert stage.job.status is JobStatus.RECOVERING
        kept.append(stage.attempt.kept_until_s)
        stage.begin(number + 1, "c1")
    assert kept == [START_S + END_S_MAX, START_S + END_S_MAX, None]


def test_nodes_are_given_back_if_one_is_not_well_or_records_may_lack_attempts(stage: Stage) -> None:
    make_headway(stage, 7)
    stage.conclude(Verdict.FAILED, 137, is_whole=False)
    assert stage.attempt.kept_until_s is None
    stage.begin(2)
    make_headway(stage, 9)
    stage.store.meta.put("restored_s", str(START_S))
    stage.conclude(Verdict.FAILED, 137, is_whole=True)
    assert stage.attempt.kept_until_s is None, "a later attempt may run on them"


def test_setup_that_fails_on_used_nodes_is_tried_on_new_ones(stage: Stage) -> None:
    stage.begin(2, "c1")
    stage.conclude(Verdict.FAILED_SETUP, 128, is_whole=True)
    assert (stage.job.status, stage.attempt.kept_until_s) == (JobStatus.RECOVERING, None)
    stage.begin(3)
    stage.conclude(Verdict.FAILED_SETUP, 128, is_whole=True)
    assert stage.job.status is JobStatus.FAILED_SETUP


def test_the_last_lines_of_the_rank_that_died_first_are_kept(stage: Stage) -> None:
    stage.conclude(Verdict.FAILED, 1, lines=("step 8", "RuntimeError: CUDA out of memory"))
    assert stage.job.failure == "`run` exited with code 1 (out of GPU memory)"
    title = "last lines of rank 1 in attempt 1:"
    assert stage.list_recorded()[0] == (EventKind.LAST_LINES, f"{title}\nstep 8\nRuntimeError: CUDA out of memory")


def test_a_preemption_is_not_a_failure_of_the_program(tmp_path: Path) -> None:
    stage = Stage(tmp_path, task=make_task(max_restarts_on_errors=1))
    stage.recorder.record_loss(stage.attempt, "node 0 gone")
    stage.begin(2)
    stage.conclude(Verdict.FAILED, 3)
    assert stage.job.status is JobStatus.RECOVERING


def test_a_gang_that_repeatedly_breaks_at_one_step_counts_as_a_program_failure(stage: Stage) -> None:
    for number in range(1, REPEATS_MAX):
        stage.conclude(Verdict.APART, step=7)
        assert stage.see()[:2] == (JobStatus.RECOVERING, BROKEN)
        stage.begin(number + 1)
    stage.conclude(Verdict.APART, step=7)
    assert stage.job.status is JobStatus.FAILED
    assert stage.job.failure == "the gang failed (a reason), 3 times at step 7" and REPEATS_MAX == 3


def test_deaths_at_different_steps_are_counted_separately(stage: Stage) -> None:
    for number, step in enumerate((7, 8, 7, None, 8, 0), start=1):
        stage.conclude(Verdict.APART, step=step)
        assert stage.job.status is JobStatus.RECOVERING, step
        assert stage.attempt.outcome == replace(BROKEN, step=step or 0)
        stage.begin(number + 1)
    stage.recorder.record_stall(stage.job, stage.attempt, 60.0, RunEnd(progress=Progress(step=7)))
    assert stage.job.status is JobStatus.RECOVERING, "a stall is not a broken gang"


def test_a_second_end_changes_and_records_nothing(stage: Stage) -> None:
    stage.conclude(Verdict.SUCCEEDED)
    told = stage.list_recorded()
    stage.recorder.finish_job(stage.job, JobStatus.FAILED, OutcomeKind.REFUSED, "late")
    assert stage.job.status is JobStatus.SUCCEEDED and stage.list_recorded() == told


def test_outcome_and_status_are_one_commit(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    commits: list[str] = []
    commit = stage.store._commit
    monkeypatch.setattr(stage.store, "_commit", lambda: commits.append("") or commit())
    stage.conclude(Verdict.APART, step=1)
    assert len(commits) == 1
    stage.begin(2)
    commits.clear()
    stage.conclude(Verdict.SUCCEEDED)
    assert len(commits) == 1


def test_an_outcome_is_durable_before_the_next_step(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut after the effect would otherwise make an ended job run again."""
    levels: list[int] = []
    commit = stage.store._commit
    monkeypatch.setattr(
        stage.store, "_commit", lambda: levels.append(stage.store.rows("PRAGMA synchronous")[0][0]) or commit()
    )
    for act in (
        lambda: stage.recorder.record_loss(stage.attempt, "node 0 gone"),
        lambda: stage.recorder.finish_job(stage.job, JobStatus.FAILED, OutcomeKind.DEPENDENCY_FAILED, "dependency"),
        lambda: stage.recorder.end_job(stage.job, stage.attempt, JobStatus.FAILED, BROKEN, "it failed"),
    ):
        with stage.store.transaction(is_durable=False):
            pass  # as progress is stored: what a power cut takes of that is seen again
        levels.clear()
        act()
        assert set(levels) == {FULL}


# -- budgets --------------------------------------------------------------------------------------------------------


def spend(stage: Stage, usd: float) -> None:
    node = Node(
        id="n", cloud="x", owner="me", cluster="c1", attempt=1, rank=0, state=NodeState.RUNNING,
        usd_hour=usd, created_s=START_S - 3600.0, ended_s=START_S,
    )  # fmt: skip
    stage.store.bills.record(node)
    stage.store.write("UPDATE nodes SET job_id = ?", (stage.job_id,))


@pytest.mark.parametrize(("usd", "is_over"), [(4.99, False), (5.0, True), (6.0, True)])
def test_a_budget_is_used_up_when_all_of_it_is_spent(tmp_path: Path, usd: float, is_over: bool) -> None:
    stage = Stage(tmp_path, task=Task(goal=Goal(budget_usd=5.0)))
    assert stage.limits.find_breach(stage.job) is None
    spend(stage, usd)
    breach = stage.limits.find_breach(stage.job)
    if is_over:
        assert breach is not None
        assert breach.failure == f"the budget of 5.00 USD is used up ({usd:.2f} USD spent); its checkpoints are kept"
        with pytest.raises(LimitReached, match=r"5\.00 USD"):
            stage.limits.check(stage.job)
    else:
        assert breach is None
        stage.limits.check(stage.job)


def test_without_a_budget_any_sum_may_be_spent_and_a_budget_of_nothing_is_used_up(stage: Stage) -> None:
    spend(stage, 1e6)
    for goal in (None, Goal(work_hours=1.0)):
        job = replace(stage.job, task=Task(goal=goal))
        assert stage.limits.find_breach(job) is None
    assert stage.limits.find_breach(replace(stage.job, task=Task(goal=Goal(budget_usd=0.0))))


def test_a_run_that_was_cancelled_for_its_budget_has_failed_by_it(tmp_path: Path) -> None:
    stage = Stage(tmp_path, task=Task(goal=Goal(budget_usd=5.0)))
    spend(stage, 6.0)
    stage.conclude(Verdict.CANCELLED)
    status, outcome, failure, _ = stage.see()
    assert (status, outcome) == (JobStatus.FAILED, Outcome(kind=OutcomeKind.BUDGET_EXCEEDED)) and failure.startswith(
        "the budget of 5.00 USD"
    )


def test_last_lines_of_a_hung_program_and_its_restart_are_one_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, modes = Stage(tmp_path), list[int]()
    commit = stage.store._commit

    def note() -> None:
        modes.append(stage.store.rows("PRAGMA synchronous")[0][0])
        commit()

    monkeypatch.setattr(stage.store, "_commit", note)
    stage.recorder.record_stall(stage.job, stage.attempt, 20.0, RunEnd(last_lines=("the last line",)))
    assert modes == [FULL]
    assert EventKind.LAST_LINES in {event.kind for event in stage.store.events.list(job_id=stage.job_id)}


def test_faulty_gpus_at_one_step_end_the_job_at_the_fifth_time(stage: Stage) -> None:
    for number in range(1, 5):
        stage.begin(number)
        stage.recorder.record_unhealthy(stage.job, stage.attempt, "XID 79", step=3)
        assert stage.job.status is JobStatus.RECOVERING
    stage.begin(5)
    stage.recorder.record_unhealthy(stage.job, stage.attempt, "XID 79", step=4)
    assert stage.job.status is JobStatus.RECOVERING, "it got further in between"
    stage.begin(6)
    stage.recorder.record_unhealthy(stage.job, stage.attempt, "XID 79", step=3)
    assert stage.job.status is JobStatus.FAILED and "health_check: false" in stage.job.failure


def test_program_that_cannot_be_started_on_three_clusters_ends_the_job(stage: Stage) -> None:
    failed = Outcome(kind=OutcomeKind.LAUNCH_FAILED, detail="no route")
    for number in range(1, 4):
        stage.begin(number)
        stage.recorder.record_refusal(stage.attempt, failed)
        assert not stage.job.status.is_terminal, "its nodes may still exist"
        stage.recorder.resolve_refusal(stage.job, stage.attempt)
        assert stage.job.status.is_terminal is (number == 3)
    assert stage.job.status is JobStatus.FAILED_PRECHECKS and "3 clusters: no route" in stage.job.failure


def test_refused_attempt_is_not_tried_again(stage: Stage) -> None:
    stage.recorder.record_refusal(stage.attempt, Outcome(kind=OutcomeKind.REFUSED, detail="no such image"))
    stage.recorder.resolve_refusal(stage.job, stage.attempt)
    assert (stage.job.status, stage.job.failure) == (JobStatus.FAILED_PRECHECKS, "no such image")
