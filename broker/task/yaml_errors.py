"""Explain parser errors in terms of the file: the problem, its line, and the correction."""

from __future__ import annotations

import re
from collections.abc import Sequence

_GLUED = r"\s*(?:- )?([A-Za-z_][A-Za-z0-9_]*):([^\s/].*)"  # `cpus:4`, not `s3://bucket`
_BARE = r"\s*(?:- )?([A-Za-z_][A-Za-z0-9_]*)(?:\s+[^\s:#][^:]*(?::\S+)?)?\s*"  # `cpus 4`, `accelerators A100:8`
_WITH_VALUE = r"\s*(?:- )?[A-Za-z_][A-Za-z0-9_]*:\s+[^\s#|>].*"
_NO_SPACE_OF = "mapping values are not allowed in this context"
_COMMENTED = r".*:\s+[^\s#|>].*\s#.*"
_ESCAPE = "found invalid Unicode character escape code"
# The parser's problem -> the problem in terms of the file, and a hint.
_SAME_PLACE = {
    _ESCAPE: ("an escape is half of a character", "write the character itself, such as an emoji, as UTF-8"),  # of JSON
    "did not find expected alphabetic or numeric character": (
        "`*` and `&` have a special meaning in YAML", "put the value in quotes: `infra: '*/us-east-1'`",
    ),
    "did not find expected ',' or '}'": (
        "a bracket is not closed, or a comma is missing", "compare the brackets up to this line",
    ),
    "did not find expected ',' or ']'": (
        "a bracket is not closed, or a comma is missing", "compare the brackets up to this line",
    ),
    "found unexpected end of stream": ("a quote is not closed", "close it, or write long text after `|`"),
}  # fmt: skip
Place = tuple[int, int]


def explain(problem: str, lines: Sequence[str], place: Place) -> tuple[Place, str, str | None]:
    """Return the position of the cause, the problem, and a hint. Lines and columns count from 1."""
    line, column = place
    source = _get(lines, line)
    if problem == _ESCAPE:
        return place, *_SAME_PLACE[problem]
    if "\t" in source[: max(column, len(source) - len(source.lstrip()))]:
        return place, problem, "YAML requires spaces for indentation, not tabs"
    if source.lstrip().startswith(("{%", "{#")):
        return place, problem, "this is a template: fill it in first"
    if problem == _NO_SPACE_OF:
        return _explain_value(lines, place)
    if problem == "a field without `:`":
        return place, problem, suggest_colon(source) or "write `KEY: VALUE`, or remove the line"
    if problem == "did not find expected key" and source[column - 1 : column] in ("}", "]"):
        return place, "unmatched closing bracket", "remove it"
    if problem == "did not find expected key" and not source.lstrip().startswith(("-", "{", "[")):
        return (
            place,
            "the indentation matches no line above",
            "indent it like the fields it belongs to",
        )
    if problem == "did not find expected key" and re.fullmatch(_COMMENTED, _get(lines, _find_above(lines, line))):
        message = f"the value in line {_find_above(lines, line)} ends at its comment, so this line belongs to no field"
        return place, message, "write a text of several lines after `|`, each line indented below it"
    if problem == "found character that cannot start any token":
        first = source[column - 1 : column]
        return place, f"a value cannot start with {'a backtick' if first == '`' else f'`{first}`'}", "put it in quotes"
    return place, *_SAME_PLACE.get(problem, (problem, None))


def _explain_value(lines: Sequence[str], place: Place) -> tuple[Place, str, str | None]:
    """Explain a misplaced `key: value`; the cause is often the line above."""
    line, _ = place
    source, above = _get(lines, line), _find_above(lines, line)
    text = _get(lines, above)
    if hint := suggest_colon(text):
        return (above, _measure(text) + 1), "a field without `:`", hint
    if source.count(": ") > 1 and source.lstrip()[:1] not in ("{", "["):
        return place, "a value contains `: `, which separates a field from its value", "put the value in quotes"
    if above and _measure(source) > _measure(text) and re.fullmatch(_WITH_VALUE, text):
        message = f"this line is indented further than line {above}, which already has a value"
        return place, message, "give both lines the same indentation"
    return place, _NO_SPACE_OF, "check the colons and the indentation of this line and the one above it"


def suggest_colon(text: str) -> str | None:
    """Return a hint if a line lacks a colon, or the space after it; None if it seems to have both."""
    if found := re.fullmatch(_GLUED, text):
        return f"put a space after the colon: `{found[1]}: ...`"
    if found := re.fullmatch(_BARE, text):
        return f"put a colon after `{found[1]}`"
    return None


def _find_above(lines: Sequence[str], line: int) -> int:
    """Return the number of the last line above with content; 0 without one."""
    for number in range(line - 1, 0, -1):
        if (text := _get(lines, number).strip()) and not text.startswith("#"):
            return number
    return 0


def _get(lines: Sequence[str], line: int) -> str:
    return lines[line - 1] if 0 < line <= len(lines) else ""


def _measure(text: str) -> int:
    return len(text) - len(text.lstrip(" "))
