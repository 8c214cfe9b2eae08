"""Starts on spot, each survived or lost on the way, by the age of the market's open period."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from broker.spot.durations import AGES

CLASSES = len(AGES)
OLDEST = CLASSES - 1
# The rate at which a period moves from its age class to the next one; the oldest class is absorbing.
AGEING = tuple(1 / (AGES[index + 1] - AGES[index]) if index < OLDEST else 0.0 for index in range(CLASSES))
START_PARTS = 50  # time steps of a simulated start


@dataclass(frozen=True, kw_only=True)
class Start:
    """A start on spot from one age class: survival, mean time of a loss, and the age classes it leads to."""

    survive: float
    lost_hours: float
    landings: tuple[tuple[int, float], ...]  # (place in a row, chance), survived starts only


@lru_cache(maxsize=256)  # value functions share hazards
def follow_starts(open_hazards: tuple[float, ...], start_hours: float) -> tuple[Start, ...]:
    """Simulate a start from each age class, the oldest first."""
    found, step = [], start_hours / START_PARTS
    rates = [ends + ages for ends, ages in zip(open_hazards, AGEING, strict=True)]
    stays = [math.exp(-rate * step) for rate in rates]
    for begin in range(CLASSES):
        alive, lost, lost_hours = [0.0] * CLASSES, 0.0, 0.0
        alive[begin] = 1.0
        for part in range(START_PARTS):
            following = [0.0] * CLASSES
            for index in range(begin, CLASSES):
                if alive[index] > 0:
                    ends, ages = open_hazards[index], AGEING[index]
                    stay = stays[index]
                    left = alive[index] * (1 - stay) / max(rates[index], 1e-9)
                    following[index] += alive[index] * stay
                    lost += left * ends
                    lost_hours += left * ends * (part + 0.5) * step
                    if index < OLDEST:
                        following[index + 1] += left * ages
            alive = following
        landings = tuple((OLDEST - index, share) for index, share in enumerate(alive) if share > 1e-6)
        mean = lost_hours / lost if lost > 0 else start_hours / 2
        found.append(Start(survive=1 - lost, lost_hours=mean, landings=landings))
    return tuple(found[::-1])
