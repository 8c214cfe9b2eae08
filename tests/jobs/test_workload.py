"""A process claims about as many jobs as every other one, and leaves to others what it has given up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from broker.errors import FencedError, StateError
from broker.jobs.workload import BEAT_EVERY_S, REST_S, SHARE_S, SharedWorkload
from broker.state.claims import LEASE_S, Claims
from broker.state.store import Store
from broker.types import Task
from tests.simulation.world import Crash, CrashingStore, CrashPoints
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
    assert sorted([*one.refresh(), *two.refresh()]) == ids and len(two.refresh()) == 2


def fail(*_: object) -> None:
    raise StateError("the server does not answer")


def test_a_job_whose_release_failed_is_left_to_others_once_the_store_answers(
    store: Store, start: Open, clock: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, one, two = add_jobs(store, 2), start("one"), start("two")
    assert one.refresh() == ids and two.refresh() == []
    clock.time_s += BEAT_EVERY_S
    assert one.refresh() == ids[:1], "a surplus job is given up"
    with monkeypatch.context() as patch:
        patch.setattr(Claims, "release", fail)
        one.finish(ids[1])
        one.refresh()
    for _ in range(int(REST_S)):
        clock.time_s += 1.0
        assert one.refresh() == ids[:1]
        if two.refresh() == ids[1:]:
            return
    pytest.fail("the job is claimed by a process that never drives it")


def test_a_claim_whose_answer_was_lost_and_that_is_surplus_is_left_to_others(
    store: Store, start: Open, clock: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = start("one")
    one.refresh()
    ids = add_jobs(store, 2)
    claim = Claims.claim
    with monkeypatch.context() as patch:
        patch.setattr(Claims, "claim", lambda *arguments: fail(claim(*arguments)))
        assert one.refresh() == []
    two = start("two")
    for _ in range(int(REST_S)):
        clock.time_s += 1.0
        if sorted([*one.refresh(), *two.refresh()]) == ids:
            return
    pytest.fail("a job is claimed by a process that never drives it")


def add_service(store: Store, name: str) -> None:
    store.services.add(name, Task(), host="127.0.0.1", port=30000, wanted=1)


def test_a_service_has_one_controller_which_another_replaces(store: Store, start: Open, clock: Hands) -> None:
    (job_id,) = add_jobs(store, 1)
    add_service(store, "chat")
    one, two = start("one"), start("two")
    assert set(one.refresh()) == {"chat", job_id} and one.is_mine("chat")
    assert two.refresh() == [] and not two.is_mine("chat") and two.is_lost("chat")
    with pytest.raises(FencedError, match="service chat"):
        two.hold("chat")
    clock.time_s += LEASE_S + SHARE_S  # one was killed
    two.refresh()
    clock.time_s += SHARE_S
    assert "chat" in two.refresh()
    with one.hold("chat"), pytest.raises(FencedError):
        store.services.set_wanted("chat", 3)
    clock.time_s += BEAT_EVERY_S
    one.refresh()
    assert one.is_lost("chat") or not two.is_mine("chat"), "never both"


def test_a_service_that_is_down_is_released(store: Store, start: Open, clock: Hands) -> None:
    add_service(store, "chat")
    one = start("one")
    assert one.refresh() == ["chat"]
    store.services.delete("chat")
    assert one.refresh() == [] and one.is_lost("chat")
    one.finish("chat")
    add_service(store, "embed")
    assert one.refresh() == ["embed"], "under the same number"


@pytest.mark.parametrize("killed_at", range(1, 7))
def test_a_controller_that_is_killed_at_any_commit_leaves_one_driver(
    tmp_path: Path, store: Store, start: Open, clock: Hands, killed_at: int
) -> None:
    """Before or after the commit of a lease, a claim or a release."""
    add_service(store, "chat")
    CrashingStore.points = CrashPoints()
    dying = CrashingStore(tmp_path / "state.db", clock=clock)
    CrashingStore.points.crash_at = CrashingStore.points.count + killed_at
    first = SharedWorkload(dying, clock, name="first")
    try:
        first.refresh()
        first.finish("chat")
    except Crash:
        pass
    assert CrashingStore.points.has_crashed, "it was killed"
    second = start("second")
    for _ in range(8):
        clock.time_s += BEAT_EVERY_S
        second.refresh()
    assert second.is_mine("chat")
    with second.hold("chat"):
        store.services.set_wanted("chat", 2)
