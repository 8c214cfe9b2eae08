"""The link to one gateway: pushes files to it, and keeps its newest load and usage. At most one call at a time."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

import msgspec

from broker.clock import Clock
from broker.errors import CloudError
from broker.runtime.reports import ExchangeReply
from broker.serve.files import Load, LoadTotals, encode
from broker.serve.keys import UsageBook
from broker.serve.merging import merge_totals, shift_times
from broker.serve.observing import LOAD_AGE_S_MAX, DemandMeter
from broker.serve.scaling import Demand
from broker.types import Cluster

LOAD, USAGE, OTHER_USAGE, ROUTING = "load.json", "usage.json", "other-usage.json", "routing.json"
ASK_EVERY_S = 1.0
T = TypeVar("T")


# Replaces files on the first node of a cluster, and reads others; may be repeated. Raises CloudError.
Exchange = Callable[[Cluster, Mapping[str, str], Sequence[str]], Awaitable[ExchangeReply]]


class GatewayLink:
    """One gateway as the controller knows it.

    `usage` and `load` are what it reported last, also to an earlier controller; `ended` are the responses of balancers
    that it had before its present one.
    """

    def __init__(
        self, exchange: Exchange, *, usage: UsageBook, load: Load | None, ended: LoadTotals, clock: Clock
    ) -> None:
        self.usage, self.ended = usage, ended
        self.load = load  # times are by our clock
        self._exchange, self._clock = exchange, clock
        self._meter = DemandMeter()
        # The demand when the gateway was last heard.
        self.last = Demand() if load is None else replace(self._meter.measure(load), qps=load.window.qps)
        self._place: tuple[str, int] | None = None  # the cluster, and the attempt that created it
        self._is_replaced = False  # the load is that of an earlier machine
        self._digests: Mapping[str, str] | None = None  # None: the machine was not queried yet
        self._load_text = ""
        self._asked_s = -math.inf
        self._call: asyncio.Task[None] | None = None

    def is_heard(self) -> bool:
        """Return whether the newest load is recent."""
        return self.load is not None and self._clock.now_s() - self.load.time_s <= LOAD_AGE_S_MAX

    def measure(self) -> Demand:
        """Return the demand at this gateway, which is unknown while it does not report."""
        if not self.is_heard():
            return self._meter.measure(None)
        self.last = self._meter.measure(self.load)
        return self.last

    def push(self, cluster: Cluster, files: Mapping[str, str]) -> asyncio.Task[None] | None:
        """Begin and return a call if files differ from those on the machine, or if the last call was long ago.

        The first call to a machine pushes nothing: it reads the list of files there.
        """
        place = cluster.name, cluster.attempt
        if place != self._place:
            if self._place is not None:
                self.last, self._is_replaced = Demand(), True
            self._place, self._digests, self._load_text = place, None, ""
            self.stop()
        if self._call is not None and not self._call.done():
            return self._call
        missing = self._find_missing(files)
        if not missing and self._digests is not None and self._clock.now_s() - self._asked_s < ASK_EVERY_S:
            return None
        self._asked_s = self._clock.now_s()
        self._call = asyncio.ensure_future(self._run(cluster, missing))
        return self._call

    def stop(self) -> None:
        """Abandon a call that has not ended."""
        if self._call is not None:
            self._call.cancel()
            self._call = None

    def _find_missing(self, files: Mapping[str, str]) -> dict[str, str]:
        """Return the files to push, in their order. A machine without a routing file first gets its earlier usage."""
        if self._digests is None:
            return {}
        seed = {} if ROUTING in self._digests or not self.usage.keys else {USAGE: encode(self.usage).decode()}
        digests = self._digests
        return seed | {
            name: text for name, text in files.items()
            if hashlib.sha256(text.encode()).hexdigest() != digests.get(name)
        }  # fmt: skip

    async def _run(self, cluster: Cluster, files: Mapping[str, str]) -> None:
        try:
            answer = await self._exchange(cluster, files, (LOAD, USAGE))
        except CloudError:
            self._digests = None  # some may have arrived
            return
        self._digests = dict(answer.digests)
        self._take_load(answer.files.get(LOAD, ""))
        if (usage := _decode(answer.files.get(USAGE, ""), UsageBook)) is not None:
            self.usage = usage

    def _take_load(self, text: str) -> None:
        """Adopt a new load. Its times are by the machine's clock, so it counts as written when it arrives."""
        load = None if text == self._load_text else _decode(text, Load)
        is_first = not self._load_text  # it may be left from before the machine was restarted
        self._load_text = text
        if load is not None and not is_first:
            if self.load is not None and (self._is_replaced or _has_restarted(self.load, load)):
                self.ended = merge_totals([self.ended, self.load.totals])
            self._is_replaced = False
            self.load = shift_times(load, self._clock.now_s() - load.time_s)


def _has_restarted(old: Load, new: Load) -> bool:
    return old.pid != new.pid or new.arrivals < old.arrivals


def _decode(text: str, kind: type[T]) -> T | None:
    with suppress(msgspec.DecodeError):
        return msgspec.json.decode(text, type=kind)
    return None
