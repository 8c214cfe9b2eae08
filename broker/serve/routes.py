"""Choose a replica for each request: the less busy of two drawn ones, among those that are ready.

With `instance_aware_least_load`, replicas have capacities, and the less busy one is the one with the lower load for it.

With `prefix_affinity`, requests whose prompts share a prefix go to one replica, whose engine caches the keys and values
of that prefix. Replicas are ranked by a hash of prefix and number (rendezvous hashing), so that adding or removing one
moves only its own share. A replica with more than 1.25 times the mean load is passed over (Mirrokni, Thorup and
Zadimoghaddam, "Consistent Hashing with Bounded Loads", 2018).

A balancer that knows its region prefers the replicas there, as long as one of them has fewer requests in flight than
`near_in_flight_max`; further requests go to the least busy replica of any region.

A connection that is refused takes a replica out at once; a good probe brings it back.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

from broker.clock import Clock
from broker.serve.files import Backend, LoadWindow, ReplicaLoad

# An interrupted response is weaker evidence than a refused connection: three in a row take a replica out until a probe.
BREAKS_MAX = 3
LOAD_OVER_MEAN_MAX = 1.25
PREFIX_BYTES = 512  # about 128 tokens: a system prompt, not the question


class BackendRoute:
    """One replica as the balancer knows it. Counts change in the event loop only."""

    def __init__(self, backend: Backend, *, now_s: float) -> None:
        self.backend = backend
        self.base_url = make_url(backend)
        self.is_router = False  # it passes requests on to replicas of its choice
        self.is_ready = False
        self.is_gone = False  # the table has it no more
        self.since_s = now_s
        self.in_flight = 0
        self.breaks = 0
        self.error = "not probed yet"

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Count a request as in flight until the end of the block."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    @property
    def load(self) -> float:
        """Return the load with one more request, in relation to the replica's capacity."""
        return (self.in_flight + 1) / self.backend.capacity


def make_url(backend: Backend) -> str:
    """Return the URL of a replica, without a path."""
    scheme = "https" if backend.is_encrypted else "http"
    host = f"[{backend.host}]" if ":" in backend.host else backend.host
    return f"{scheme}://{host}:{backend.port}"


