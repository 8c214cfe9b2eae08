"""Send a light load of real requests through the balancer of a rehearsed service, and count the answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from broker.clock import SystemClock
from broker.rehearsal.grpc_call import call_grpc
from broker.serve.data_path import WAIT_S_MAX
from broker.types import ReadinessProbe

if TYPE_CHECKING:
    import aiohttp

EVERY_S = 0.25  # real seconds between two requests
TIMEOUT_S = WAIT_S_MAX + 30.0  # the balancer answers earlier, with 503, if no replica becomes ready
OPEN_MAX = 100


@dataclass(frozen=True, kw_only=True)
class RequestTally:
    """Requests by their result. `failures`: number by reason, such as `503`.

    `late`: answered here, but only because machines come up faster than in a cloud; there, the balancer would have
    refused them after a minute. They count as failed. `wait_s_max` is in simulated seconds while no replica was ready.
    """

    sent: int = 0
    answered: int = 0
    late: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    median_s: float | None = None  # real, of answered requests
    wait_s_max: float = 0.0

    @property
    def failed(self) -> int:
        """Number of requests without a good answer."""
        return self.late + sum(self.failures.values())


@dataclass
class RequestSender:
    """Send the readiness probe's request to `url`, a few times a second, while `is_sending`; with `is_grpc`, call.

    `read_outage_s`: the simulated seconds so far without a ready replica.
    """

    url: str
    probe: ReadinessProbe
    read_outage_s: Callable[[], float]
    is_grpc: bool = False
    is_sending: bool = False
    _sent: int = 0
    _late: int = 0
    _failures: Counter[str] = field(default_factory=Counter)
    _answered_s: list[float] = field(default_factory=list)
    _wait_s_max: float = 0.0
    _open: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def tally(self) -> RequestTally:
        """The requests so far that have ended."""
        return RequestTally(
            sent=self._sent - len(self._open),
            answered=len(self._answered_s),
            late=self._late,
            failures=dict(self._failures),
            median_s=median(self._answered_s) if self._answered_s else None,
            wait_s_max=self._wait_s_max,
        )

    async def send_forever(self) -> None:
        """Send until cancelled."""
        import aiohttp  # heavy

        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            try:
                while True:
                    if self.is_sending and len(self._open) < OPEN_MAX:
                        task = asyncio.ensure_future(self._send(session))
                        self._sent += 1
                        self._open.add(task)
                        task.add_done_callback(self._open.discard)
                    await SystemClock().sleep(EVERY_S)
            finally:
                for each in self._open:
                    each.cancel()
                await asyncio.gather(*self._open, return_exceptions=True)

    async def stop(self) -> None:
        """Send no more requests, and wait for the open ones."""
        self.is_sending = False
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _send(self, session: aiohttp.ClientSession) -> None:
        begin_s, begin_real_s = self.read_outage_s(), SystemClock().now_s()
        failure = await (self._call() if self.is_grpc else self._request(session))
        real_s = SystemClock().now_s() - begin_real_s
        wait_s = max(real_s, self.read_outage_s() - begin_s)
        self._wait_s_max = max(self._wait_s_max, wait_s)
        if failure:
            self._failures[failure] += 1
        elif wait_s > WAIT_S_MAX:
            self._late += 1
        else:
            self._answered_s.append(real_s)

    async def _request(self, session: aiohttp.ClientSession) -> str:
        """Send a request; return why it failed, empty if it did not.

        A redirect is an answer, and is not followed: it could lead the probe's headers, which may be secrets, away from
        this machine.
        """
        import aiohttp

        method = "GET" if self.probe.post_data is None else "POST"
        headers = {"content-type": "application/json"} if self.probe.post_data else {}
        try:
            async with session.request(
                method,
                self.url,
                data=self.probe.post_data,
                headers={**headers, **self.probe.headers},
                allow_redirects=False,
            ) as response:
                await response.read()
                return "" if response.status < 400 else str(response.status)
        except (aiohttp.ClientResponseError, aiohttp.InvalidURL) as error:  # their text contains the URL
            return type(error).__name__
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return str(error) or type(error).__name__

    async def _call(self) -> str:
        parts = urlsplit(self.url)
        return await call_grpc(parts.hostname or "", parts.port or 0, timeout_s=TIMEOUT_S)
