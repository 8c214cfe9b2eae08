"""Read a file of machines: a mapping from names to tables. Every error has its line and column."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from broker.errors import Issue, TaskError
from broker.task.reading import Reader, describe
from broker.task.shapes import Number, Shape, Text, Whole
from broker.task.tables import Field, Section, Table
from broker.task.yaml_reader import Marked, read_documents

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
ADDRESS = Text(pattern=r"[A-Za-z0-9_][A-Za-z0-9_.:%-]*", expected="a host name or address", also_scalar=True)
PATH = Text(pattern=r".+", expected="a path")

Entry = TypeVar("Entry")

# The login by OpenSSH, with the field names of SkyPilot's files.
LOGIN_FIELDS = {
    "user": Field(shape=Text(pattern=r"[\w.][\w.-]*", expected="a user name"), about="Login name."),
    "port": Field(shape=Whole(minimum=1, maximum=65535), about="Port of sshd."),
    "identity_file": Field(shape=PATH, about="Private key."),
    "known_hosts": Field(shape=PATH, about="File with the host keys; default: your `known_hosts`."),
    "ssh_config": Field(shape=PATH, about="OpenSSH configuration; default: your `~/.ssh/config`."),
}
USD_HOUR = Field(shape=Number(above=None), about="Price of one machine per hour; default 0.")


def read_entries(
    path: Path, table: Table, read: Callable[[Reader, str, Section], Entry], *, name: re.Pattern[str] = NAME
) -> dict[str, Entry]:
    """Read every table of the file. Raises TaskError with all issues, among them names that do not match `name`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        issue = Issue(file=str(path), line=0, column=0, message=f"the file cannot be read: {why}")
        raise TaskError([issue]) from None
    reader = Reader(text, str(path))
    found = {
        key: read(reader, key, section)
        for document in read_documents(text, str(path))[:1]
        for key, section in _list_sections(reader, document, table, name)
    }
    if reader.issues:
        raise TaskError(sorted(reader.issues, key=lambda issue: (issue.line, issue.column)))
    return found


def _list_sections(
    reader: Reader, document: Marked, table: Table, pattern: re.Pattern[str]
) -> Iterator[tuple[str, Section]]:
    if not isinstance(document.value, dict):
        if document.value is not None:
            reader.fault(document, f"the file must be a mapping from names to machines, not {describe(document)}")
        return
    for name, marked in document.value.items():
        if not pattern.fullmatch(name):
            reader.note(*document.keys[name], f"`{name}` is not a valid name", "use letters, digits, `.`, `_` and `-`")
        elif (section := table.read(reader, marked, name)) is not None:
            yield name, section


class OneOrList(Shape):
    """One text, or a list of them."""

    expected = "text or a list"

    def read(self, reader: Reader, marked: Marked, name: str) -> tuple[str, ...] | None:
        """Return the valid texts as a tuple, even a single one; report the issues of the others."""
        items = marked.value if isinstance(marked.value, list) else [marked]
        texts = [Text(also_scalar=True).read(reader, each, name) for each in items]
        return tuple(text for text in texts if text is not None)

    def admits_kind(self, value: object) -> bool:
        """Return whether the value is a text or a list, whatever its items are."""
        return isinstance(value, str | list)
