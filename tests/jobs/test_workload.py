"""A process claims about as many jobs as every other one, and leaves to others what it has given up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from broker.jobs.workload import BEAT_EVERY_S, REST_S, SHARE_S, SharedWorkload
from broker.state.claims import LEASE_S
from broker.state.store import Store
from broker.types import Task
from tests.state.samples import Hands

Open = Callable[[str], SharedWorkload]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Hands:
    """Return a clock that is the processes' and the store's."""
    clock = Hands()
    monkeypatch.setattr(Store, "read_time_s", lambda self: clock.now_s())
    return clock


@pytest.fixture
def store(tmp_path: Path, clock: Hands) -> Store:
    return Store(tmp_path / "state.db", clock=clock)


@pytest.fixture
def start(tmp_path: Path, store: Store, clock: Hands) -> Open:
    return lambda name: SharedWorkload(Store(tmp_path / "state.db", clock=clock), clock, name=name)


def add_jobs(store: Store, count: int) -> list[int]:
    return [store.jobs.add(f"j{number}", Task()).id for number in range(count)]


def test_the_first_process_claims_all_jobs_and_the_housekeeping(store: Store, start: Open) -> None:
    ids, one = add_jobs(store, 3), start("one")
    assert one.refresh() == ids and one.does_housekeeping()
    assert all(one.is_mine(job_id) and not one.is_lost(job_id) for job_id in ids)


def test_a_second_process_gets_its_share_once_the_first_has_given_up_its_surplus(
    store: Store, start: Open, clock: Hands
) -> None:
    ids, one, two = add_jobs(store, 5), start("one"), start("two")
    assert one.refresh() == ids
    assert two.refresh() == [] and not two.does_housekeeping(), "all is claimed"
    clock.time_s += BEAT_EVERY_S
    kept = one.refresh()
    assert len(kept) == 3, "half of five, rounded up"
    given_up = [job_id for job_id in ids if job_id not in kept]
    assert not any(one.is_mine(job_id) for job_id in given_up)
    for job_id in given_up:
        one.finish(job_id)
    assert one.refresh() == kept, "it leaves them to the other"
    assert two.refresh() == given_up and one.is_lost(given_up[0])


def test_a_process_reclaims_its_finished_job_only_after_a_pause(store: Store, start: Open, clock: Hands) -> None:
    ids, one = add_jobs(store, 2), start("one")
    one.refresh()
    one.finish(ids[0])
    assert one.refresh() == ids[1:]
    clock.time_s += REST_S - BEAT_EVERY_S
    assert one.refresh() == ids[1:]
    clock.time_s += BEAT_EVERY_S
    assert sorted(one.refresh()) == ids, "no other process has taken it"


def test_a_process_claims_no_more_than_its_share_of_what_is_free(store: Store, start: Open) -> None:
    one, two = start("one"), start("two")
    one.refresh(), two.refresh()
    ids = add_jobs(store, 3)
    assert len(one.refresh()) == 2 and len(two.refresh()) == 1
    assert one.does_housekeeping() and not two.does_housekeeping()
    assert {*one.refresh(), *two.refresh()} == {*ids}


def test_jobs_of_a_process_that_died_are_taken_over_within_fifteen_seconds(
    store: Store, start: Open, clock: Hands
) -> None:
    ids, one, two = add_jobs(store, 2), start("one"), start("two")
    assert one.refresh() == ids and two.refresh() == []
    taken_s = None
    for second in range(1, 16):
        clock.time_s += 1.0
        if taken_s is None and two.refresh() == ids:
            taken_s = second
    assert taken_s is not None and taken_s > 4 * BEAT_EVERY_S, "a process may miss a few renewals"
    assert two.does_housekeeping()


def test_jobs_of_a_lost_process_do_not_wait_for_the_lease_of_another_lost_one(
    store: Store, start: Open, clock: Hands
) -> None:
    """Two of three processes are lost, the second one when the lease of the first ends."""
    one, two, three = start("one"), start("two"), start("three")
    for each in (one, two, three):
        each.refresh()
    ids = add_jobs(store, 6)
    held = [each.refresh() for each in (one, two, three)]
    assert [len(each) for each in held] == [2, 2, 2]
    for _ in range(int(LEASE_S) - 1):
        clock.time_s += 1.0
        two.refresh(), three.refresh()
    clock.time_s += 1.0  # the first lease ends, and the second process is lost
    waited_s = 0.0
    while not {*held[0]} <= {*three.refresh()}:
        clock.time_s += 0.5
        waited_s += 0.5
        assert waited_s < LEASE_S / 2, "the lost second process counts as one that could claim them"
    assert waited_s >= SHARE_S
    for _ in range(int(2 * LEASE_S)):
        clock.time_s += 1.0
        assert {*held[0]} <= {*three.refresh()}, "they are not given up again"
    assert sorted(three.refresh()) == ids


def test_jobs_claimed_beyond_the_share_are_shared_again_with_a_process_that_was_only_slow(
    store: Store, start: Open, clock: Hands
) -> None:
    one, two = start("one"), start("two")
    one.refresh(), two.refresh()
    ids = add_jobs(store, 4)
    assert one.refresh() == ids[:2]
    for _ in range(4):
        clock.time_s += 1.0
        one.refresh()
    assert one.refresh() == ids, "the other has not claimed them"
    for _ in range(30):
        clock.time_s += 1.0
        for job_id in {*ids} - {*one.refresh()}:
            if not one.is_lost(job_id):
                one.finish(job_id)
        two.refresh()
    assert sorted(one.refresh() + two.refresh()) == ids and len(two.refresh()) == 2
