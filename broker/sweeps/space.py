"""Parse the parameters of a sweep, and draw its configurations. Pure.

    lr=1e-4..1e-2:log    any number in the range, uniform in its logarithm
    dropout=0..0.5       any number between
    layers=2..12:int     an integer, both ends included
    seed=0,1,2           one of these values

Ranges are stratified: of 64 values of `lr`, one is in each 64th of its range, in random order. The values of a list are
used about equally often. Without `runs`, all combinations of the lists are used; ranges require `runs`.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from broker.errors import UsageError
from broker.frozen import frozen
from broker.task.allowed import ENV_NAME, ENV_VALUE
from broker.task.checking import check_flag

RUNS_MAX = 10_000
SWAPS_MAX = 100  # rounds in which runs with equal values are parted
RANGE = re.compile(
    r"((?:[^.,]+(?:\.\d+)?|[+-]?\.\d+)(?:e[+-]?\d+)?)\.\.(.+?)(?::(log|int|linear))?", re.IGNORECASE
)  # `.1..0.5` as well: as a list, it would be one run with this text
Configuration = Mapping[str, str]  # parameter -> value, as in the run's environment variable


@frozen
class Values:
    """A list of values."""

    name: str
    values: tuple[str, ...]


@frozen
class NumberRange:
    """Numbers from `low` to `high`."""

    name: str
    low: float
    high: float
    scale: Literal["linear", "log", "int"]

    def place(self, share: float) -> str:
        """Return the value at a share of the range, `0 <= share < 1`."""
        if self.scale == "log":
            return self._show(self.low * (self.high / self.low) ** share)
        if self.scale == "int":
            return str(int(self.low) + math.floor(share * (int(self.high) - int(self.low) + 1)))
        return self._show(self.low + (self.high - self.low) * share)

    def _show(self, value: float) -> str:
        """Return the value with six digits, more in a narrow range, and never rounded out of the range."""
        narrowness = max(abs(self.low), abs(self.high)) / (self.high - self.low)
        text = f"{value:.{min(17, 6 + math.floor(math.log10(max(1.0, narrowness))))}g}"
        return text if self.low <= float(text) <= self.high else repr(min(self.high, max(self.low, value)))


Parameter = Values | NumberRange


def parse_parameters(texts: Sequence[str]) -> tuple[Parameter, ...]:
    """Parse `--param` flags. Raises UsageError for an invalid flag or a repeated name."""
    found = [parse_parameter(text) for text in texts]
    names = [each.name for each in found]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"`--param {repeated}` is given twice")
    return tuple(found)


def parse_parameter(text: str) -> Parameter:
    """Parse one `--param` flag. Raises UsageError if it is invalid."""
    name, separator, value = text.partition("=")
    check_flag("--param NAME", name, ENV_NAME)
    if not separator or not value:
        raise _refuse(text, "the list of values is empty")
    if match := RANGE.fullmatch(value):
        return _parse_range(text, name, *match.groups())
    values = tuple(value.split(","))
    for each in values:
        check_flag(f"--param {name}", each, ENV_VALUE)
    if len(set(values)) < len(values):
        raise _refuse(text, "a value is listed twice")
    return Values(name=name, values=values)


def _parse_range(text: str, name: str, low: str, high: str, scale: str | None) -> NumberRange:
    try:
        ends = float(low), float(high)
    except ValueError:
        raise _refuse(text, "its bounds are not numbers") from None
    if not (math.isfinite(ends[0]) and math.isfinite(ends[1]) and ends[0] < ends[1]):
        raise _refuse(text, "the first bound must be below the second")
    kind: Literal["linear", "log", "int"] = "linear"
    if scale and scale.lower() == "log":
        kind = "log"
    elif scale and scale.lower() == "int":
        kind = "int"
    if kind == "log" and ends[0] <= 0:
        raise _refuse(text, "a logarithmic range must start above 0")
    if kind == "int" and any(each != int(each) for each in ends):
        raise _refuse(text, "its bounds are not integers")
    return NumberRange(name=name, low=ends[0], high=ends[1], scale=kind)


def _refuse(text: str, reason: str) -> UsageError:
    return UsageError(
        f"invalid `--param {text}`: {reason}",
        hints=["write `--param lr=1e-4..1e-2:log`, `--param layers=2..12:int` or `--param seed=0,1,2`"],
    )


def draw(parameters: Sequence[Parameter], *, runs: int | None, seed: int) -> tuple[Configuration, ...]:
    """Draw configurations; the same arguments give the same ones. Raises UsageError for ranges without `runs`."""
    if runs is None:
        if endless := next((each for each in parameters if isinstance(each, NumberRange)), None):
            raise UsageError(f"`{endless.name}` is a range, which requires `--runs`", hints=["add `--runs 16`"])
        lists = [[(each.name, value) for value in each.values] for each in parameters if isinstance(each, Values)]
        if math.prod(map(len, lists)) > RUNS_MAX:
            raise UsageError(f"the lists have more than {RUNS_MAX:,} combinations", hints=["add `--runs 100`"])
        return tuple(dict(pairs) for pairs in itertools.product(*lists))
    columns = {each.name: _draw_column(each, runs, random.Random(f"{seed} {each.name}")) for each in parameters}
    choices = [each for each in parameters if isinstance(each, Values)]
    if len(choices) == len(parameters) and runs <= math.prod(len(each.values) for each in choices):
        _part_twins(columns, choices, random.Random(f"{seed} twins"))
    return tuple({name: column[index] for name, column in columns.items()} for index in range(runs))


def _part_twins(columns: dict[str, list[str]], lists: Sequence[Values], chance: random.Random) -> None:
    """Swap values of runs until no two runs have the same ones: the second would be paid for without a result."""
    rows = [list(row) for row in zip(*columns.values(), strict=True)]
    counts = Counter(map(tuple, rows))
    for _ in range(SWAPS_MAX):
        twins = [row for row in rows if counts[tuple(row)] > 1]
        if not twins:
            break
        for row in twins:
            other, place = chance.choice(rows), chance.randrange(len(lists))
            before = [tuple(row), tuple(other)]
            row[place], other[place] = other[place], row[place]
            after = [tuple(row), tuple(other)]
            if counts[before[0]] > 1 and before != after and not any(counts[each] for each in after):
                counts.subtract(before)
                counts.update(after)
            else:
                row[place], other[place] = other[place], row[place]
    if any(count > 1 for count in counts.values()):  # nearly all combinations: used equally often, or nearly so
        numbers = chance.sample(range(math.prod(len(each.values) for each in lists)), len(rows))
        rows = [_combine(lists, number) for number in numbers]
    for place, column in enumerate(columns.values()):
        column[:] = [row[place] for row in rows]


def _combine(lists: Sequence[Values], number: int) -> list[str]:
    """Return one combination of the lists by its number."""
    found = []
    for each in lists:
        number, index = divmod(number, len(each.values))
        found.append(each.values[index])
    return found


def _draw_column(parameter: Parameter, runs: int, chance: random.Random) -> list[str]:
    if isinstance(parameter, Values):
        column = [parameter.values[index % len(parameter.values)] for index in range(runs)]
    else:
        column = [parameter.place((index + chance.random()) / runs) for index in range(runs)]
    chance.shuffle(column)
    return column
