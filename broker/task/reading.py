"""Collect all errors and unsupported features of a task file, with their positions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any

from broker.errors import Issue
from broker.task.yaml_reader import Marked, split_lines
from broker.types import Notice, Origin

ISSUES_MAX = 100  # more are not useful, and near misses take time to find
_SHOWN_MAX = 40
_SECRET_MIN = 4  # shorter secrets occur in too many other texts


class Reader:
    """Issues and notices of one file. `take_notices` returns a document's notices after it is read."""

    def __init__(self, text: str, file: str) -> None:
        self.file = file
        self.issues: list[Issue] = []
        self._notices: list[Notice] = []
        self._hidden: list[str] = []
        self._text = text

    def hide(self, texts: Iterable[str]) -> None:
        """Replace these secrets with `***` in lines shown with later issues and notices."""
        self._hidden += sorted((text for text in texts if len(text) >= _SECRET_MIN), key=len, reverse=True)

    def contains(self, text: str) -> bool:
        """Return whether the file contains the text."""
        return text in self._text

    def find_origin(self, marked: Marked) -> Origin:
        """Return the position of a value, for messages after reading."""
        return Origin(file=self.file, line=marked.line, column=marked.column)

    def note(self, line: int, column: int, message: str, hint: str | None = None, *, shows_line: bool = True) -> None:
        """Add an issue at a position, up to the limit. `shows_line` False: the line may contain a secret."""
        source_line = self._find_line(line) if shows_line else None
        issue = Issue(file=self.file, line=line, column=column, message=message, hint=hint, source_line=source_line)
        if not self.is_full and issue not in self.issues:
            self.issues.append(issue)

    def fault(self, marked: Marked, message: str, hint: str | None = None) -> None:
        """Report an error at a value; reading continues, so that all errors are found."""
        self.note(marked.line, marked.column, message, hint)

    def add_hint(self, start: int, marked: Marked, hint: str) -> None:
        """Add the hint to issues, from index `start`, that concern this value as a whole and have no hint."""
        for index in range(start, len(self.issues)):
            issue = self.issues[index]
            if issue.hint is None and (issue.line, issue.column) == (marked.line, marked.column):
                self.issues[index] = replace(issue, hint=hint)

    @property
    def is_full(self) -> bool:
        """Whether the limit of reported errors is reached."""
        return len(self.issues) >= ISSUES_MAX

    def warn(
        self,
        place: tuple[int, int],
        field: str,
        message: str,
        hint: str | None = None,
        *,
        blocks_launch: bool,
        cloud: str | None = None,
    ) -> None:
        """Add a notice: the file is valid, but broker does not support this."""
        line, column = place
        self._notices.append(
            Notice(
                origin=Origin(file=self.file, line=line, column=column), field=field, message=message, hint=hint,
                blocks_launch=blocks_launch, source_line=self._find_line(line), cloud=cloud,
            )
        )  # fmt: skip

    def take_notices(self) -> tuple[Notice, ...]:
        """Return the notices since the last call, in file order, without duplicates."""
        notices = sorted(dict.fromkeys(self._notices), key=lambda each: (each.origin.line, each.origin.column))
        self._notices = []
        return tuple(notices)

    def _find_line(self, line: int) -> str | None:
        source = self._lines[line - 1] if 0 < line <= len(self._lines) else ""
        for each in self._hidden:
            source = source.replace(each, "***")
        return source or None

    @cached_property
    def _lines(self) -> list[str]:
        return split_lines(self._text)


def describe(value: Any) -> str:
    """Format a value for an error message."""
    if isinstance(value, Marked):
        return describe(value.value if isinstance(value.value, (dict, list)) or value.value is None else value.text)
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if value is None:
        return "nothing"
    text = "".join(each if each.isprintable() else " " for each in str(value)[: _SHOWN_MAX + 1])
    return f"`{text[:_SHOWN_MAX]}{'...' if len(text) > _SHOWN_MAX else ''}`" if text else "empty text"


def suggest(word: str, known: Iterable[str]) -> str | None:
    """Return the near miss as a hint."""
    import difflib  # only after a fault: the import takes longer than loading a task

    by_lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(word.lower()[:_SHOWN_MAX], by_lower, n=1, cutoff=0.6)
    return f"did you mean `{by_lower[near[0]]}`?" if near else None
