"""A blocked event loop keeps its lease, a hung one loses it, and neither can write what another process may write."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from broker.errors import FencedError, StateError
from broker.jobs.lease_keeper import CHECK_EVERY_S, HANG_S_MAX, SILENT_S, LeaseKeeper, keep_lease
from broker.jobs.workload import BEAT_EVERY_S, SHARE_S, LeaderWorkload, SharedWorkload
from broker.state.claims import LEASE_S, Claims
from broker.state.leader import STALE_S
from broker.state.store import Store
from broker.types import Task
from tests.state.samples import Hands


@pytest.fixture
def clock() -> Hands:
    return Hands()


class Office:
    """Two processes that share a store, the first one with a keeper, which is stepped by hand."""

    def __init__(self, folder: Path, clock: Hands) -> None:
        self._folder, self.clock = folder, clock
        self.store = self.open_store()
        self.opened = 0
        self.jobs = [self.store.jobs.add(f"j{number}", Task()).id for number in range(2)]
        self.one = SharedWorkload(self.open_store(), clock, name="one")
        self.two = SharedWorkload(self.open_store(), clock, name="two")
        assert self.one.refresh() == self.jobs
        self.keeper = LeaseKeeper(self.one, clock, self._open_again)

    def open_store(self) -> Store:
        return Store(self._folder / "state.db", clock=self.clock)

    def _open_again(self) -> Store:
        self.opened += 1
        return self.open_store()

    def block(self, duration_s: float) -> float | None:
        """Let the first loop block; return after how long the second process has taken over, None if it has not."""
        for elapsed_s in range(1, int(duration_s) + 1):
            self.clock.time_s += 1.0
            self.keeper.step()
            if set(self.two.refresh()) == set(self.jobs):
                return elapsed_s
        return None


@pytest.fixture
def office(tmp_path: Path, clock: Hands) -> Office:
    return Office(tmp_path, clock)


def test_lease_is_extended_twice_before_it_can_end() -> None:
    """The lease that the loop renewed last is extended twice before it can end."""
    assert SILENT_S + 2 * CHECK_EVERY_S < LEASE_S - BEAT_EVERY_S
    assert LEASE_S + BEAT_EVERY_S + SHARE_S < 15.0, "jobs of a process that died are taken over within 15 s"


def test_a_blocked_loop_keeps_its_jobs(office: Office) -> None:
    assert office.block(HANG_S_MAX - 1) is None
    assert office.opened == 1
    office.one.refresh()
    assert not any(office.one.is_lost(job) for job in office.jobs), "as if nothing had happened"
    with office.one.hold(office.jobs[0]):
        office.store.jobs.request_cancel(office.jobs[0])


def test_a_hung_loop_loses_its_jobs_and_can_write_nothing(office: Office, caplog: pytest.LogCaptureFixture) -> None:
    held = office.one.hold(office.jobs[0])
    taken_s = office.block(2 * HANG_S_MAX)
    assert taken_s is not None and HANG_S_MAX < taken_s <= HANG_S_MAX + LEASE_S + SHARE_S + 1
    with held, pytest.raises(FencedError):
        office.store.jobs.request_cancel(office.jobs[0])
    warnings = [each.message for each in caplog.records if each.name == "broker.jobs.lease_keeper"]
    assert len(warnings) == 1 and "60 s" in warnings[0], "once, not at each step"
    office.one.refresh()
    office.keeper.step()
    assert all(office.one.is_lost(job) or not office.two.is_mine(job) for job in office.jobs), "never both"


def test_a_process_that_is_suspended_with_its_thread_loses_its_jobs_at_once(office: Office) -> None:
    office.clock.time_s += LEASE_S + 1.0
    office.keeper.step()  # it wakes up, before the loop has a turn
    assert not office.store.claims.has_controller(), "a lease that has ended is not brought back"


def test_a_loop_with_turns_renews_its_lease_alone(office: Office) -> None:
    for _ in range(20):
        office.clock.time_s += SILENT_S / 2
        office.keeper.step()
        office.one.refresh()
    assert office.opened == 0, "no second connection"


def test_a_resigned_process_stays_resigned(office: Office) -> None:
    office.clock.time_s += SILENT_S
    office.one.resign()
    office.keeper.step()
    assert office.opened == 1 and not office.store.claims.has_controller()


def test_a_blocked_leader_keeps_its_state_folder_until_it_hangs_and_one_that_resigned_or_was_replaced_stays_so(
    office: Office, clock: Hands
) -> None:
    own, other = office.open_store(), office.open_store()
    own.leader.lead()
    leader = LeaderWorkload(own, clock)
    keeper = LeaseKeeper(leader, clock, office.open_store)
    for _ in range(int(HANG_S_MAX + STALE_S)):
        clock.time_s += 1.0
        keeper.step()
        assert other.leader.measure_beat_age_s() <= max(SILENT_S, clock.time_s - leader.turn_s - HANG_S_MAX + 1.0)
    clock.time_s += 1.0
    assert not leader.extend(other) and other.leader.measure_beat_age_s() > STALE_S, "stale is not brought back"
    leader.refresh()
    assert leader.extend(other)
    other.leader.lead()
    clock.time_s += 3.0
    assert not leader.extend(office.store) and office.store.leader.measure_beat_age_s() == 3.0, "of the new leader"
    LeaderWorkload(other, clock).resign()
    assert not LeaderWorkload(other, clock).extend(office.store)
    assert office.store.leader.measure_beat_age_s() == clock.time_s


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_a_clock_that_was_set_extends_nothing(office: Office, jump_s: float) -> None:
    office.clock.time_s += jump_s
    office.keeper.step()
    assert office.opened == 0


def test_a_store_that_does_not_answer_is_asked_again(
    office: Office, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Claims, "extend", lambda *_: (_ for _ in ()).throw(StateError("the server does not answer")))
        for _ in range(3):
            office.clock.time_s += 1.0
            office.keeper.step()
    assert caplog.text.count("does not answer") == 1
    assert office.block(2 * LEASE_S) is None


def test_the_thread_extends_the_lease_and_ends_with_the_block(
    office: Office, clock: Hands, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    extended = threading.Event()
    extend = Claims.extend

    def note(claims: Claims, holder: str) -> bool:
        done = extend(claims, holder)
        if done and threading.current_thread().name == "lease":
            extended.set()
        return done

    monkeypatch.setattr(Claims, "extend", note)
    clock.time_s += SILENT_S  # the loop is blocked
    with caplog.at_level(logging.WARNING), keep_lease(office.one, clock, office.open_store, check_every_s=0.001):
        thread = next(each for each in threading.enumerate() if each.name == "lease")
        assert extended.wait(60.0)
    thread.join(60.0)
    assert not thread.is_alive() and "lease_keeper" not in caplog.text


def test_the_keepers_own_connection_is_closed_with_it(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Store] = []
    close = Store.close
    monkeypatch.setattr(Store, "close", lambda store: (closed.append(store), close(store))[1])
    office.keeper.close()
    assert closed == [], "it was never opened"
    office.block(SILENT_S + 2)
    office.keeper.close()
    assert len(closed) == office.opened == 1
