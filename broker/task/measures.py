"""Shapes of amounts with units: `4+`, `32GB`, `1h30m`, `0.5TB`, `1 USD`."""

from __future__ import annotations

import re
from typing import Any

from broker.task.shapes import Number, Scalar, Schema, is_number
from broker.task.yaml_reader import Marked
from broker.types import Quantity

_NUMBER = r"[0-9]{1,9}(?:\.[0-9]{1,20})?"
_POSITIVE = rf"(?=[0-9.]*[1-9]){_NUMBER}"
# SkyPilot's sizes are powers of 1024, whether written GB, Gi or GiB; a single letter is broker's extension.
_UNIT = r"[kKmMgGtTpP](?:[iI]?[bB]|[iI])?"
_GIB = {"k": 2.0**-20, "m": 2.0**-10, "g": 1.0, "t": 2.0**10, "p": 2.0**20}
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_PART = rf"{_NUMBER} ?[sSmMhHdDwW]"
_SPAN = rf"{_PART}(?: ?{_PART}){{0,4}}"
NUMBER_MAX = 1e9
MAX_DURATION_S_MIN = 60.0  # a shorter program has no time to start and save
NUM_NODES_MAX = 100_000
UNATTENDED_S_MIN = 900.0  # several renewals of the lease, so that a slow network does not terminate nodes


class Measure(Scalar):
    """A positive number, or text that matches a pattern."""

    pattern: str
    is_zero_ok: bool = False

    def convert(self, text: str) -> Any:
        """Return the value of a text that matches the pattern."""
        raise NotImplementedError

    def from_number(self, value: float) -> Any:
        return value

    def parse(self, marked: Marked) -> Any:
        return self.read_value(marked.value)

    def read_value(self, value: Any) -> Any:
        """Return the amount; None if it is invalid."""
        if is_number(value):
            fits = (value >= 0 if self.is_zero_ok else value > 0) and value < NUMBER_MAX
            return self.from_number(float(value)) if fits else None
        text = value.strip() if isinstance(value, str) else ""
        return self.convert(text) if re.fullmatch(self.pattern, text) else None

    def admits_kind(self, value: Any) -> bool:
        return isinstance(value, str) or is_number(value)

    def describe(self) -> Schema:
        least: Schema = {"minimum": 0} if self.is_zero_ok else {"exclusiveMinimum": 0}
        return {
            "anyOf": [
                {"type": "number", **least, "exclusiveMaximum": NUMBER_MAX},
                {"type": "string", "pattern": rf"^\s*(?:{self.pattern})\s*$"},
            ]
        }


class Count(Measure):
    """`4` is exactly 4, `4+` at least 4 -> Quantity."""

    expected = "an amount like `4` or `4+`"
    pattern = rf"{_POSITIVE} ?\+?"

    def convert(self, text: str) -> Quantity:
        return Quantity(value=float(text.removesuffix("+").rstrip()), is_minimum=text.endswith("+"))

    def from_number(self, value: float) -> Quantity:
        return Quantity(value=value)


class Seconds(Number):
    """A number of seconds, of at least 0."""

    def __init__(self) -> None:
        super().__init__(above=None)

    def hint(self, marked: Marked) -> str | None:
        seconds = Duration(bare_unit="s", is_zero_ok=True).parse(marked)
        return f"write `{seconds:g}`" if isinstance(marked.value, str) and seconds is not None else super().hint(marked)


class Ratio(float):
    """`4x`: at least this many GiB per vCPU."""


class MemorySize(Measure):
    """`32`, `32+`, `64GB`, `64GB+` -> Quantity in GiB; `4x` -> Ratio."""

    expected = "an amount like `32`, `32+` or `64GB`"
    pattern = rf"{_POSITIVE} ?(?:{_UNIT})?\+?|{_POSITIVE}x"

    def convert(self, text: str) -> Quantity | Ratio:
        if text.endswith("x"):
            return Ratio(text[:-1])
        return Quantity(value=read_gib(text.removesuffix("+")), is_minimum=text.endswith("+"))

    def from_number(self, value: float) -> Quantity:
        return Quantity(value=value)


class Size(Measure):
    """`256`, `256GB`, `1.5TB` -> GiB."""

    expected = "a size like `256` or `256GB`"
    pattern = rf"{_NUMBER} ?(?:{_UNIT})?"
    is_zero_ok = True

    def hint(self, marked: Marked) -> str | None:
        text = str(marked.value)
        return f"a size is exact: write `{text[:-1].strip()}`" if text.endswith("+") else None

    def convert(self, text: str) -> float:
        return read_gib(text)


class Duration(Measure):
    """`90s`, `10m`, `1h30m`, `6d` -> seconds; a bare number is in `bare_unit`. `off`: how to write none."""

    expected = "a duration like `90s`, `10m`, `1h30m` or `6d`"

    def __init__(self, *, bare_unit: str, is_zero_ok: bool = False, off: str | None = None) -> None:
        self.bare_unit = bare_unit
        self.off = off
        self.is_zero_ok = is_zero_ok
        self.pattern = rf"{'' if is_zero_ok else '(?=[^1-9]*[1-9])'}(?:{_SPAN}|{_NUMBER})"

    def hint(self, marked: Marked) -> str | None:
        if self.off and str(marked.value).lower() in ("none", "never"):
            return f"to turn it off, write `{self.off}`"
        found = re.fullmatch(rf"\s*({_NUMBER}) ?(sec|min|h(?:ou)?r|day|week)[a-z]*\s*", str(marked.value).lower())
        return f"write `{found[1]}{found[2][0]}`" if found else None

    def from_number(self, value: float) -> float:
        return value * _SECONDS[self.bare_unit]

    def convert(self, text: str) -> float:
        parts = re.findall(rf"({_NUMBER}) ?([sSmMhHdDwW])", text)
        if not parts:
            return float(text) * _SECONDS[self.bare_unit]
        return sum(float(amount) * _SECONDS[unit.lower()] for amount, unit in parts)


def read_gib(text: str) -> float:
    """Return the GiB of `512MB` or `1.5 TiB`; a bare number is GiB."""
    match = re.fullmatch(rf"({_NUMBER}) ?([a-zA-Z]*)", text)
    assert match, text
    return float(match[1]) * _GIB[(match[2] or "g")[0].lower()]
