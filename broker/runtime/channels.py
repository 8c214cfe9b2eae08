"""Keep one session per node with its agent, which pushes changes and serves small calls without a new process.

A channel is only a faster way to the same answers. Without one (it broke, the node's agent is older, or it was not
requested yet), the caller makes a plain call; only a plain call can find a node unreachable.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from broker.clock import Clock, Stopwatch, within
from broker.errors import CloudError, TransientError
from broker.runtime.base import CanStream
from broker.runtime.streams import Stream
from broker.types import Node

SILENCE_S_MAX = 25.0  # the agent sends at least a heartbeat every 10 s
GAP_S_MAX = 6.0  # between two checks of a channel: time in which the broker was suspended is not silence
UNUSED_S = 60.0
CALL_S = 30.0
RETRY_S_MIN, RETRY_S_MAX = 1.0, 300.0
OPENING_MAX = 16  # concurrently: a starting daemon opens a channel to every node of every job
PACE_S_MIN = 1.0
SAMPLES_MAX = 64  # samples of the node, kept until they are taken: ten minutes
CHANNELS_PER_PACE_S = 500  # progress comes every second from up to 500 nodes, every 10 s from five thousand


class Channel:
    """The session with one node, reopened with growing pauses while it is in use."""

    def __init__(self, node: Node, run_id: int, *, clock: Clock) -> None:
        self.node = node
        self.run_id = run_id
        self.listener: asyncio.Event | None = None
        self.has_news = False
        self.used_s = 0.0
        self._clock = clock
        self._stopwatch = Stopwatch(GAP_S_MAX)
        self._heard_s = 0.0
        self._status: Mapping[str, Any] | None = None
        self._log_bytes = 0
        self._samples: deque[object] = deque(maxlen=SAMPLES_MAX)
        self._stream: Stream | None = None
        self._pending: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        self._numbers = itertools.count(1)
        self._pace_s = PACE_S_MIN
        self._failures = 0
        self._retry_s = 0.0
        self.task: asyncio.Task[None] | None = None

    def is_heard(self) -> bool:
        """Return whether the status is current; close the channel if it has been silent for too long."""
        if self._status is None or self._stream is None:
            return False
        if self._stopwatch.observe(self._clock.now_s()) - self._heard_s > SILENCE_S_MAX:
            self._stream.kill()
            self._end()
            return False
        return True

    def read_status(self) -> Mapping[str, Any] | None:
        """Return the newest status, equal to the answer of `status`; None while the channel is not open."""
        if not self.is_heard():
            return None
        self.has_news = False
        return self._status

    def has_read_log(self, offset: int) -> bool:
        """Return whether the log is known to end at `offset`; always False once the run has ended."""
        runs = self._status["runs"] if self._status else []
        is_live = bool(runs) and runs[0].get("ended_s") is None
        return is_live and self.is_heard() and offset >= self._log_bytes

    def take_samples(self) -> Sequence[object]:
        """Return the samples since the last call, oldest first. Samples wake no controller."""
        taken = list(self._samples)
        self._samples.clear()
        return taken

    async def call(self, verb: str, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Call a verb. Raises TransientError if the channel is not open or ends meanwhile, or the agent fails."""
        if self._stream is None or not self.is_heard():
            raise TransientError(f"no session with the agent on node `{self.node.id}`")
        number = next(self._numbers)
        answer = self._pending[number] = asyncio.get_running_loop().create_future()
        self._stream.write({"id": number, "verb": verb, "request": dict(request)})
        try:
            message = await within(answer, CALL_S)
        except TimeoutError as error:
            raise TransientError(f"node `{self.node.id}` did not answer within {CALL_S:g} s") from error
        finally:
            self._pending.pop(number, None)
        if not isinstance(message.get("answer"), dict):
            raise TransientError(f"the agent on node `{self.node.id}` failed at `{verb}`: {message.get('error')}")
        result: Mapping[str, Any] = message["answer"]
        return result

    def set_pace(self, pace_s: float) -> None:
        """Set how often progress is pushed; sent only if it differs by more than a factor of two."""
        if self._stream is not None and not 0.5 < pace_s / self._pace_s < 2:
            self._pace_s = pace_s
            self._stream.write({"pace_s": pace_s})

    def is_due(self) -> bool:
        """Return whether the channel may be opened now; a wall clock that was set back does not delay it."""
        is_pausing = 0.0 < self._retry_s - self._clock.now_s() <= RETRY_S_MAX
        return (self.task is None or self.task.done()) and not is_pausing

    async def keep(self, transport: CanStream, argv: Sequence[str], opening: asyncio.Semaphore) -> None:
        """Open the channel, and serve it until it ends or is unused for a while. Failures are not raised."""
        was_heard = False
        try:
            async with opening:
                self._stream = stream = await transport.open_stream(self.node, argv)
                stream.write({"run_id": self.run_id, "pace_s": self._pace_s})
                was_heard = await self._read_message(stream, SILENCE_S_MAX)
            while was_heard and self._stream is stream and self._clock.now_s() - self.used_s < UNUSED_S:
                await self._read_message(stream, None)
        except (CloudError, OSError, ValueError, TypeError):
            pass  # the next poll makes a plain call, which reports the problem
        finally:
            if self._stream is not None:
                self._stream.close()
            self._end()
            self._failures = 0 if was_heard else self._failures + 1
            pause_s = min(RETRY_S_MAX, RETRY_S_MIN * 2.0 ** min(self._failures, 16))
            self._retry_s = self._clock.now_s() + pause_s * random.uniform(0.5, 1.0)

    async def _read_message(self, stream: Stream, limit_s: float | None) -> bool:
        """Handle one message; return False if none has been a status yet: the agent is then incompatible."""
        try:
            message = await within(stream.read(), limit_s)
        except TimeoutError:
            return False
        self._heard_s = self._stopwatch.observe(self._clock.now_s())
        status, number = message.get("status"), message.get("id")
        if is_status(status):
            self._status, self._log_bytes = status, int(message.get("log_bytes") or 0)
            self.wake()
        elif isinstance(number, int):
            if number in self._pending and not self._pending[number].done():
                self._pending[number].set_result(message)
        else:
            samples = message.get("samples")
            self._samples.extend(samples if isinstance(samples, list) else ())
            stream.write(None)  # the agent ends the session if the broker is silent for too long
        return self._status is not None

    def wake(self) -> None:
        """Notify the controller of a change; without a listener, keep it for the next wait."""
        self.has_news = True
        if self.listener is not None:
            self.listener.set()

    def _end(self) -> None:
        if self._status is not None:
            self.wake()
        self._stream = self._status = None
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(TransientError(f"the session with node `{self.node.id}` ended"))


