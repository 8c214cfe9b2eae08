"""Reads YAML by 1.2 rules and remembers where everything was written.

PyYAML's C parser gives the events; the composing is ours, because PyYAML's own follows YAML 1.1 (`on` is true,
`22:22` is 1342, the last of two equal keys wins).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from broker.errors import Issue, TaskError

BYTES_MAX = 1_000_000
NODES_MAX = 100_000  # after aliases are expanded: a small file can otherwise stand for a huge one

_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")


@dataclass(kw_only=True)
class Marked:
    """A value with its place: a scalar, a list of Marked, or a dict from text to Marked with the places of its keys."""

    value: Any
    line: int
    column: int
    keys: dict[str, tuple[int, int]] = field(default_factory=dict)

    def plain(self) -> Any:
        """The value without places."""
        if isinstance(self.value, dict):
            return {key: each.plain() for key, each in self.value.items()}
        if isinstance(self.value, list):
            return [each.plain() for each in self.value]
        return self.value


class Fault(Exception):
    """One issue found while composing."""

    def __init__(self, mark: Any, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.line, self.column = mark.line + 1, mark.column + 1
        self.message, self.hint = message, hint


def read_documents(text: str, file: str) -> list[Marked]:
    """All documents of a text. Raises TaskError with the place of the first fault of syntax."""
    lines = text.splitlines()

    def fail(line: int, column: int, message: str, hint: str | None = None) -> TaskError:
        source = lines[line - 1] if 0 < line <= len(lines) else None
        return TaskError([Issue(file=file, line=line, column=column, message=message, hint=hint, source_line=source)])

    if len(text.encode("utf-8", "surrogatepass")) > BYTES_MAX:
        raise fail(
            0, 0, f"the file is larger than {BYTES_MAX:,} bytes", "keep data out of the task file; use `file_mounts`"
        )
    try:
        return _Composer(yaml.parse(text, Loader=_loader())).compose_all()
    except Fault as fault:
        raise fail(fault.line, fault.column, fault.message, fault.hint) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        raise fail(line, column, f"not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, UnicodeError) as error:
        raise fail(1, 1, f"not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise fail(1, 1, "the file is nested too deeply") from None


def _loader() -> Any:
    return getattr(yaml, "CLoader", yaml.Loader)


class _Composer:
    def __init__(self, events: Iterator[Any]) -> None:
        self._events = iter(events)
        self._anchors: dict[str, tuple[Marked, int]] = {}
        self._count = 0

    def compose_all(self) -> list[Marked]:
        documents = []
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                self._anchors = {}
                documents.append(self._compose(next(self._events)))
        return documents

    def _compose(self, event: Any) -> Marked:
        before = self._count
        self._add(1, event)
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._anchors:
                raise Fault(
                    event.start_mark, f"`*{event.anchor}` stands for nothing", f"define `&{event.anchor}` above it"
                )
            node, size = self._anchors[event.anchor]
            self._add(size, event)
            return node
        mark = event.start_mark
        node = Marked(value=None, line=mark.line + 1, column=mark.column + 1)
        if isinstance(event, yaml.ScalarEvent):
            node.value = _read_scalar(event)
        elif isinstance(event, yaml.SequenceStartEvent):
            node.value = self._compose_sequence()
        else:
            self._compose_mapping(node)
        if event.anchor:
            self._anchors[event.anchor] = (node, self._count - before)
        return node

    def _add(self, count: int, event: Any) -> None:
        self._count += count
        if self._count > NODES_MAX:
            raise Fault(event.start_mark, f"the file stands for more than {NODES_MAX:,} values", "use fewer aliases")

    def _compose_sequence(self) -> list[Marked]:
        items = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            items.append(self._compose(event))
        return items

    def _compose_mapping(self, node: Marked) -> None:
        node.value = {}
        event: Any
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                raise Fault(event.start_mark, "a key must be plain text")
            if event.value in node.value:
                first = node.keys[event.value][0]
                raise Fault(
                    event.start_mark, f"duplicate key `{event.value}`, first in line {first}", "keep one of them"
                )
            mark: Any = event.start_mark
            node.keys[event.value] = (mark.line + 1, mark.column + 1)
            node.value[event.value] = self._compose(next(self._events))


def _read_scalar(event: Any) -> Any:
    """The YAML 1.2 core schema; quoted and tagged-as-text scalars stay text."""
    text: str = event.value
    if not event.implicit[0] or event.tag not in (None, "!"):
        return text
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in ("true", "True", "TRUE"):
        return True
    if text in ("false", "False", "FALSE"):
        return False
    if _INT.fullmatch(text) and len(text) < 64:
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text
