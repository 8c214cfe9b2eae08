"""The seam between a balancer and the program that clients' bytes pass through.

    http           `http_path.py`      this process reads requests
    tcp, grpc      `tcp_path.py`       this process passes connections through
    haproxy        `haproxy_path.py`   a child process; this one configures it and reads its loads
    routers        `router_path.py`    this process, a child process that chooses replicas, and this one again

The balancer probes replicas, adopts routing files and writes `load.json`; it does not know which path it has.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from broker.clock import Clock, within
from broker.serve.admission import is_loopback
from broker.serve.files import LoadTotals, LoadWindow, Routing
from broker.serve.routes import BackendRoute
from broker.types import ServiceSpec

log = logging.getLogger(__name__)

RETRY_S = 0.5  # after a child process did not answer, or ended
WAITING_MAX = 1_000  # requests or connections that wait for a replica to become ready
WAIT_S_MAX = 60.0


class Counts:
    """The numbers of requests or connections: since the balancer started, and in flight."""

    def __init__(self) -> None:
        self.arrivals = self.in_flight = self.waiting = self.resumed = self.broken = 0


class DataPath(Protocol):
    """A path from clients to replicas. Every method may be called again with the same values."""

    counts: Counts

    def listen(self) -> AbstractAsyncContextManager[int]:
        """Accept clients; yield the port. Raises OSError if it is taken, StateError without a needed program."""

    def adopt(self, routing: Routing) -> None:
        """Apply a new routing file, whose replicas the route table already contains. Does not wait, and never fails."""

    def cut(self, gone: Sequence[BackendRoute]) -> None:
        """End the connections to replicas that are gone. Does not wait, and never fails.

        A machine that was taken away may close nothing itself: its clients would wait for a timeout.
        """

    def wake(self) -> None:
        """React to a change of a replica's readiness. Does not wait, and never fails."""

    async def probe(self, route: BackendRoute) -> str:
        """Return why a replica is not ready; empty if it is. Ends after the probe's timeout."""

    async def refresh(self) -> None:
        """Update the counts, and `in_flight` of each route, before they are written; without an answer, keep them."""

    def describe(self) -> tuple[LoadWindow, Mapping[int, LoadWindow]]:
        """Return the responses of the last minute, in all and by replica; nothing if responses are not read."""

    def describe_totals(self) -> LoadTotals:
        """Return the responses since the balancer started; nothing if responses are not read."""

    def find_expiry_s(self) -> float | None:
        """Return when the certificate that clients get expires; None without one."""


class ChildChanges:
    """Changes that a child process must adopt, applied one after the other."""

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._noted = asyncio.Event()
        self._is_applying = False

    @property
    def has_next(self) -> bool:
        """Return whether anything has changed since the current change began to be applied."""
        return self._noted.is_set()

    @property
    def is_pending(self) -> bool:
        """Return whether a change has not been applied yet."""
        return self.has_next or self._is_applying

    def note(self) -> None:
        """Request that the current state be applied; a separate task does it."""
        self._noted.set()

    async def apply_forever(
        self, apply: Callable[[], Awaitable[None]], *, errors: tuple[type[Exception], ...], child: str
    ) -> None:
        """Apply each change; retry a change that fails with one of these errors."""
        while True:
            await self._noted.wait()
            self._noted.clear()
            self._is_applying = True
            try:
                await apply()
            except errors as error:
                log.warning("%s did not apply a change: %s", child, str(error) or "no answer")
                self._noted.set()
                await self._clock.sleep(RETRY_S)
            finally:
                self._is_applying = False


class ReplicaQueue:
    """Clients without a ready replica wait here, for up to a minute; not once the service was given up."""

    def __init__(self, counts: Counts, *, clock: Clock) -> None:
        self._counts, self._clock = counts, clock
        self._woken = asyncio.Event()
        self.failure = ""  # why no replica is started any more

    @property
    def is_full(self) -> bool:
        """Return whether no more clients may wait."""
        return self._counts.waiting >= WAITING_MAX

    def adopt(self, routing: Routing) -> None:
        """Apply a new routing file: if the service has been given up, waiting clients are refused."""
        self.failure = routing.failure
        if self.failure:
            self.wake()

    def wake(self) -> None:
        """Make waiting clients look for a replica again."""
        self._woken.set()
        self._woken = asyncio.Event()

    async def wait(self, deadline_s: float) -> bool:
        """Wait until a replica may be ready; return False after the deadline, if too many wait, or if none is started.

        A replica may still be starting when the service is given up; requests are sent to it once it is ready.
        """
        rest_s = deadline_s - self._clock.now_s()
        if rest_s <= 0 or self.is_full or self.failure:
            return False
        self._counts.waiting += 1
        try:
            await within(self._woken.wait(), rest_s)
        except TimeoutError:
            return False
        finally:
            self._counts.waiting -= 1
        return True


def find_exposure(spec: ServiceSpec | Routing, host: str) -> str:
    """Return why a service must not listen on this address; empty if it may.

    Where API keys cannot be checked, an address that other machines reach needs certificates of clients, or a program
    that terminates TLS itself.
    """
    if spec.can_check_keys or is_loopback(host) or spec.is_tls_passed:
        return ""
    if spec.tls is not None and spec.tls.client_ca_path is not None:
        return ""
    what = f"protocol: {spec.protocol}" if spec.protocol != "http" else f"balancer: {{type: {spec.balancer}}}"
    return f"a service with `{what}` on {host} requires certificates of clients: API keys are not available there"
