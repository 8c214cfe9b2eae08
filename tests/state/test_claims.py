"""Claims: one process has a job, another takes over when its lease has ended, and the first can write nothing then."""

from __future__ import annotations

from dataclasses import replace

import pytest

from broker.errors import FencedError
from broker.state.base import FENCE
from broker.state.claims import HOUSEKEEPING, LEASE_S, JobLoad, hold_claim
from broker.state.daemon_stats import DaemonStats, decode_stats
from broker.state.store import Store
from broker.types import Attempt, JobStatus, Placement, Task
from tests.simulation.world import make_offer
from tests.state.conftest import OpenStore
from tests.state.samples import Hands


@pytest.fixture
def wait(store: Store, clock: Hands, monkeypatch: pytest.MonkeyPatch) -> object:
    """Let the time of the store be the test's."""
    monkeypatch.setattr(type(store), "read_time_s", lambda self: clock.now_s())

    def wait(duration_s: float) -> None:
        clock.time_s += duration_s

    return wait


def test_a_job_is_claimed_once_and_its_epoch_grows(store: Store, open_store: OpenStore, wait: object) -> None:
    other = open_store()
    first, second = store.jobs.add("a", Task()).id, store.jobs.add("b", Task()).id
    for name in ("x", "y"):
        store.claims.renew(name)
    assert store.claims.measure_load() == JobLoad(controller_count=2, job_count=2)
    assert store.claims.find_free(9) == [HOUSEKEEPING, first, second]
    assert store.claims.find_free(2) == [HOUSEKEEPING, first]
    assert store.claims.claim("x", [first]) == {first: 1}
    assert other.claims.claim("y", [first, second, HOUSEKEEPING]) == {second: 1, HOUSEKEEPING: 1}
    assert other.claims.find_free(9) == []
    assert store.claims.renew("x") == {first: 1}
    store.claims.release("x", [first, second])
    assert other.claims.find_free(9) == [first] and other.claims.claim("y", [first]) == {first: 2}


def test_a_takeover_fences_every_write_of_the_first(store: Store, open_store: OpenStore, wait: object) -> None:
    job = store.jobs.add("a", Task()).id
    other = open_store()
    store.claims.renew("x")
    store.claims.claim("x", [job])
    with hold_claim(job, 1):
        assert store.jobs.set_status(job, JobStatus.STARTING)
        wait(LEASE_S + 0.1)  # type: ignore[operator]
        assert store.jobs.set_status(job, JobStatus.RUNNING), "without a lease, but no other process has taken over"
        other.claims.renew("y")
        assert other.claims.claim("y", [job]) == {job: 2}
        for write in (
            lambda: store.jobs.set_status(job, JobStatus.FAILED),
            lambda: store.intents.is_open("t"),
            lambda: store.response_times.update("x", "y", lambda pace: pytest.fail("is not reached")),
        ):
            with pytest.raises(FencedError):
                write()
        assert store.claims.renew("x") == {}, "claims are no work for a job"
    assert FENCE.get() is None
    store.jobs.request_cancel(job)  # a command needs no claim
    found = other.jobs.get(job)
    assert found is not None and found.status is JobStatus.RUNNING


def test_a_controller_that_ended_is_forgotten_and_one_whose_renewal_is_late_is_not(store: Store, wait: object) -> None:
    job = store.jobs.add("a", Task()).id
    store.claims.renew("x")
    store.claims.claim("x", [job])
    wait(LEASE_S - 0.5)  # type: ignore[operator]
    store.claims.renew("y")
    assert store.claims.measure_load().controller_count == 2
    assert store.claims.find_free(9) == [HOUSEKEEPING] and store.claims.renew("x") == {job: 1}
    wait(1000.0)  # type: ignore[operator]
    store.claims.renew("y")
    assert [row["name"] for row in store.rows("SELECT name FROM controllers ORDER BY name")] == ["x", "y"]
    wait(3600.0)  # type: ignore[operator]
    store.claims.renew("y")
    assert [row["name"] for row in store.rows("SELECT name FROM controllers")] == ["y"]


