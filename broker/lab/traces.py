"""Recordings of spot markets: parsing, writing and generation.

A recording is JSON text: {"metadata": {"gap_seconds": 600, "gang": 1, ...}, "data": [1, 1, 0, ...]}, where data[i] is
the number of available instances at tick i; the gang can run while it is at least `gang`. `prices` (USD per hour and
instance, one per tick) and `metadata.on_demand_price` are optional. A price of 0 or null is unknown: the last one
before it applies.
"""

from __future__ import annotations

import json
import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from broker.errors import SourceError
from broker.spot.durations import MET_HOURS, NOTHING_SEEN, Durations

TICKS_MAX = 5_000_000


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One place's market, tick by tick. Traces of one group start at the same time."""

    name: str
    gap_hours: float
    counts: tuple[int, ...]  # available instances
    gang: int = 1
    prices: tuple[float, ...] = ()  # spot, USD per hour and instance; empty: unknown
    ondemand_usd_hour: float | None = None
    started_s: float | None = None  # when the recording began

    @property
    def hours(self) -> float:
        """Length of the recording in hours."""
        return len(self.counts) * self.gap_hours

    @cached_property
    def changes(self) -> tuple[tuple[float, bool], ...]:
        """Return (hour, is open) at the start and at each change."""
        changes = list[tuple[float, bool]]()
        for tick, count in enumerate(self.counts):
            is_open = count >= self.gang
            if not changes or changes[-1][1] != is_open:
                changes.append((tick * self.gap_hours, is_open))
        return tuple(changes)

    @cached_property
    def price_changes(self) -> tuple[tuple[float, float], ...]:
        """Return (hour, USD per hour and instance) at the start and at each change; empty without prices."""
        changes = list[tuple[float, float]]()
        for tick, price in enumerate(self.prices):
            if not changes or changes[-1][1] != price:
                changes.append((tick * self.gap_hours, price))
        return tuple(changes)

    def is_open_at(self, hour: float) -> bool:
        """Return whether spot was available at this hour of the recording."""
        return self.changes[bisect_right(self.changes, (hour, True)) - 1][1]

    def begin_at(self, share: float, *, name: str) -> Trace:
        """Return the recording from this share of its length on, followed by its beginning."""
        begin = round(share * len(self.counts)) % len(self.counts)
        counts, prices = self.counts[begin:] + self.counts[:begin], self.prices[begin:] + self.prices[:begin]
        return replace(self, name=name, counts=counts, prices=prices)

    @cached_property
    def open_usd_hour(self) -> float | None:
        """Return the mean price while the market is open (of all ticks if it never is); None without prices."""
        opened = [price for count, price in zip(self.counts, self.prices, strict=False) if count >= self.gang]
        found = opened or self.prices
        return sum(found) / len(found) if found else None

    @property
    def open_share(self) -> float:
        """Share of ticks with capacity for the whole gang."""
        return sum(count >= self.gang for count in self.counts) / len(self.counts)

    def count_periods(self) -> Durations:
        """Return the durations of all intervals; the first and last are censored by the ends of the recording."""
        seen = NOTHING_SEEN
        borders = [*(hour for hour, _ in self.changes), self.hours]
        last = len(self.changes) - 1
        for index, (hour, is_open) in enumerate(self.changes):
            length = borders[index + 1] - hour
            met = MET_HOURS if index == 0 else 0.0
            seen = seen.with_period(met + length, from_hours=met, is_open=is_open, is_ended=index < last)
        return seen


@dataclass(frozen=True, kw_only=True)
class TraceFacts:
    """Statistics of a trace. Means are None without an observation."""

    name: str
    hours: float
    gap_hours: float
    gang: int
    open_share: float
    preemptions: int  # the number of times the market closed
    mean_open_hours: float | None
    mean_closed_hours: float | None
    mean_usd_hour: float | None


def measure_trace(trace: Trace) -> TraceFacts:
    """Return the statistics of one trace."""
    openings = sum(is_open for _, is_open in trace.changes)
    closings = len(trace.changes) - openings
    share = trace.open_share
    return TraceFacts(
        name=trace.name,
        hours=trace.hours,
        gap_hours=trace.gap_hours,
        gang=trace.gang,
        open_share=share,
        preemptions=sum(not is_open for _, is_open in trace.changes[1:]),
        mean_open_hours=trace.hours * share / openings if openings else None,
        mean_closed_hours=trace.hours * (1 - share) / closings if closings else None,
        mean_usd_hour=sum(trace.prices) / len(trace.prices) if trace.prices else None,
    )


def parse_trace(text: str | bytes, name: str) -> Trace:
    """Parse a recording. Raise SourceError if it is invalid."""
    try:
        recording = json.loads(text)
        metadata, data = recording["metadata"], recording["data"]
        gap_s, gang = float(metadata["gap_seconds"]), int(metadata.get("gang", 1))
        counts = tuple(int(count) for count in data)
        is_whole = all(count == float(given) for count, given in zip(counts, data, strict=True))
        prices = tuple(float(price or 0.0) for price in recording.get("prices") or ())
        ondemand, started = (_read_number(metadata.get(name)) for name in ("on_demand_price", "started_s"))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise _unreadable(name, f"{type(error).__name__}: {error}") from None
    if not 0 < gap_s < 86400 * 7 or gang < 1:
        raise _unreadable(name, f"`gap_seconds` is {gap_s:g} and `gang` is {gang}")
    if not 0 < len(counts) <= TICKS_MAX or min(counts) < 0 or not is_whole:
        raise _unreadable(name, f"`data` must hold 1 to {TICKS_MAX:,} whole counts, none below 0")
    if prices and (len(prices) != len(counts) or not all(0 <= price < math.inf for price in prices)):
        raise _unreadable(name, f"`prices` must hold one price for each of the {len(counts)} ticks")
    return Trace(
        name=name,
        gap_hours=gap_s / 3600,
        counts=counts,
        gang=gang,
        prices=_fill_unknown(prices),
        ondemand_usd_hour=ondemand,
        started_s=started,
    )


