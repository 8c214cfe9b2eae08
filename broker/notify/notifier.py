"""Deliver notifications at least once: read new events, and record in the store how far each sink has received them.

The event log is the queue. `notify:position` in the store's `meta` is the id of an event up to which every notification
has been delivered. While a sink lags behind, its own row states the last event delivered, the number of failures since
then, and the time of the next try. Before each delivery that row is written under the fence of this daemon, so that a
superseded one sends nothing; it is written again after the delivery. If the daemon is killed in between, the
notification is sent again, with the same id.

    events       3: job 1 lost   7: job 1 ended   9: job 2 ended
    webhook      delivered       delivered        delivered        its row: {"done": 9}
    mail         delivered       refused          waits            its row: {"done": 3, "failures": 1, "due_s": ...}
    position     6: on the next start, events are read from 7
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable

import msgspec

from broker.clock import Clock
from broker.errors import CloudError, DamagedRowError, FencedError, StateError, UsageError
from broker.frozen import frozen
from broker.notify.notification import NOTABLE, Notification, Sink, choose_sinks, make_notification
from broker.notify.settings import NotifySettings
from broker.provision.refusals import draw_backoff_s
from broker.state.events import EventRow
from broker.state.jobs import REPLICA_REQUEST
from broker.state.store import Store
from broker.types import NotifySpec

log = logging.getLogger(__name__)

POSITION = "notify:position"
SINK = "notify:sink:"
POLL_S = 2.0
PAGE = 200  # events read at once
QUEUE_MAX = 5_000  # notifications that wait for one sink; with more, the oldest is dropped
GIVE_UP_S = 3 * 86400.0  # after the event
LINGER_S = 900.0  # after the event: how long a daemon without jobs stays to deliver its notifications
BACKOFF_S_MAX = 300.0
SENDING_MAX = 16  # sinks at once

Send = Callable[[NotifySettings, Sink, Notification], Awaitable[None]]


def has_undelivered(store: Store, *, now_s: float) -> bool:
    """Return whether recent events are unread or undelivered, because the last daemon was killed or gave up waiting."""
    position = store.meta.get(POSITION)
    if position is None or not position.isdigit():
        return False  # older events are not reported
    return store.events.has_notable(NOTABLE, after=int(position), since_s=now_s - GIVE_UP_S)


@frozen
class Delivery:
    """The record of a sink: the newest event delivered to it, and its failures since then."""

    done: int = 0
    failures: int = 0
    due_s: float = 0.0


class _SinkQueue:
    """The notifications that wait for one sink, and the record in the store."""

    def __init__(self, delivery: Delivery) -> None:
        self.waiting: deque[Notification] = deque()
        self.delivery = delivery
        self.task: asyncio.Task[None] | None = None


class Notifier:
    """Deliver the notifications of one store. Only the daemon that does the housekeeping calls `step`."""

    def __init__(self, store: Store, clock: Clock, *, read_settings: Callable[[], NotifySettings], send: Send) -> None:
        """Create a notifier. `send` raises CloudError or UsageError if the delivery must be repeated."""
        self._store = store
        self._clock = clock
        self._read_settings = read_settings
        self._send = send
        self._head: int | None = None  # the newest event read; None: nothing has been read yet
        self._position = 0
        self._has_news = False  # events were read that the recorded position does not cover
        self._queues: dict[Sink, _SinkQueue] = {}

    @property
    def is_busy(self) -> bool:
        """Return whether notifications of recent events are still undelivered."""
        newest_s = max((queue.waiting[-1].time_s for queue in self._queues.values() if queue.waiting), default=None)
        return newest_s is not None and 0.0 <= self._clock.now_s() - newest_s < LINGER_S

    def step(self) -> float:
        """Read new events and start the deliveries that are due; return the seconds until the next step.

        The caller holds the fence. Raises StateError, FencedError, and UsageError for invalid settings.
        """
        self._read_events()
        now_s = self._clock.now_s()
        for queue in self._queues.values():
            if queue.task is not None and queue.task.done():
                queue.task = None
        sending = sum(1 for queue in self._queues.values() if queue.task is not None)
        due = [
            (sink, queue) for sink, queue in self._queues.items()
            if queue.task is None and queue.waiting and now_s >= queue.delivery.due_s
        ]  # fmt: skip
        due.sort(key=lambda each: each[1].delivery.failures)  # sinks that time out must not keep others waiting
        for sink, queue in due[: max(0, SENDING_MAX - sending)]:
            queue.task = asyncio.ensure_future(self._deliver(sink, queue))
        self._advance()
        return POLL_S

    async def rest(self) -> None:
        """Cancel the deliveries in progress, and forget the queues: the next `step` reads the store again."""
        tasks = [queue.task for queue in self._queues.values() if queue.task is not None]
        self._queues, self._head, self._has_news = {}, None, False
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _read_events(self) -> None:
        newest = self._store.events.get_newest_id()
        if self._head is None:
            self._position = self._read_position(newest)
            self._head = self._position
        if newest == self._head:
            return
        while rows := self._store.events.list_notable(NOTABLE, after=self._head, limit=PAGE):
            default, replicas = self._read_settings().spec, frozenset[int]()
            is_shared = self._store.meta.is_of_server
            if (
                default != NotifySpec()
            ):  # a service starts and ends its replicas by itself: only their own settings count
                replicas = frozenset(self._store.jobs.list_request_ids(REPLICA_REQUEST))
            for row in rows:
                spec = NotifySpec(on=()) if row.job_id in replicas else default
                self._enqueue(row, spec, is_shared=is_shared)
                self._head, self._has_news = row.id, True
            if len(rows) < PAGE:
                break
        self._head = max(self._head, newest)

    def _read_position(self, newest: int) -> int:
        """Return the recorded position, or the newest event if there is none: older events are not reported."""
        found = self._store.meta.get(POSITION)
        if found is not None and found.isdigit():
            return int(found)
        self._store.meta.put(POSITION, str(newest))
        return newest

    def _enqueue(self, row: EventRow, default: NotifySpec, *, is_shared: bool) -> None:
        try:
            job = None if row.job_id is None else self._store.jobs.get(row.job_id)
        except DamagedRowError as error:  # the sinks of its task are unknown; later events must not wait for a repair
            log.warning("event %s cannot be reported: %s", row.id, error.message)
            return
        if job is None or self._is_too_old(row.time_s):
            return
        notification = make_notification(row, job, lineage=self._store.meta.lineage)
        for sink in choose_sinks(notification, job, default, is_shared=is_shared):
            queue = self._queues.get(sink)
            if queue is None:
                queue = self._queues[sink] = _SinkQueue(_decode(self._store.meta.get(f"{SINK}{sink.key}")))
            if row.id <= queue.delivery.done:
                continue
            queue.waiting.append(notification)
            if len(queue.waiting) > QUEUE_MAX:
                dropped = queue.waiting.popleft()
                log.warning("%s: dropped notification %s because too many are waiting", sink, dropped.id)

    def _is_too_old(self, time_s: float) -> bool:
        return self._clock.now_s() - time_s > GIVE_UP_S

    async def _deliver(self, sink: Sink, queue: _SinkQueue) -> None:
        """Send the notifications that wait for a sink, oldest first, until one delivery fails."""
        try:
            while queue.waiting:
                notification = queue.waiting[0]
                if self._is_too_old(notification.time_s):
                    log.warning("%s: gave up on notification %s after 3 days", sink, notification.id)
                elif not await self._try_once(sink, queue, notification):
                    return
                if queue.waiting and queue.waiting[0] is notification:  # it may have been dropped in the meantime
                    queue.waiting.popleft()
        except FencedError:
            return  # another daemon delivers it; the daemon's main loop detects it, too
        except Exception as error:  # the outermost edge of one sink
            log.warning("%s: not delivered", sink, exc_info=error)

    async def _try_once(self, sink: Sink, queue: _SinkQueue, notification: Notification) -> bool:
        before = queue.delivery
        wait_s = draw_backoff_s(before.failures + 1, base_s=2.0, cap_s=BACKOFF_S_MAX)
        try:
            # Recorded as a failure until it succeeds: if the daemon dies here, the next one waits before it repeats it.
            self._record(sink, queue, Delivery(done=before.done, failures=before.failures + 1,
                                              due_s=self._clock.now_s() + wait_s))  # fmt: skip
            await self._send(self._read_settings(), sink, notification)
            self._record(sink, queue, Delivery(done=notification.event_id))
        except FencedError:
            raise
        except StateError as error:
            log.warning("%s: %s", sink, error.message)
            return False
        except (CloudError, UsageError) as error:
            if before.failures == 0:
                log.warning("%s: %s; notification %s will be sent again", sink, error.message, notification.id)
            return False
        return True

    def _record(self, sink: Sink, queue: _SinkQueue, delivery: Delivery) -> None:
        self._store.meta.put(f"{SINK}{sink.key}", msgspec.json.encode(delivery).decode())
        queue.delivery = delivery

    def _advance(self) -> None:
        """Move the position to the last event before the oldest one that waits; forget the sinks that it covers."""
        assert self._head is not None
        oldest = min((queue.waiting[0].event_id for queue in self._queues.values() if queue.waiting), default=None)
        position = self._head if oldest is None else oldest - 1
        if position == self._position or not (self._has_news or self._queues):
            return  # other events are read again after a restart, which is harmless
        # Events up to the position are never read again, so the records of sinks that got no later one are not needed.
        # One dead sink must not keep those of the commands of all later jobs.
        idle = [
            sink for sink, queue in self._queues.items()
            if not queue.waiting and (oldest is None or queue.delivery.done <= position)
        ]  # fmt: skip
        with self._store.transaction():
            self._store.meta.put(POSITION, str(position))
            for each in idle if oldest is not None else ():
                self._store.meta.forget(f"{SINK}{each.key}")
            if oldest is None and self._queues:
                self._store.meta.forget(SINK)
        for each in idle:
            del self._queues[each]
        self._position, self._has_news = position, oldest is not None


def _decode(text: str | None) -> Delivery:
    """Read a sink's record; if it is damaged, its notifications are sent again."""
    try:
        return msgspec.json.decode(text, type=Delivery) if text else Delivery()
    except msgspec.MsgspecError:
        return Delivery()