def is_status(value: Any) -> bool:
    """Return whether the fields in use are valid: nodes are not trusted beyond their own run."""
    return isinstance(value, dict) and all(isinstance(run, dict) for run in value.get("runs", [None]))


class Channels:
    """All channels of one process. `keep` opens them."""

    def __init__(self, transport: CanStream, argv: Sequence[str], *, clock: Clock) -> None:
        self._transport = transport
        self._argv = argv
        self._clock = clock
        self._channels: dict[str, Channel] = {}
        self._opening = asyncio.Semaphore(OPENING_MAX)

    def find(self, node: Node, run_id: int | None = None) -> Channel | None:
        """Return the node's channel and keep it in use; None if it has none, or one of another run than `run_id`."""
        channel = self._channels.get(node.id)
        if channel is None or run_id not in (None, channel.run_id):
            return None
        channel.used_s = self._clock.now_s()
        return channel

    def keep(self, node: Node, run_id: int) -> Channel:
        """Keep a channel open until it is unused for a minute. Returns at once; the channel may still be opening."""
        now_s = self._clock.now_s()
        channel = self._channels.get(node.id)
        if channel is None or channel.run_id != run_id:
            self._forget(now_s)
            channel = self._channels[node.id] = Channel(node, run_id, clock=self._clock)
        channel.used_s = now_s
        channel.set_pace(max(PACE_S_MIN, len(self._channels) / CHANNELS_PER_PACE_S))
        if channel.is_due():
            channel.task = asyncio.ensure_future(channel.keep(self._transport, self._argv, self._opening))
        return channel

    async def wait_news(self, nodes: Sequence[Node], run_id: int, *, wake: asyncio.Event, timeout_s: float) -> bool:
        """Wait until one of these nodes has something new, `wake` is set, or the time is up.

        Return False at once if one of them has no open channel.
        """
        channels = [self.keep(node, run_id) for node in nodes]
        if not all(channel.is_heard() for channel in channels):
            return False
        for channel in channels:
            channel.listener = wake
        if not any(channel.has_news for channel in channels):
            try:
                await within(wake.wait(), timeout_s)
            except TimeoutError:
                pass
        wake.clear()
        return True

    def _forget(self, now_s: float) -> None:
        """Drop channels of nodes that have been unused for long: most of these nodes are gone."""
        for id, channel in list(self._channels.items()):
            if now_s - channel.used_s > 2 * UNUSED_S and (channel.task is None or channel.task.done()):
                del self._channels[id]
