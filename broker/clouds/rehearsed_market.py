"""When a rehearsed place has spot machines to give. Pure: a seed or recorded availability in, spells of time out."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from broker.types import Offer

FULL_SHARE = 0.2  # of places, at the start; recorded zones stand between 0.02 and 0.89
FULL_HOURS = 1.0  # mean time for which a place stays full; recorded means lie between ten minutes and some hours
SPELLS_MAX = 100_000


@dataclass(frozen=True, kw_only=True)
class Spell:
    """From `start_s` on and before `end_s`, seconds since the market's start, a place has machines or has none."""

    start_s: float
    end_s: float
    is_open: bool


class PlaceMarket(Protocol):
    """What every market answers about one place, at any time from its start on."""

    def find_spell(self, offer: Offer, at_s: float) -> Spell:
        """The spell that holds at `at_s` seconds after the market's start."""


@dataclass(kw_only=True)
class SeededMarket:
    """Spells drawn at random, the same ones for the same seed.

    A place loses its machines at the hazard that the price book gives for one node, and has none for an hour in the
    mean; a fifth of the places start without.
    """

    seed: int
    hazard_of: Mapping[float | None, float] = field(default_factory=dict)  # interruption band -> an hour, of a node
    full_share: float = FULL_SHARE
    full_hours: float = FULL_HOURS
    _spells: dict[tuple[str, ...], list[Spell]] = field(default_factory=dict)
    _draws: dict[tuple[str, ...], random.Random] = field(default_factory=dict)

    def find_spell(self, offer: Offer, at_s: float) -> Spell:
        key = name_place(offer)
        spells = self._spells.get(key)
        if spells is None:
            draw = self._draws[key] = random.Random(f"{self.seed}:{'/'.join(key)}")
            spells = self._spells[key] = [self._draw_spell(offer, draw, 0.0, is_open=draw.random() >= self.full_share)]
        while spells[-1].end_s <= at_s:
            assert len(spells) < SPELLS_MAX, "spells are hours, and rehearsals days"
            last = spells[-1]
            spells.append(self._draw_spell(offer, self._draws[key], last.end_s, is_open=not last.is_open))
        return next(each for each in reversed(spells) if each.start_s <= at_s)

    def _draw_spell(self, offer: Offer, draw: random.Random, start_s: float, *, is_open: bool) -> Spell:
        hazard = self.hazard_of.get(offer.interruption_band, 0.0)
        mean_hours = (1 / hazard if hazard > 0 else math.inf) if is_open else self.full_hours
        hours = draw.expovariate(1 / mean_hours) if mean_hours < math.inf else math.inf
        return Spell(start_s=start_s, end_s=start_s + max(hours * 3600, 60.0), is_open=is_open)


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Availability of one zone as somebody recorded it: so many nodes every `gap_s`, played again from its start."""

    zone: str
    gap_s: float
    counts: Sequence[int]

    def find_spell(self, at_s: float, *, node_count: int, offset: int = 0) -> Spell:
        """`offset` is the tick that stands at the market's start. `node_count` nodes make a place open."""
        size = len(self.counts)
        tick = int(at_s // self.gap_s)
        is_open = self._is_open(tick + offset, node_count)
        first = last = tick
        while first > 0 and tick - first < size and self._is_open(first - 1 + offset, node_count) == is_open:
            first -= 1
        while last - tick < size and self._is_open(last + 1 + offset, node_count) == is_open:
            last += 1
        end_s = math.inf if last - tick >= size else (last + 1) * self.gap_s
        return Spell(start_s=first * self.gap_s, end_s=end_s, is_open=is_open)

    def _is_open(self, tick: int, node_count: int) -> bool:
        return self.counts[tick % len(self.counts)] >= node_count


@dataclass(frozen=True, kw_only=True)
class RecordedMarket:
    """Recordings by zone. A zone that nobody recorded is lent one: always the same, and started elsewhere in it."""

    recordings: Sequence[Recording]
    node_count: int = 1
    seed: int = 0

    def find_spell(self, offer: Offer, at_s: float) -> Spell:
        recording, is_own = self.find_recording(offer)
        draw = random.Random(f"{self.seed}:{'/'.join(name_place(offer))}")
        offset = draw.randrange(len(recording.counts)) if not is_own or self.seed else 0
        most = max(recording.counts)
        return recording.find_spell(at_s, node_count=min(self.node_count, most), offset=offset)

    def find_recording(self, offer: Offer) -> tuple[Recording, bool]:
        """And whether it was recorded in the offer's own zone."""
        own = [each for each in self.recordings if each.zone and each.zone == offer.zone]
        draw = random.Random(f"lent:{self.seed}:{'/'.join(name_place(offer))}")
        return draw.choice(own or list(self.recordings)), bool(own)


def name_place(offer: Offer) -> tuple[str, ...]:
    return (offer.cloud, offer.region, offer.zone or "", offer.instance_type)
