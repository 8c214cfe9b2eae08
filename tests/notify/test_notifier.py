"""The notifier delivers at least once, with the same id, despite kills, and without delaying other messages.

Each claim holds for a SQLite file and for PostgreSQL.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable

import pytest

from broker.errors import FencedError, StateError, TransientError, UsageError
from broker.notify import notifier as module
from broker.notify.notification import Notification, Sink
from broker.notify.notifier import BACKOFF_S_MAX, GIVE_UP_S, LINGER_S, POLL_S, POSITION, SINK, Notifier
from broker.notify.settings import NotifySettings
from broker.state.claims import hold_claim
from broker.state.people import Role
from broker.state.store import Store
from broker.types import EventKind, NotificationKind, NotifySpec, Task, make_event
from tests.state.conftest import OpenStore, clock, open_postgres, open_sqlite, open_store, postgres, store
from tests.state.samples import Hands

__all__ = ["clock", "open_postgres", "open_sqlite", "open_store", "postgres", "store"]
HOOK, OTHER = "https://hook.example/CANARY", "https://other.example/"


class Killed(SystemExit):
    """The process ends here, as at `kill -9`."""


class Receiver:
    """Receives notifications by target; `fails` says which deliveries fail, and how."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, str]] = []
        self.tried: Counter[str] = Counter()
        self.fails: Callable[[str], BaseException | None] = lambda target: None
        self.fails_after: Callable[[str], BaseException | None] = lambda target: None
        self.hold: asyncio.Event | None = None

    async def send(self, settings: NotifySettings, sink: Sink, notification: Notification) -> None:
        self.tried[sink.target] += 1
        if self.hold is not None and sink.target == HOOK:
            await self.hold.wait()
        if error := self.fails(sink.target):
            raise error
        self.taken.append((sink.target, notification.id))
        if error := self.fails_after(sink.target):
            raise error

    def list_texts(self, target: str) -> list[str]:
        return [id for to, id in self.taken if to == target]


class Stage:
    def __init__(self, store: Store, clock: Hands) -> None:
        self.store, self.clock, self.receiver = store, clock, Receiver()
        self.settings = NotifySettings(spec=NotifySpec(webhook=HOOK))
        self.notifier = self.make()
        self.notifier.step()  # from now on

    def make(self) -> Notifier:
        return Notifier(self.store, self.clock, read_settings=lambda: self.settings, send=self.receiver.send)

    def end_job(self, task: Task | None = None, *, request_id: str | None = None) -> int:
        job = self.store.jobs.add("train", task or Task(), request_id)
        self.store.events.add(make_event(EventKind.ENDED, status="FAILED", failure="x", outcome=None), job_id=job.id)
        return job.id

    def run(self, steps: int = 1, *, notifier: Notifier | None = None, pause_s: float = POLL_S) -> None:
        async def work() -> None:
            for _ in range(steps):
                (notifier or self.notifier).step()
                for _ in range(20):
                    await asyncio.sleep(0)  # let deliveries run to their next wait
                self.clock.time_s += pause_s
            (notifier or self.notifier).step()
            for _ in range(20):
                await asyncio.sleep(0)

        asyncio.run(work())


@pytest.fixture
def stage(store: Store, clock: Hands) -> Stage:
    return Stage(store, clock)


def test_event_is_delivered_once_if_nothing_fails(stage: Stage) -> None:
    stage.end_job()
    stage.run(3)
    stage.run(3, notifier=stage.make())
    assert len(stage.receiver.taken) == 1


def test_events_from_before_the_first_start_are_not_reported(store: Store, clock: Hands) -> None:
    job = store.jobs.add("train", Task())
    store.events.add(make_event(EventKind.LATE), job_id=job.id)
    stage = Stage(store, clock)
    stage.run(2)
    assert stage.receiver.taken == []


def test_events_while_no_daemon_runs_are_reported_by_the_next(stage: Stage) -> None:
    stage.end_job()
    stage.run(2, notifier=stage.make())
    assert len(stage.receiver.taken) == 1