def test_an_ended_job_is_claimed_while_its_attempt_is_not_closed(store: Store, wait: object) -> None:
    """Its last machines are taken down by a controller, and the attempt has no cost before that."""
    ended, done = store.jobs.add("a", Task()).id, store.jobs.add("b", Task()).id
    placement = Placement(offer=make_offer("east1a"), is_spot=False, node_count=1)
    attempt = Attempt(job_id=ended, number=1, cluster="a-1", placement=placement, started_s=1.0)
    store.jobs.put_attempt(attempt)
    store.jobs.put_attempt(replace(attempt, job_id=done, ended_s=2.0))
    for job in (ended, done):
        store.jobs.set_status(job, JobStatus.FAILED)
    assert store.claims.find_free(9) == [HOUSEKEEPING, ended]
    store.jobs.put_attempt(replace(attempt, ended_s=2.0))
    assert store.claims.find_free(9) == [HOUSEKEEPING]


def test_only_a_lease_keeps_a_claim(store: Store, wait: object) -> None:
    job = store.jobs.add("a", Task()).id
    store.claims.renew("x")
    store.claims.claim("x", [job])
    wait(LEASE_S - 0.5)  # type: ignore[operator]
    assert store.claims.renew("x") == {job: 1}
    wait(LEASE_S - 0.5)  # type: ignore[operator]
    assert store.claims.find_free(9) == [HOUSEKEEPING] and store.claims.has_controller()
    wait(1.0)  # type: ignore[operator]
    assert store.claims.find_free(9) == [HOUSEKEEPING, job] and not store.claims.has_controller()
    assert store.claims.measure_load().controller_count == 0


def test_only_a_lease_that_has_not_ended_is_extended(store: Store, open_store: OpenStore, wait: object) -> None:
    job, other = store.jobs.add("a", Task()).id, open_store()
    assert not other.claims.extend("x") and not store.claims.has_controller(), "an extension begins no lease"
    store.claims.renew("x", stats := DaemonStats(failures=3))
    store.claims.claim("x", [job])
    for _ in range(3):
        wait(LEASE_S - 0.5)  # type: ignore[operator]
        assert other.claims.extend("x")
    assert store.claims.find_free(9) == [HOUSEKEEPING] and store.claims.list_stats() == {"x": stats}
    wait(LEASE_S + 0.5)  # type: ignore[operator]
    assert not other.claims.extend("x") and store.claims.find_free(9) == [HOUSEKEEPING, job]
    assert store.claims.renew("x") == {job: 1}
    store.claims.resign("x")
    assert not other.claims.extend("x") and not store.claims.has_controller(), "nor brings one back"


def test_a_clock_that_was_set_back_does_not_extend_the_lease_of_a_dead_controller(store: Store, wait: object) -> None:
    """As after a failover to a database server whose clock is an hour behind."""
    job = store.jobs.add("a", Task()).id
    for name in ("dead", "alive"):
        store.claims.renew(name)
    store.claims.claim("dead", [job])
    store.claims.claim("alive", [HOUSEKEEPING])
    wait(-3600.0)  # type: ignore[operator]
    assert store.claims.renew("alive") == {HOUSEKEEPING: 1}
    assert store.claims.find_free(9) == [job] and store.claims.measure_load().controller_count == 1
    assert store.claims.claim("alive", [job]) == {job: 2}


def test_a_controller_that_resigns_releases_its_jobs_at_once(store: Store, wait: object) -> None:
    job = store.jobs.add("a", Task()).id
    for name in ("x", "y"):
        store.claims.renew(name)
    store.claims.claim("x", [job])
    store.claims.resign("x")
    assert store.claims.measure_load().controller_count == 1
    assert store.claims.claim("y", store.claims.find_free(9)) == {HOUSEKEEPING: 1, job: 2}


def test_an_epoch_survives_the_end_of_its_job(store: Store, wait: object) -> None:
    job = store.jobs.add("a", Task()).id
    store.claims.renew("x")
    store.claims.claim("x", [job])
    store.jobs.set_status(job, JobStatus.SUCCEEDED)
    assert store.claims.find_free(9) == [HOUSEKEEPING]
    assert store.claims.renew("x") == {job: 1}
    with hold_claim(7, 1), pytest.raises(FencedError):
        store.jobs.request_cancel(job)