class RouteTable:
    """The replicas of a service; `draw` is the source of randomness."""

    def __init__(self, *, clock: Clock, draw: random.Random | None = None) -> None:
        self._clock = clock
        self._draw = draw or random.Random()
        self._turns = itertools.count()
        self.routes: dict[int, BackendRoute] = {}
        self.shares: Mapping[int, float] = {}
        self.region = ""
        self.near_in_flight_max = 0.0

    def update(
        self,
        backends: Sequence[Backend],
        shares: Mapping[int, float] = MappingProxyType({}),
        *,
        region: str = "",
        near_in_flight_max: float = 0.0,
    ) -> Sequence[BackendRoute]:
        """Adopt the backends, the shares of versions, and the preference for a region; return the routes that are gone.

        A replica with another address has to be probed again; its old route is gone.
        """
        before = self.routes
        self.shares, self.region, self.near_in_flight_max = shares, region, near_in_flight_max
        self.routes = {}
        for backend in sorted(backends, key=lambda each: each.number):
            route = before.get(backend.number)
            if route is None or route.base_url != make_url(backend):
                route = BackendRoute(backend, now_s=self._clock.now_s())
            route.backend = backend
            self.routes[backend.number] = route
        for number, route in before.items():
            if self.routes.get(number) is not route:  # nothing that waits for a connection may get one
                route.is_ready, route.is_gone = False, True
        addresses = {each.base_url for each in self.routes.values()}
        return [each for each in before.values() if each.base_url not in addresses]

    def choose(
        self,
        *,
        but: Collection[int] = (),
        balancing: str = "least_load",
        prefix: bytes = b"",
        like: Backend | None = None,
    ) -> BackendRoute | None:
        """Return a ready replica other than `but`; None if there is none. `prefix` is the beginning of the prompt.

        Replicas with a preemption notice are chosen only if all have one. With `like`, only replicas of its version, or
        else of its program, can be chosen: token ids mean nothing to another model. Without it, the versions of
        `shares` get their share of the choices.
        """
        ready = [
            route for number, route in self.routes.items()
            if route.is_ready and not route.backend.is_draining and number not in but
            and (like is None or route.backend.is_like(like))
        ]  # fmt: skip
        if not ready:
            return None
        ready = [each for each in ready if not each.backend.is_leaving] or ready
        ready = self._choose_version(ready, like)
        if balancing == "round_robin":
            return ready[next(self._turns) % len(ready)]
        ready = self._choose_region(ready)
        if balancing == "prefix_affinity" and prefix:
            return _choose_by_prefix(ready, prefix)
        first = int(self._draw.random() * len(ready))
        second = int(self._draw.random() * (len(ready) - 1))  # of the others
        one, other = ready[first], ready[second + (second >= first and len(ready) > 1)]
        return one if one.load <= other.load else other

    def _choose_version(self, ready: list[BackendRoute], like: Backend | None) -> list[BackendRoute]:
        """Return the ready replicas of the version of `like`, or of one drawn by share; all if none fits."""
        if like is not None:
            return [each for each in ready if each.backend.version == like.version] or ready
        if not self.shares:
            return ready
        drawn = self._draw.random()
        for number, share in self.shares.items():
            if drawn < share:
                return [each for each in ready if each.backend.version == number] or ready
            drawn -= share
        return [each for each in ready if each.backend.version not in self.shares] or ready

    def _choose_region(self, ready: list[BackendRoute]) -> list[BackendRoute]:
        """Return the ready replicas of the balancer's region that are not busy; all replicas if there are none."""
        if not self.region:
            return ready
        near = [each for each in ready if each.backend.region == self.region]
        return [each for each in near if each.in_flight < self.near_in_flight_max] or ready

    def admit(self, route: BackendRoute) -> None:
        """Record a good probe."""
        if not route.is_ready:
            route.is_ready, route.since_s = True, self._clock.now_s()
        route.breaks, route.error = 0, ""

    def exclude(self, route: BackendRoute, error: str) -> None:
        """Record a refused connection or a bad probe: no request goes there until a probe succeeds."""
        if route.is_ready:
            route.is_ready, route.since_s = False, self._clock.now_s()
        route.error = error

    def record_break(self, route: BackendRoute, what: str, error: BaseException | None = None) -> None:
        """Record a response that was interrupted: `what` happened, because of `error` if that is known."""
        route.breaks += 1
        if route.breaks >= BREAKS_MAX:
            self.exclude(route, what if error is None else f"{what}: {str(error) or type(error).__name__}")

    def record_whole(self, route: BackendRoute) -> None:
        """Record a response that was not interrupted. Now and then, a program breaks one off, and serves all others."""
        route.breaks = 0

    def describe(self, windows: Mapping[int, LoadWindow] = MappingProxyType({})) -> dict[int, ReplicaLoad]:
        """Return the state of each replica for the controller, with its responses of the last minute."""
        return {
            number: ReplicaLoad(
                is_ready=route.is_ready,
                in_flight=route.in_flight,
                since_s=route.since_s,
                error=route.error,
                window=windows.get(number, LoadWindow()),
            )
            for number, route in self.routes.items()
        }


def _choose_by_prefix(ready: Sequence[BackendRoute], prefix: bytes) -> BackendRoute:
    """Return the first replica in the order of this prefix that is not too busy; the least busy one always is."""
    in_flight_max = math.ceil(LOAD_OVER_MEAN_MAX * (sum(each.in_flight for each in ready) + 1) / len(ready))

    def rank(route: BackendRoute) -> bytes:
        return hashlib.blake2b(b"%d %s" % (route.backend.number, prefix[:PREFIX_BYTES]), digest_size=8).digest()

    ranked = sorted(ready, key=rank)
    return next(each for each in ranked if each.in_flight < in_flight_max)
