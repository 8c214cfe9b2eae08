"""Starts with a restored setup: measured, expected before the first one, believed while the archive is used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from broker.jobs.replanning import cut_to_rest
from broker.jobs.setup_starts import KINDS, RestoredStart, expect_restored_start, find_restored_start, measure_starts
from broker.state.store import Store
from broker.types import (
    Attempt,
    EventKind,
    Goal,
    Job,
    JobRecovery,
    JobStatus,
    Outcome,
    OutcomeKind,
    Placement,
    Task,
    make_event,
)
from tests.simulation.world import make_offer
from tests.state.samples import START_S, Hands

PLACEMENT = Placement(offer=make_offer("east1a"), is_spot=True, node_count=2)
ELSEWHERE = replace(PLACEMENT, offer=replace(make_offer("west1a"), spot_usd_hour=9.0))
OTHER_CLOUD = replace(PLACEMENT, offer=replace(make_offer("east1a"), cloud="aws"))
OTHER_KIND = replace(PLACEMENT, offer=replace(make_offer("east1a"), accelerator="H100", accelerator_count=8))
TASK = Task(
    name="train", setup="pip install .", run="x", num_nodes=2, recovery=JobRecovery(caches_setup=True),
    goal=Goal(work_hours=10.0, deadline_hours=20.0),
)  # fmt: skip
LOST = Outcome(kind=OutcomeKind.PREEMPTED)
KEPT_GIB, SETUP_S = 100e6 * 54 / 2**30, 600.0  # read in 54 s


class Log:
    """The record of one job: its attempts, and what became of its setup."""

    def __init__(self, folder: Path) -> None:
        self.clock = Hands()
        self.store = Store(folder / "state.db", clock=self.clock)
        self.job = self.store.jobs.add("train", TASK)

    def start(
        self, took_s: float, kind: EventKind | None = None, *, placement: Placement = PLACEMENT,
        outcome: Outcome | None = LOST, cluster: str = "",
    ) -> None:  # fmt: skip
        number = len(self.read().attempts) + 1
        begin_s = START_S + 10_000 * number
        attempt = Attempt(
            job_id=self.job.id, number=number, cluster=cluster or f"c-{number}", placement=placement,
            started_s=begin_s, resumed_s=begin_s + took_s, ended_s=begin_s + 9000.0, outcome=outcome,
        )  # fmt: skip
        self.store.jobs.put_attempt(attempt)
        if kind is not None:
            event = make_event(kind, number=number, setup_s=SETUP_S, size_gib=KEPT_GIB)
            self.store.events.add(event, job_id=self.job.id)

    def read(self) -> Job:
        found = self.store.jobs.get(self.job.id)
        assert found is not None
        return found

    def expect(self) -> RestoredStart | None:
        return expect_restored_start(self.read(), self.store.events.list_kinds(KINDS, job_id=self.job.id))

    @property
    def start_s(self) -> float | None:
        found = self.expect()
        return found.start_s if found else None


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path)


def test_before_any_restored_start_the_read_time_is_expected_instead_of_setup(log: Log) -> None:
    log.start(700.0)
    assert log.start_s is None, "nothing is kept yet"
    log.start(710.0, EventKind.SETUP_KEPT)
    assert log.start_s == pytest.approx(710.0 - SETUP_S + 54.0)


def test_restored_starts_replace_the_estimate_and_the_longest_of_three_counts(log: Log) -> None:
    log.start(700.0, EventKind.SETUP_KEPT)
    for took_s, expected_s in ((180.0, 180.0), (120.0, 180.0), (130.0, 180.0), (125.0, 130.0)):
        log.start(took_s, EventKind.SETUP_RESTORED)
        assert log.start_s == expected_s


def test_start_that_ran_setup_again_ends_the_expectation_until_the_next_archive(log: Log) -> None:
    log.start(700.0, EventKind.SETUP_KEPT)
    log.start(690.0, placement=OTHER_KIND)
    assert log.start_s == pytest.approx(154.0), "other machines have another key"
    log.start(690.0)
    assert log.start_s is None
    log.start(680.0, EventKind.SETUP_KEPT)
    assert log.start_s == pytest.approx(134.0)


def test_restart_on_the_same_machines_says_nothing_about_the_archive(log: Log) -> None:
    log.start(700.0, EventKind.SETUP_KEPT)
    log.start(20.0, cluster="c-1")
    assert log.start_s == pytest.approx(154.0)
    assert measure_starts(log.read().attempts) == {1: 700.0}


def test_failed_program_makes_the_next_start_run_setup(log: Log) -> None:
    log.start(700.0, EventKind.SETUP_KEPT)
    log.start(150.0, EventKind.SETUP_RESTORED, outcome=Outcome(kind=OutcomeKind.PROGRAM_FAILED, exit_code=1))
    assert log.start_s is None


def test_archive_is_expected_in_any_region_but_only_on_the_same_cloud_and_machines(log: Log) -> None:
    log.start(700.0, EventKind.SETUP_KEPT)
    found = log.expect()
    assert found is not None
    assert [found.fits(each) for each in (PLACEMENT, ELSEWHERE, OTHER_CLOUD, OTHER_KIND)] == [True, True, False, False]


def test_new_job_expects_the_archive_of_an_earlier_one_while_it_is_kept(log: Log) -> None:
    log.start(700.0, EventKind.SETUP_KEPT)
    log.start(160.0, EventKind.SETUP_RESTORED)

    def find(task: Task = TASK) -> float | None:
        found = find_restored_start(log.store, task, now_s=log.clock.now_s())
        return found.start_s if found else None

    assert find() == 160.0
    assert find(replace(TASK, setup="pip install . # again")) is None
    assert find(replace(TASK, recovery=JobRecovery())) is None and find(replace(TASK, num_nodes=1)) is None
    new = log.store.jobs.add("again", TASK)
    found = find_restored_start(log.store, TASK, now_s=log.clock.now_s(), job=new)
    assert found is not None and found.start_s == 160.0
    log.clock.time_s += 15 * 86400.0
    assert find() is None, "expired"


def test_rest_of_a_job_is_planned_with_the_measured_start(log: Log) -> None:
    log.start(700.0, EventKind.SETUP_KEPT)
    job = replace(log.read(), status=JobStatus.RECOVERING)
    told = cut_to_rest(job, now_s=job.submitted_s, spent_usd=0.0)
    known = cut_to_rest(job, now_s=job.submitted_s, spent_usd=0.0, restart_s=150.0)
    assert known.checkpoint.restart_s == 150.0 and told.checkpoint.restart_s == 300.0
