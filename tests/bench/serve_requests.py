"""A generator of short requests at times drawn beforehand (open loop), without an HTTP library.

python -m tests.bench.serve_requests --rate 3000 --seconds 3 --turns 8 --key KEY 8000 8001    # ports of 127.0.0.1
python -m tests.bench.serve_requests --seconds 3 8000     # without a rate: as many as 64 connections carry

Arrivals are a seeded Poisson process, independent of earlier requests. A latency counts from the drawn time to the
last byte of the response: it includes the time that a request waited because the generator, its 64 connections or
the server was behind, so nothing is left out while a server stalls (no coordinated omission). The ports are asked in
turns, so that a busy machine slows all alike. Prints a report in JSON for each port.

The loop waits with `select`, whose timeouts are exact to the microsecond: those of epoll are whole milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import selectors
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from tests.bench.serve_engine import MessageReader

CONNECTIONS = 64
WARM_UP_REQUESTS = 512  # to each port before the first turn; they open the connections behind it
PAUSE_S = 0.2  # between two turns
BODY = b"x" * 200


@dataclass
class RequestReport:
    """Requests to one port. Lateness is the generator's own: by how much it began to handle a request after its time.

    `turn_p99s_ms` are the 99th percentiles of the turns.
    """

    count: int
    failed: int
    rate: float  # responses per second
    p50_ms: float
    p99_ms: float
    max_ms: float
    late_p99_ms: float
    generator_cpu_share: float  # of one core
    turn_p99s_ms: list[float] = field(default_factory=list)


class Connection(MessageReader):
    """One kept connection, with at most one request under way."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self._target = target
        self.due_s = 0.0

    def send(self, due_s: float) -> None:
        self.due_s = due_s
        self.transport.write(self._target.request)

    def take(self, head: bytes, body: bytes) -> None:
        self._target.take(self, is_good=head.startswith(b"HTTP/1.1 200 ") and body == BODY)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._target.lose(exc)


class Target:
    """The requests to one port, and their outcomes."""

    def __init__(self, port: int, key: str) -> None:
        self.port = port
        authorization = f"Authorization: Bearer {key}\r\n" if key else ""
        head = f"POST /echo HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n{authorization}Content-Length: {len(BODY)}\r\n\r\n"
        self.request = head.encode() + BODY
        self.took_s: list[list[float]] = []  # by turn
        self.late_s: list[float] = []
        self.failed = 0
        self.cpu_s = self.wall_s = 0.0
        self._free: list[Connection] = []
        self._waiting: deque[float] = deque()  # due, and without a free connection
        self._left = 0
        self._ended: asyncio.Future[None] | None = None
        self._is_closed_loop = False
        self._begun = (0.0, 0.0)  # processor and wall time

    async def connect(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(CONNECTIONS):
            _, connection = await loop.create_connection(lambda: Connection(self), "127.0.0.1", self.port)
            self._free.append(connection)
        await self.fill(count=WARM_UP_REQUESTS)
        self.took_s.clear()
        self.cpu_s = self.wall_s = 0.0

    async def fill(self, *, count: int = 0, seconds: float = 0.0) -> None:
        """Send as many requests as all connections carry, for this many requests or seconds."""
        loop = asyncio.get_running_loop()
        self._begin(0)
        self._is_closed_loop = True
        for connection in list(self._free):
            self._free.remove(connection)
            connection.send(loop.time())
        end_s = loop.time() + seconds
        while len(self.took_s[-1]) < count or loop.time() < end_s:
            await asyncio.sleep(0.02)
        self._is_closed_loop = False
        self._left = CONNECTIONS - len(self._free)
        await self._end()

    async def send_at(self, times_s: Sequence[float]) -> None:
        """Send a request at each of these times from now on; return once all are answered."""
        loop = asyncio.get_running_loop()
        self._begin(len(times_s))
        start_s, index = loop.time(), 0

        def send_due() -> None:
            nonlocal index
            now_s = loop.time()
            while index < len(times_s) and (due_s := start_s + times_s[index]) <= now_s:
                index += 1
                self.late_s.append(now_s - due_s)
                if self._free:
                    self._free.pop().send(due_s)
                else:
                    self._waiting.append(due_s)
            if index < len(times_s):
                loop.call_at(start_s + times_s[index], send_due)

        send_due()
        await self._end()

    def take(self, connection: Connection, *, is_good: bool) -> None:
        """Record a response; the connection takes the next request that waits."""
        now_s = asyncio.get_running_loop().time()
        self.took_s[-1].append(now_s - connection.due_s)
        self.failed += not is_good
        if self._is_closed_loop:
            connection.send(now_s)
            return
        if self._waiting:
            connection.send(self._waiting.popleft())
        else:
            self._free.append(connection)
        self._left -= 1
        if self._left == 0 and self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def lose(self, error: BaseException | None) -> None:
        """Fail the turn: kept connections are not closed by a server that keeps up."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(ConnectionError(f"port {self.port} closed a connection: {error}"))

    def describe(self) -> RequestReport:
        ranked = sorted(each for turn in self.took_s for each in turn)
        late = sorted(self.late_s) or [0.0]
        return RequestReport(
            count=len(ranked),
            failed=self.failed,
            rate=len(ranked) / self.wall_s,
            p50_ms=find_share(ranked, 0.5) * 1000,
            p99_ms=find_share(ranked, 0.99) * 1000,
            max_ms=ranked[-1] * 1000,
            late_p99_ms=find_share(late, 0.99) * 1000,
            generator_cpu_share=self.cpu_s / self.wall_s,
            turn_p99s_ms=[find_share(sorted(turn), 0.99) * 1000 for turn in self.took_s],
        )

    def _begin(self, count: int) -> None:
        self.took_s.append([])
        self._left = count
        self._ended = asyncio.get_running_loop().create_future()
        self._begun = time.process_time(), time.perf_counter()

    async def _end(self) -> None:
        if self._left and self._ended is not None:
            await self._ended
        self._ended = None
        self.cpu_s += time.process_time() - self._begun[0]
        self.wall_s += time.perf_counter() - self._begun[1]


def find_share(ranked: Sequence[float], share: float) -> float:
    """Return the value that this share of the ranked ones does not exceed."""
    return ranked[min(len(ranked) - 1, int(len(ranked) * share))]


def draw_times(draw: random.Random, *, rate: float, seconds: float) -> list[float]:
    """Draw the arrivals of a Poisson process."""
    times_s, time_s = list[float](), draw.expovariate(rate)
    while time_s < seconds:
        times_s.append(time_s)
        time_s += draw.expovariate(rate)
    return times_s


async def measure(ports: Sequence[int], *, key: str, rate: float, seconds: float, turns: int, seed: int) -> None:
    targets = [Target(port, key) for port in ports]
    for target in targets:
        await target.connect()
    gc.disable()  # a pause of the generator would count as one of the server
    draw = random.Random(seed)
    for _ in range(turns):
        times_s = draw_times(draw, rate=rate, seconds=seconds) if rate else []
        for target in targets:
            await asyncio.sleep(PAUSE_S)
            await (target.send_at(times_s) if rate else target.fill(seconds=seconds))
    print(json.dumps([asdict(target.describe()) for target in targets]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("ports", type=int, nargs="+")
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--key", default="")
    given = parser.parse_args()
    running = measure(
        given.ports, key=given.key, rate=given.rate, seconds=given.seconds, turns=given.turns, seed=given.seed
    )
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        runner.run(running)
