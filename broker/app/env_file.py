"""Read a `.env` file as python-dotenv does, which SkyPilot uses: quotes, escapes, comments, `${NAME}`, several lines.

Unlike there, `${NAME}` in single quotes is text, as in a shell and in Compose, and a variable without a value is an
error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from broker.errors import UsageError

_KEY = r"[ \t]*(?:export[ \t]+)?([^=\s#]+)[ \t]*=[ \t]*"
_DOUBLE = r'"((?:[^"\\]|\\.)*)"'
_SINGLE = r"'((?:[^'\\]|\\.)*)'"
_END = r"[ \t]*(?:#[^\n]*)?(?:\n|$)"
_VARIABLE = r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}"
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "a": "\a", "b": "\b", "f": "\f", "v": "\v", '"': '"', "'": "'", "\\": "\\"}


def read_env_file(path: Path) -> dict[str, str]:
    """Return the variables of a file. Raises UsageError with the line, and without the value."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # universal newlines
    except OSError as error:
        raise UsageError(f"cannot read `--env-file {path}`: {(error.strerror or 'unreadable').lower()}") from None
    except UnicodeDecodeError:
        raise UsageError(f"cannot read `--env-file {path}`: it is not UTF-8 text") from None
    from broker.task.allowed import ENV_NAME, ENV_VALUE
    from broker.task.checking import check_flag

    pairs: dict[str, str] = {}
    position, line, counted = 0, 1, 0
    while position < len(text):
        line += text.count("\n", counted, position)
        counted, place = position, f"{path}:{line}"
        if blank := re.compile(_END).match(text, position):
            position = blank.end()
            continue
        found = re.compile(_KEY).match(text, position)
        if found is None or not ENV_NAME.admits(found[1]):
            raise UsageError(f"{place}: expected KEY=VALUE")
        value, position = _read_value(text, found.end(), pairs, place)
        check_flag(f"{place}: {found[1][:40]}", value, ENV_VALUE, is_hidden=True)
        pairs[found[1]] = value
    return pairs


def _read_value(text: str, start: int, known: Mapping[str, str], place: str) -> tuple[str, int]:
    """Return the value that begins at `start`, and the position behind its line or lines."""
    if double := re.compile(_DOUBLE + _END, re.DOTALL).match(text, start):
        plain = re.sub(r"\\(.)", lambda each: _ESCAPES.get(each[1], each[0]), double[1], flags=re.DOTALL)
        return _fill(plain, known, place), double.end()
    if single := re.compile(_SINGLE + _END, re.DOTALL).match(text, start):
        return re.sub(r"\\(['\\])", r"\1", single[1]), single.end()
    end = text.find("\n", start)
    end = len(text) if end < 0 else end
    line = text[start:end].strip()
    if text[start - 1 : start].isspace() and line.startswith("#"):  # `KEY=  # comment`
        line = ""
    line = re.sub(r"\s+#.*$", "", line)
    if line[:1] in ("'", '"'):
        if len(line) < 2 or line[-1] != line[0]:
            raise UsageError(f"{place}: a quote is not closed")
        line = line[1:-1]  # quotes inside, as in `'{'a': 1}'`
    return _fill(line, known, place), end + 1


def _fill(text: str, known: Mapping[str, str], place: str) -> str:
    """Replace `${NAME}` and `${NAME:-DEFAULT}` by values of earlier lines, or of this shell."""

    def replace(found: re.Match[str]) -> str:
        own = known.get(found[1], os.getenv(found[1]))
        value = own or found[2]
        if value is None and own is None:
            hints = [f"set `{found[1]}` in an earlier line, or write `${{{found[1]}:-}}` for an empty text"]
            raise UsageError(f"{place}: `{found[1]}` has no value", hints=hints)
        return value or ""

    return re.sub(_VARIABLE, replace, text)