def _read_number(value: float | str | None) -> float | None:
    """Return an optional number of the metadata. Raises ValueError if it is negative or not finite."""
    if value is None:
        return None
    number = float(value)
    if not 0 <= number < math.inf:
        raise ValueError(f"{number} is not a price or a time")
    return number


def _fill_unknown(prices: Sequence[float]) -> tuple[float, ...]:
    """Return the prices with each 0 replaced by the last price before it, or by the first one; empty if all are 0."""
    last = next((price for price in prices if price > 0), None)
    if last is None:
        return ()
    filled = []
    for price in prices:
        last = price if price > 0 else last
        filled.append(last)
    return tuple(filled)


def write_trace(trace: Trace) -> str:
    """Return the text that `parse_trace` reads."""
    metadata: dict[str, object] = {"gap_seconds": round(trace.gap_hours * 3600, 6), "gang": trace.gang}
    if trace.ondemand_usd_hour is not None:
        metadata["on_demand_price"] = trace.ondemand_usd_hour
    if trace.started_s is not None:
        metadata["started_s"] = trace.started_s
    recording: dict[str, object] = {"metadata": metadata, "data": trace.counts}
    if trace.prices:
        recording["prices"] = trace.prices
    return json.dumps(recording) + "\n"


def _unreadable(name: str, why: str) -> SourceError:
    hint = 'a trace is {"metadata": {"gap_seconds": 600, "gang": 1}, "data": [1, 1, 0, ...]}, 1 while spot is available'
    return SourceError(f"trace `{name}` cannot be read: {why}", hints=[hint])


@dataclass(frozen=True, kw_only=True)
class MarketRegimes:
    """A synthetic market that alternates between a calm and a stormy regime, with mean interval lengths in hours."""

    calm_hours: float = 30.0
    stormy_hours: float = 9.0
    open_calm_hours: float = 14.0
    closed_calm_hours: float = 0.4
    open_stormy_hours: float = 0.5
    closed_stormy_hours: float = 1.6
    price_share: float = 0.32  # share of the on-demand price; a random walk moves it


def make_trace(
    name: str, seed: int, *, hours: float = 336.0, gap_s: float = 300.0, regimes: MarketRegimes | None = None
) -> Trace:
    """Draw a trace from `regimes` (by default drawn by seed, too); the same arguments give the same trace."""
    chance = random.Random(f"{name}/{seed}")
    drawn = regimes or _draw_regimes(chance)
    counts, prices = list[int](), list[float]()
    is_open, is_calm, price = chance.random() < 0.7, True, drawn.price_share
    gap_hours = gap_s / 3600
    for tick in range(max(1, round(hours / gap_hours))):
        if chance.random() < gap_hours / (drawn.calm_hours if is_calm else drawn.stormy_hours):
            is_calm = not is_calm
        mean = {
            (True, True): drawn.open_calm_hours,
            (True, False): drawn.open_stormy_hours,
            (False, True): drawn.closed_calm_hours,
            (False, False): drawn.closed_stormy_hours,
        }[is_open, is_calm]
        if chance.random() < -math.expm1(-gap_hours / mean):
            is_open = not is_open
        if tick % round(1 / gap_hours) == 0:
            price = min(max(price * math.exp(chance.gauss(0, 0.01)), drawn.price_share * 0.8), drawn.price_share * 1.3)
        counts.append(int(is_open))
        prices.append(round(price, 4))
    return Trace(name=name, gap_hours=gap_hours, counts=tuple(counts), prices=tuple(prices), ondemand_usd_hour=1.0)


def _draw_regimes(chance: random.Random) -> MarketRegimes:
    def perturb(value: float) -> float:
        return value * math.exp(chance.gauss(0, 0.5))

    plain = MarketRegimes()
    return MarketRegimes(
        calm_hours=perturb(plain.calm_hours),
        stormy_hours=perturb(plain.stormy_hours),
        open_calm_hours=perturb(plain.open_calm_hours),
        closed_calm_hours=perturb(plain.closed_calm_hours),
        open_stormy_hours=perturb(plain.open_stormy_hours),
        closed_stormy_hours=perturb(plain.closed_stormy_hours),
        price_share=min(plain.price_share * math.exp(chance.gauss(0, 0.15)), 0.9),
    )


def make_default_traces(count: int = 4, seed: int = 1, *, hours: float = 336.0) -> tuple[Trace, ...]:
    """Generate the project's synthetic market of several zones; it ships as this generator and a seed."""
    return tuple(make_trace(f"made-{letter}", seed, hours=hours) for letter in _letters(count))


def _letters(count: int) -> Sequence[str]:
    assert 0 < count <= 26
    return "abcdefghijklmnopqrstuvwxyz"[:count]
