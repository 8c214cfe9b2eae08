"""When a rehearsed place has spot machines to give. Pure: a seed or recorded availability in, spells of time out."""

from __future__ import annotations

import math
import random
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from broker.lab.traces import Trace
from broker.spot.hazard import hazard_per_node_hour
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
        """Return the spell that holds at `at_s` seconds after the market's start."""


@dataclass(kw_only=True)
class SeededMarket:
    """Spells drawn at random, the same ones for the same seed.

    A place loses its machines at the hazard that the price book gives for one node, and has none for an hour in the
    mean; a fifth of the places start without.
    """

    seed: int
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
        hazard = hazard_per_node_hour(offer.interruption_band)
        mean_hours = (1 / hazard if hazard > 0 else math.inf) if is_open else self.full_hours
        hours = draw.expovariate(1 / mean_hours) if mean_hours < math.inf else math.inf
        return Spell(start_s=start_s, end_s=start_s + max(hours * 3600, 60.0), is_open=is_open)


@dataclass(frozen=True, kw_only=True)
class RecordedMarket:
    """Recordings, played again and again. A zone that nobody recorded is lent one, and always the same."""

    traces: Sequence[Trace]
    seed: int = 0

    def find_spell(self, offer: Offer, at_s: float) -> Spell:
        trace, begin_hours = self.find_recording(offer)
        hour = begin_hours + at_s / 3600
        cycle = hour // trace.hours
        start, end, is_open = _find_change(trace, hour - cycle * trace.hours)
        offset = cycle * trace.hours - begin_hours
        return Spell(start_s=(start + offset) * 3600, end_s=(end + offset) * 3600, is_open=is_open)

    def find_recording(self, offer: Offer) -> tuple[Trace, float]:
        """And the hour of it at which the market starts: 0 in the zone's own recording, so that zones keep step."""
        own = [each for each in self.traces if offer.zone and offer.zone in re.split(r"[^a-z0-9-]", each.name)]
        draw = random.Random(f"{self.seed}:{'/'.join(name_place(offer))}")
        trace = draw.choice(own or list(self.traces))
        return trace, draw.uniform(0, trace.hours) if not own or self.seed else 0.0


def _find_change(trace: Trace, hour: float) -> tuple[float, float, bool]:
    """Start and end of the spell that holds at `hour`, and whether it is open; one that never ends is infinite."""
    changes = trace.changes
    if len(changes) == 1:
        return 0.0, math.inf, changes[0][1]
    index = bisect_right(changes, (hour, True)) - 1
    end = changes[index + 1][0] if index + 1 < len(changes) else trace.hours
    if end == trace.hours and changes[0][1] == changes[index][1]:
        end += changes[1][0]  # it goes on where the recording begins again
    return changes[index][0], end, changes[index][1]


def name_place(offer: Offer) -> tuple[str, ...]:
    return (offer.cloud, offer.region, offer.zone or "", offer.instance_type)