def test_killed_between_delivery_and_record_sends_again_with_the_same_id(stage: Stage) -> None:
    stage.receiver.fails_after = lambda target: Killed()
    stage.end_job()
    with pytest.raises(Killed):
        stage.run()
    stage.receiver.fails_after = lambda target: None
    stage.run(10, notifier=stage.make())
    first, second = stage.receiver.list_texts(HOOK)
    assert first == second


def test_record_that_cannot_be_written_sends_again_with_the_same_id(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, failures = stage.store.meta.put, ["the disk is full"]

    def fail_once(key: str, value: str) -> None:
        if failures and key.startswith(SINK) and not json.loads(value).get("failures"):
            raise StateError(failures.pop())
        put(key, value)

    monkeypatch.setattr(stage.store.meta, "put", fail_once)
    stage.end_job()
    stage.run(10)
    assert len(stage.receiver.taken) == 2 and len(set(stage.receiver.taken)) == 1


def test_dead_sink_is_tried_again_after_growing_waits_and_delays_no_other(stage: Stage) -> None:
    stage.receiver.fails = lambda target: TransientError("down") if target == HOOK else None
    for _ in range(3):
        stage.end_job(Task(notify=NotifySpec()))
        stage.end_job(Task(notify=NotifySpec(webhook=OTHER)))
    stage.run(1)
    assert len(stage.receiver.list_texts(OTHER)) == 3
    stage.run(100, pause_s=60.0)
    tries = stage.receiver.tried[HOOK]
    assert 5 < tries <= 60, "backoff, at most five minutes"
    assert stage.receiver.list_texts(HOOK) == []
    stage.receiver.fails = lambda target: None
    stage.run(3, pause_s=BACKOFF_S_MAX)
    assert len(set(stage.receiver.list_texts(HOOK))) == 3
    assert len(stage.receiver.list_texts(OTHER)) == 3


def test_other_sinks_get_nothing_twice_when_a_daemon_restarts_with_one_dead(stage: Stage) -> None:
    stage.receiver.fails = lambda target: TransientError("down") if target == HOOK else None
    both = Task(notify=NotifySpec(mail=("a@x.example",)))
    stage.end_job(both)
    stage.end_job(both)
    stage.run(2)
    for _ in range(3):
        stage.run(2, notifier=stage.make())
    assert len(stage.receiver.list_texts("a@x.example")) == 2
    stage.receiver.fails = lambda target: None
    again = stage.make()
    stage.run(3, notifier=again, pause_s=BACKOFF_S_MAX)
    assert len(stage.receiver.list_texts(HOOK)) == 2
    assert len(stage.receiver.list_texts("a@x.example")) == 2
    assert stage.store.meta.get(POSITION) == str(stage.store.events.get_newest_id()), "the records of sinks are gone"


def test_backoff_survives_a_restart(stage: Stage) -> None:
    stage.receiver.fails = lambda target: TransientError("down")
    stage.end_job()
    stage.run(60, pause_s=BACKOFF_S_MAX)
    before = stage.receiver.tried[HOOK]
    for _ in range(5):
        stage.run(1, notifier=stage.make(), pause_s=0.0)
    assert stage.receiver.tried[HOOK] <= before + 1


def test_delivery_that_hangs_delays_neither_the_step_nor_other_sinks(stage: Stage) -> None:
    async def work() -> None:
        stage.receiver.hold = asyncio.Event()
        stage.end_job()
        stage.end_job(Task(notify=NotifySpec(webhook=OTHER)))
        for _ in range(5):
            stage.notifier.step()
            await asyncio.sleep(0)
        assert stage.receiver.list_texts(OTHER) and not stage.receiver.list_texts(HOOK)
        assert stage.receiver.tried[HOOK] == 1, "one at a time"
        await stage.notifier.rest()

    asyncio.run(work())


def test_superseded_controller_sends_nothing(open_store: OpenStore, clock: Hands) -> None:
    store, other = open_store(), open_store()
    stage = Stage(store, clock)
    old = _take_housekeeping(store, "old")
    _take_housekeeping(other, "new")
    stage.end_job()
    with hold_claim(0, old):
        stage.run(2)
    assert stage.receiver.taken == []
    stage.run(2, notifier=stage.make())
    assert len(stage.receiver.taken) == 1


def _take_housekeeping(store: Store, holder: str) -> int:
    """Raise the epoch of the housekeeping, as a claim does after the lease of its holder has expired."""
    store.claims.resign("old")
    store.claims.renew(holder)
    return store.claims.claim(holder, [0])[0]


def test_old_notification_is_given_up_and_the_next_is_sent(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    stage.receiver.fails = lambda target: TransientError("down")
    stage.end_job()
    stage.run(1)
    stage.clock.time_s += GIVE_UP_S
    stage.end_job()
    stage.receiver.fails = lambda target: None
    with caplog.at_level(logging.WARNING):
        stage.run(3, pause_s=BACKOFF_S_MAX)
    assert len(stage.receiver.taken) == 1
    assert "gave up on notification" in caplog.text


def test_queue_of_a_dead_sink_is_bounded(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUEUE_MAX", 5)
    stage.receiver.fails = lambda target: TransientError("down")
    for _ in range(8):
        stage.end_job()
    stage.run(1)
    stage.receiver.fails = lambda target: None
    stage.run(3, pause_s=BACKOFF_S_MAX)
    assert len(stage.receiver.taken) == 5


def test_dead_sink_does_not_keep_the_records_of_all_later_sinks(stage: Stage) -> None:
    """Each job with `event_callback` has a sink of its own: over months, their records would fill the store."""
    stage.receiver.fails = lambda target: TransientError("down") if target == HOOK else None
    for _ in range(8):
        stage.end_job(Task(event_callback="true"))
        stage.run(3, pause_s=GIVE_UP_S / 6)
    assert stage.receiver.tried["true"] == 8
    rows = stage.store.rows(f"SELECT key FROM meta WHERE substr(key, 1, {len(SINK)}) = ?", (SINK,))
    assert len(rows) <= 4, "the dead sink, and the commands of jobs that ended in the last three days"
    stage.run(3, notifier=stage.make())
    assert stage.receiver.tried["true"] == 8, "nothing is repeated after a restart"


def test_sinks_that_fail_do_not_take_the_turns_of_others(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SENDING_MAX", 1)
    stage.receiver.fails = lambda target: TransientError("down") if target == HOOK else None
    stage.end_job()
    stage.run(2)
    stage.receiver.hold = asyncio.Event()  # from now on, the dead sink does not even answer
    stage.end_job(Task(notify=NotifySpec(webhook=OTHER)))
    stage.clock.time_s += BACKOFF_S_MAX  # both are due
    stage.run()
    assert len(stage.receiver.list_texts(OTHER)) == 1


def test_number_of_deliveries_at_once_is_bounded_over_several_steps(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SENDING_MAX", 2)
    hold, begun = asyncio.Event(), list[str]()

    async def send(settings: NotifySettings, sink: Sink, notification: Notification) -> None:
        begun.append(sink.target)
        await hold.wait()

    stage.receiver.send = send  # type: ignore[method-assign]
    notifier = stage.make()
    for number in range(5):
        stage.end_job(Task(notify=NotifySpec(webhook=f"https://{number}.example/")))
    stage.run(3, notifier=notifier)
    assert len(begun) == 2


@pytest.mark.parametrize("is_server", [False, True])
def test_webhooks_of_a_servers_users_are_limited_and_the_operators_are_not(stage: Stage, is_server: bool) -> None:
    if is_server:
        stage.store.tokens.add(digest="x", user="ada", role=Role.ADMIN, expires_s=None)
    sent: dict[str, bool] = {}

    async def send(settings: NotifySettings, sink: Sink, notification: Notification) -> None:
        sent[sink.target] = sink.is_limited

    stage.receiver.send = send  # type: ignore[method-assign]
    notifier = stage.make()
    stage.end_job(Task(notify=NotifySpec(webhook=OTHER)))
    stage.end_job()
    stage.run(2, notifier=notifier)
    assert sent == {OTHER: is_server, HOOK: False}


def test_daemon_stays_for_recent_notifications_only(stage: Stage) -> None:
    assert not stage.notifier.is_busy
    stage.receiver.fails = lambda target: TransientError("down")
    stage.end_job()
    stage.run(1)
    assert stage.notifier.is_busy
    stage.clock.time_s += LINGER_S
    assert not stage.notifier.is_busy


def test_invalid_settings_lose_nothing(stage: Stage) -> None:
    def fail() -> NotifySettings:
        raise UsageError("invalid")

    stage.end_job()
    broken = Notifier(stage.store, stage.clock, read_settings=fail, send=stage.receiver.send)
    with pytest.raises(UsageError):
        broken.step()
    stage.run(2, notifier=stage.make())
    assert len(stage.receiver.taken) == 1


def test_replicas_of_services_are_reported_only_if_their_task_says_so(stage: Stage) -> None:
    stage.end_job(request_id="service/web/1")
    stage.end_job(Task(notify=NotifySpec(on=(NotificationKind.FAILED,), webhook=OTHER)), request_id="service/web/2")
    stage.run(2)
    assert stage.receiver.list_texts(HOOK) == [] and len(stage.receiver.list_texts(OTHER)) == 1


def test_targets_appear_in_no_row_and_no_log(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    stage.receiver.fails = lambda target: TransientError("down")
    stage.end_job()
    with caplog.at_level(logging.DEBUG):
        stage.run(3)
    assert "will be sent again" in caplog.text
    rows = [(row["key"], row["value"]) for row in stage.store.rows("SELECT key, value FROM meta")]
    assert any(key.startswith(SINK) for key, _ in rows)
    assert "CANARY" not in f"{rows} {caplog.text}"


def test_unexpected_error_is_logged_and_the_delivery_repeated(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    stage.receiver.fails = lambda target: RuntimeError("a bug")
    stage.end_job()
    with caplog.at_level(logging.WARNING):
        stage.run(1)
    assert "a bug" in caplog.text
    stage.receiver.fails = lambda target: None
    stage.run(2, pause_s=BACKOFF_S_MAX)
    assert len(stage.receiver.taken) == 1


def test_damaged_records_cause_repeats_rather_than_losses(stage: Stage) -> None:
    stage.receiver.fails = lambda target: TransientError("down")
    stage.end_job()
    stage.run(1)
    (key,) = (row["key"] for row in stage.store.rows("SELECT key FROM meta WHERE key LIKE 'notify:sink:%'"))
    stage.store.meta.put(key, "not JSON")
    stage.receiver.fails = lambda target: None
    stage.run(2, notifier=stage.make())
    assert len(stage.receiver.taken) == 1


def test_damaged_job_does_not_hold_up_the_notifications_of_others(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    damaged, _ = stage.end_job(), stage.end_job()
    stage.store.write("UPDATE jobs SET task = 'not JSON' WHERE id = ?", (damaged,))
    stage.run(2)
    assert len(stage.receiver.taken) == 1 and "cannot be reported" in caplog.text


def test_fenced_step_reaches_the_daemon(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def fenced(key: str, value: str) -> None:
        raise FencedError("another daemon")

    monkeypatch.setattr(stage.store.meta, "put", fenced)
    stage.end_job(Task(notify=NotifySpec(on=())))
    with pytest.raises(FencedError):
        stage.notifier.step()


def test_notification_that_is_dropped_while_it_is_sent_takes_no_other_with_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUEUE_MAX", 2)

    async def work() -> None:
        stage.receiver.hold = asyncio.Event()
        ids = [stage.end_job(), stage.end_job()]
        stage.notifier.step()
        await asyncio.sleep(0)
        assert stage.receiver.tried[HOOK] == 1, "the first one is on its way"
        ids.append(stage.end_job())
        stage.notifier.step()
        stage.receiver.hold.set()
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(stage.receiver.list_texts(HOOK)) == len(ids)

    asyncio.run(work())