def test_a_claim_is_durable(sqlite_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch that a crash of the store takes back would be given out twice."""
    seen: list[bool] = []
    before = sqlite_store.transaction
    monkeypatch.setattr(
        sqlite_store, "transaction", lambda *, is_durable=True: seen.append(is_durable) or before(is_durable=is_durable)
    )
    sqlite_store.claims.claim("x", [HOUSEKEEPING])
    assert seen == [True]


PLACE = {"host": "127.0.0.1", "port": 30000, "wanted": 1}


def test_a_service_is_claimed_like_a_job_and_its_first_controller_is_fenced(
    store: Store, open_store: OpenStore, wait: object
) -> None:
    other = open_store()
    job = store.jobs.add("a", Task()).id
    for name in ("chat", "embed"):
        store.services.add(name, Task(), **PLACE)  # type: ignore[arg-type]
    numbers = {name: number for number, name in store.services.list_claims().items()}
    assert len(numbers) == 2 and max(numbers.values()) < HOUSEKEEPING
    for name in ("x", "y"):
        store.claims.renew(name)
    assert store.claims.find_free(9) == [*sorted(numbers.values()), HOUSEKEEPING, job]
    assert store.claims.measure_load() == JobLoad(controller_count=2, job_count=3)
    chat = numbers["chat"]
    assert store.claims.claim("x", [chat]) == {chat: 1}
    assert other.claims.claim("y", [chat, numbers["embed"]]) == {numbers["embed"]: 1}
    with hold_claim(chat, 1):
        store.services.set_wanted("chat", 2)
        wait(LEASE_S + 0.1)  # type: ignore[operator]
        other.claims.renew("y")
        assert other.claims.claim("y", [chat]) == {chat: 2}
        for write in (
            lambda: store.services.set_wanted("chat", 3),
            lambda: store.services.draw_number("chat"),
            lambda: store.jobs.add("chat-1", Task(), "replica"),
            lambda: store.services.delete("chat"),
        ):
            with pytest.raises(FencedError):
                write()
    store.services.request_down("chat")  # a command needs no claim
    found = other.services.get("chat")
    assert found is not None and found.wanted == 2 and found.down_requested


def test_a_number_that_another_service_had_continues_its_epoch(store: Store) -> None:
    """Otherwise a controller of the first service could write for the second."""
    store.services.add("chat", Task(), **PLACE)  # type: ignore[arg-type]
    (number,) = store.services.list_claims()
    store.claims.renew("x")
    assert store.claims.claim("x", [number]) == {number: 1}
    store.services.delete("chat")
    assert number not in store.claims.find_free(9)
    store.services.add("embed", Task(), **PLACE)  # type: ignore[arg-type]
    assert store.services.list_claims() == {number: "embed"}
    store.claims.release("x", [number])
    assert store.claims.claim("x", [number]) == {number: 2}


def test_processes_with_a_lease_report_their_work(store: Store, open_store: OpenStore, wait: object) -> None:
    stats = DaemonStats(step_counts=(1, 0, 0, 0, 0, 0, 0, 2), step_s=90.5, failures=3, lag_s=0.125)
    store.claims.renew("x", stats)
    store.claims.renew("y")
    assert open_store().claims.list_stats() == {"x": stats}
    store.claims.renew("x", replace(stats, failures=4))
    assert store.claims.list_stats()["x"].failures == 4
    wait(LEASE_S + 0.1)  # type: ignore[operator]
    assert store.claims.list_stats() == {}


def test_leader_reports_its_work_until_another_leads(store: Store) -> None:
    store.leader.lead()
    assert store.leader.read_stats() is None
    store.leader.beat(DaemonStats(failures=2))
    assert store.leader.read_stats() == DaemonStats(failures=2)
    assert store.leader.lead() == store.leader.read_epoch()
    assert store.leader.read_stats() is None


@pytest.mark.parametrize("text", ["", "x", "[]", "[[1], 0, 0, 0]", "[1, 2, 3, 4]", "null"])
def test_unreadable_report_counts_as_none(text: str) -> None:
    assert decode_stats(text) is None
