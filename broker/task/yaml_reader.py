"""Read YAML by 1.2 rules and record the position of every value.

PyYAML's C parser produces the events; the composer is our own, because PyYAML's follows YAML 1.1 (`on` is true, `22:22`
is 1342, the last of two equal keys wins).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from broker.errors import Issue, TaskError
from broker.task.allowed import is_text
from broker.task.yaml_errors import explain

BYTES_MAX = 1_000_000
NODES_MAX = 100_000  # after expansion of aliases: a small file can otherwise expand to a huge one
DEPTH_MAX = 60  # of nested mappings and lists, aliases included; task files need about ten

_TAG = "tag:yaml.org,2002:"
_KNOWN_TAGS = ("str", "int", "float", "bool", "null", "seq", "map", "set")
_SCALAR_TAGS: dict[str, tuple[type, ...]] = {
    "int": (int,), "float": (int, float), "bool": (bool,), "null": (type(None),),
}  # fmt: skip
_DIGITS_MAX = 64
_CONTROL = "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufffe\uffff]"  # YAML 1.2, 5.1: not printable
_LINE_END = "\r\n|[\n\r\x85\u2028\u2029]"


@dataclass(kw_only=True)
class Marked:
    """A value with its position in the file.

    The value is a scalar, a list of Marked, or a dict from text to Marked with the positions of its keys.

    `text` is the scalar as written, without quotes: `1.10` is the number 1.1 and the text 1.10. `is_plain`: it has
    neither quotes nor a tag, so YAML 1.1 may read it as a different value.
    """

    value: Any
    line: int
    column: int
    text: str = ""
    keys: dict[str, tuple[int, int]] = field(default_factory=dict)
    is_plain: bool = False


class ComposeError(Exception):
    """One issue found while composing."""

    def __init__(self, mark: Any, message: str, hint: str | None = None, *, shows_line: bool = True) -> None:
        super().__init__(message)
        self.line, self.column = mark.line + 1, mark.column + 1
        self.message, self.hint, self.shows_line = message, hint, shows_line


def read_documents(text: str, file: str) -> list[Marked]:
    """Return all documents of a text. Raises TaskError with the position of the first syntax error."""

    def fail(line: int, column: int, message: str, hint: str | None = None, *, shows_line: bool = True) -> TaskError:
        lines = split_lines(text)
        source = lines[line - 1] if 0 < line <= len(lines) and shows_line else None
        return TaskError([Issue(file=file, line=line, column=column, message=message, hint=hint, source_line=source)])

    if len(text.encode("utf-8", "surrogatepass")) > BYTES_MAX:
        raise fail(
            0, 0, f"the file is larger than {BYTES_MAX:,} bytes", "keep data out of the task file; use `file_mounts`"
        )
    if (place := text.find("\0")) >= 0:
        line = text.count("\n", 0, place) + 1
        column = place - text.rfind("\n", 0, place)
        message = "the file contains a zero byte, so it is not text"
        raise fail(line, column, message, "remove it, or save the file as UTF-8", shows_line=False)
    try:
        return _Composer(yaml.parse(text, Loader=_loader())).compose_all()
    except ComposeError as fault:
        raise fail(fault.line, fault.column, fault.message, fault.hint, shows_line=fault.shows_line) from None
    except yaml.MarkedYAMLError as error:
        context = error.context or ""
        is_bare = "simple key" in context  # the parser searches for the `:` up to the next line
        is_early = is_bare or "quoted scalar" in context  # and for the closing quote up to the end of the file
        mark = (error.context_mark if is_early else None) or error.problem_mark or error.context_mark
        at = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        problem = "a field without `:`" if is_bare else error.problem or error.context or "syntax error"
        (line, column), message, hint = explain(problem, split_lines(text), at)
        raise fail(line, column, f"not valid YAML: {message}", hint) from None
    except yaml.reader.ReaderError:
        place = found.start() if (found := re.search(_CONTROL, text)) else 0
        line, column = text.count("\n", 0, place) + 1, place - text.rfind("\n", 0, place)
        message = f"the file contains the control character {text[place]!a}"
        hint = "remove it, or write it as an escape such as `\\x07` in double quotes"
        raise fail(line, column, f"not valid YAML: {message}", hint) from None
    except (yaml.YAMLError, UnicodeError) as error:
        raise fail(1, 1, f"not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise fail(1, 1, "the file is nested too deeply") from None


def split_lines(text: str) -> list[str]:
    """Split text into lines as YAML counts them."""
    return re.split(_LINE_END, text)


def _loader() -> Any:
    return getattr(yaml, "CLoader", yaml.Loader)


_Anchored = tuple[Marked, int, int]  # the node, its number of values after expansion, its depth


class _Composer:
    def __init__(self, events: Iterator[Any]) -> None:
        self._events = iter(events)
        self._anchors: dict[str, _Anchored] = {}
        self._open: list[str | None] = []  # anchors of the values that are being composed
        self._count = 0
        self._height = 0  # of the last composed node

    def compose_all(self) -> list[Marked]:
        documents = []
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                self._anchors = {}
                documents.append(self._compose(next(self._events), 0))
        return documents

    def _compose(self, event: Any, depth: int) -> Marked:
        before = self._count
        self._add(1, event)
        if isinstance(event, yaml.AliasEvent):
            return self._follow(event, depth)
        self._check_depth(depth, event)
        mark = event.start_mark
        node = Marked(value=None, line=mark.line + 1, column=mark.column + 1)
        self._open.append(event.anchor)
        if isinstance(event, yaml.ScalarEvent):
            _check_text(event)
            node.value, node.text, node.is_plain = _read_scalar(event), event.value, event.implicit[0]
            self._height = 0
        else:
            _check_tag(event)
            compose = self._compose_sequence if isinstance(event, yaml.SequenceStartEvent) else self._compose_mapping
            self._height = 1 + compose(node, depth + 1)
        self._open.pop()
        if event.anchor:
            self._anchors[event.anchor] = (node, self._count - before, self._height)
        return node

    def _follow(self, event: Any, depth: int) -> Marked:
        anchored = self._anchors.get(event.anchor)
        if anchored is None and event.anchor in self._open:
            raise ComposeError(
                event.start_mark, f"`*{event.anchor}` is inside the value of `&{event.anchor}`", "repeat the value"
            )
        if anchored is None:
            raise ComposeError(
                event.start_mark, f"undefined alias `*{event.anchor}`", f"define `&{event.anchor}` above it"
            )
        node, size, height = anchored
        self._add(size, event)
        self._check_depth(depth + height, event)
        self._height = height
        return node

    def _add(self, count: int, event: Any) -> None:
        self._count += count
        if self._count > NODES_MAX:
            raise ComposeError(
                event.start_mark, f"the file expands to more than {NODES_MAX:,} values", "use fewer aliases"
            )

    def _check_depth(self, depth: int, event: Any) -> None:
        if depth > DEPTH_MAX:
            raise ComposeError(event.start_mark, f"the file is nested more than {DEPTH_MAX} levels deep")

    def _compose_sequence(self, node: Marked, depth: int) -> int:
        node.value, height = [], 0
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            node.value.append(self._compose(event, depth))
            height = max(height, self._height)
        return height

    def _compose_mapping(self, node: Marked, depth: int) -> int:
        node.value, height = {}, 0
        merged: list[Marked] = []
        event: Any
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            mark: Any = event.start_mark
            if not isinstance(event, yaml.ScalarEvent):
                is_template = isinstance(event, yaml.MappingStartEvent) and event.flow_style
                hint = "`{{...}}` is a template: fill it in first" if is_template else None
                raise ComposeError(mark, "a key must be plain text", hint)
            _check_text(event)
            key: str = event.value
            is_merge = key == "<<" and event.implicit[0]
            if key in node.value:
                first = node.keys[key][0]
                message = f"duplicate key `{key}`, first defined in line {first}"
                raise ComposeError(mark, message, "keep only one of them")
            value = self._compose(next(self._events), depth)
            height = max(height, self._height)
            if is_merge:
                merged += self._list_merged(value, mark)
            else:
                node.keys[key], node.value[key] = (mark.line + 1, mark.column + 1), value
        for source in merged:  # YAML 1.1's merge key, which SkyPilot's files use; explicit keys win
            for key, value in source.value.items():
                if key not in node.value:
                    node.keys[key], node.value[key] = source.keys[key], value
        return height

    def _list_merged(self, value: Marked, mark: Any) -> list[Marked]:
        sources = value.value if isinstance(value.value, list) else [value]
        if not all(isinstance(source.value, dict) for source in sources):
            raise ComposeError(
                mark, "`<<` must refer to a mapping or a list of mappings", "for example `<<: *defaults`"
            )
        return sources


def _check_text(event: Any) -> None:
    """Reject a zero byte, which an escape in quotes can produce. The line is not shown: it may contain a secret."""
    if not is_text(event.value):
        message = "text must not contain a zero byte, which programs, files and clouds do not accept"
        raise ComposeError(event.start_mark, message, "remove `\\0`, `\\x00` or `\\u0000`", shows_line=False)


def _check_tag(event: Any) -> None:
    tag = event.tag
    if tag and tag != "!" and tag.removeprefix(_TAG) not in _KNOWN_TAGS:
        shown = "!!" + tag.removeprefix(_TAG) if tag.startswith(_TAG) else tag
        raise ComposeError(event.start_mark, f"unsupported tag `{shown}`", "remove it")


def _read_scalar(event: Any) -> Any:
    """Return a value by the YAML 1.2 core schema; quoted scalars and scalars tagged as text remain text."""
    text: str = event.value
    _check_tag(event)
    is_tagged = event.tag not in (None, "!")
    if is_tagged and event.tag != _TAG + "str":
        value = read_plain(text)
        types = _SCALAR_TAGS.get(event.tag.removeprefix(_TAG))
        if types is None or not isinstance(value, types):
            raise ComposeError(event.start_mark, f"`{text[:40]}` does not match its tag")
        return value
    return text if is_tagged or not event.implicit[0] else read_plain(text)


def unmark(value: Any) -> Any:
    """Return a value of any shape without its positions."""
    if isinstance(value, Marked):
        return unmark(value.value)
    if isinstance(value, dict):
        return {key: unmark(each) for key, each in value.items()}
    return [unmark(each) for each in value] if isinstance(value, list) else value


def read_plain(text: str) -> Any:
    """Return the value of an unquoted scalar."""
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in ("true", "True", "TRUE"):
        return True
    if text in ("false", "False", "FALSE"):
        return False
    return _read_number(text) if text[0] in "0123456789+-." and len(text) < _DIGITS_MAX else text


def _read_number(text: str) -> Any:
    """Return a number, or the text unchanged. Hand-written: compiling patterns takes longer than reading a task."""
    unsigned = text[1:] if text[0] in "+-" else text
    if unsigned.isascii() and unsigned.isdigit():
        return int(text)
    if text.startswith(("0o", "0x")) and text[2:].isalnum() and text.isascii():
        try:
            return int(text[2:], 8 if text[1] == "o" else 16)
        except ValueError:
            return text
    if not text.strip("+-.0123456789eE"):
        try:
            return float(text)
        except ValueError:
            return text
    if unsigned in (".inf", ".Inf", ".INF") or text in (".nan", ".NaN", ".NAN"):
        return float(text.replace(".", ""))
    return text
