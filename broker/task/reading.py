"""Reads single values of a task file: each reader takes a Marked value and gives a typed one, or notes an issue."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from broker.errors import Issue
from broker.task.yaml_reader import Marked
from broker.types import Quantity

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|d|w)")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(MB|GB|TB|MiB|GiB|TiB|M|G|T)?", re.IGNORECASE)
_GIB = {"m": 1 / 1024, "g": 1.0, "t": 1024.0}


class Reader:
    """Collects every issue of one file, so that all are reported at once."""

    def __init__(self, text: str, file: str) -> None:
        self.file = file
        self.issues: list[Issue] = []
        self._lines = text.splitlines()

    def note(self, line: int, column: int, message: str, hint: str | None = None) -> None:
        source = self._lines[line - 1] if 0 < line <= len(self._lines) else None
        issue = Issue(file=self.file, line=line, column=column, message=message, hint=hint, source_line=source)
        if issue not in self.issues:
            self.issues.append(issue)

    def fault(self, marked: Marked, message: str, hint: str | None = None) -> None:
        self.note(marked.line, marked.column, message, hint)

    def mapping(self, marked: Marked, name: str, known: Iterable[str] | None = None) -> Mapping[str, Marked]:
        """The mapping's values by key; unknown keys are noted with the nearest known one."""
        if marked.value is None:
            return {}
        if not isinstance(marked.value, dict):
            self.fault(marked, f"{name} must be a mapping, not {describe(marked.value)}")
            return {}
        if known is None:
            return dict(marked.value)
        names = list(known)
        for key in marked.value:
            if key not in names:
                self.note(*marked.keys[key], f"unknown field `{key}` in {name}", suggest(key, names))
        return {key: value for key, value in marked.value.items() if key in names}

    def sequence(self, marked: Marked, name: str) -> list[Marked]:
        if isinstance(marked.value, list):
            return marked.value
        self.fault(marked, f"{name} must be a list, not {describe(marked.value)}")
        return []

    def text(self, marked: Marked | None, name: str) -> str | None:
        """Text; a number or true/false written without quotes counts as its text only when it is a number."""
        if marked is None or marked.value is None:
            return None
        if isinstance(marked.value, str):
            return marked.value
        if isinstance(marked.value, (int, float)) and not isinstance(marked.value, bool):
            return str(marked.value)
        self.fault(marked, f"`{name}` must be text, not {describe(marked.value)}", "put it in quotes")
        return None

    def boolean(self, marked: Marked | None, name: str) -> bool | None:
        if marked is None or marked.value is None or isinstance(marked.value, bool):
            return marked.value if marked else None
        self.fault(marked, f"`{name}` must be `true` or `false`, not {describe(marked.value)}")
        return None

    def integer(self, marked: Marked | None, name: str, *, minimum: int = 0) -> int | None:
        if marked is None or marked.value is None:
            return None
        if isinstance(marked.value, int) and not isinstance(marked.value, bool) and marked.value >= minimum:
            return marked.value
        self.fault(marked, f"`{name}` must be a whole number of at least {minimum}, not {describe(marked.value)}")
        return None

    def number(
        self, marked: Marked | None, name: str, *, above: float = 0.0, at_most: float | None = None
    ) -> float | None:
        if marked is None or marked.value is None:
            return None
        value = marked.value
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and above < value < float("inf") and (at_most is None or value <= at_most):
            return float(value)
        limit = f" and at most {at_most:g}" if at_most is not None else ""
        self.fault(marked, f"`{name}` must be a number above {above:g}{limit}, not {describe(value)}")
        return None

    def quantity(self, marked: Marked | None, name: str, *, unit: str = "") -> Quantity | None:
        """`4`, `4+`, and with a unit also `32GB+`."""
        if marked is None or marked.value is None:
            return None
        text = str(marked.value).strip()
        body = text.removesuffix("+").strip()
        for suffix in (f"{unit}iB", f"{unit}B", unit) if unit else ():
            if body.lower().endswith(suffix.lower()):
                body = body[: -len(suffix)].strip()
                break
        if re.fullmatch(r"\d+(\.\d+)?", body) and float(body) > 0 and not isinstance(marked.value, bool):
            return Quantity(value=float(body), is_minimum=text.endswith("+"))
        example = "`32` or `32+`" if unit else "`4` or `4+`"
        self.fault(marked, f"`{name}` must be an amount like {example}, not {describe(marked.value)}")
        return None

    def duration_s(self, marked: Marked | None, name: str, *, bare_unit: str) -> float | None:
        """`90s`, `10m`, `1h30m`, `6d`; a bare number counts in `bare_unit`."""
        if marked is None or marked.value is None:
            return None
        value = marked.value
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e9:
            return float(value) * _SECONDS[bare_unit]
        if isinstance(value, str):
            compact = value.replace(" ", "")
            parts = _DURATION.findall(compact)
            if parts and "".join(amount + unit for amount, unit in parts) == compact:
                seconds = sum(float(amount) * _SECONDS[unit] for amount, unit in parts)
                if seconds > 0:
                    return seconds
        self.fault(marked, f"`{name}` must be a duration like `90s`, `10m`, `1h30m` or `6d`, not {describe(value)}")
        return None

    def size_gib(self, marked: Marked | None, name: str) -> float | None:
        """`256`, `256GB`, `1.5TB`; a bare number is GiB."""
        if marked is None or marked.value is None:
            return None
        found = _SIZE.fullmatch(str(marked.value).strip())
        if found and not isinstance(marked.value, bool):
            return float(found[1]) * _GIB[(found[2] or "g")[0].lower()]
        self.fault(marked, f"`{name}` must be a size like `256` or `256GB`, not {describe(marked.value)}")
        return None


def describe(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if value is None:
        return "nothing"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{text[:40]}`"


def suggest(word: str, known: Iterable[str]) -> str | None:
    """The near miss, as a hint."""
    near = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.6)
    return f"did you mean `{near[0]}`?" if near else None
