"""The task file format as JSON Schema, from the table that the loader uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from broker.task.fields import HEADER, TASK
from broker.task.shapes import Either, ListOf, MapOf, Schema, Shape
from broker.task.tables import Table

DRAFT = "https://json-schema.org/draft/2020-12/schema"


def make_schema() -> Schema:
    """Return the JSON Schema, draft 2020-12, of one document of a task file: a task, or a pipeline's header."""
    tables = {table.name: table for table in list_tables()}
    return {
        "$schema": DRAFT,
        "title": "broker task file",
        "description": "A task in SkyPilot's dialect, with broker's `goal`, `checkpoint`, `unattended` and `needs`.",
        "anyOf": [TASK.describe(), HEADER.describe()],
        "$defs": {name: table.describe_fully() for name, table in sorted(tables.items())},
    }


def list_tables() -> Sequence[Table]:
    """List every table of fields that a task file can contain."""
    return [table for root in (TASK, HEADER) for table in _list_tables(root)]


def _list_tables(shape: Shape) -> Iterator[Table]:
    if isinstance(shape, Table):
        yield shape
        for entry in shape.fields.values():
            yield from _list_tables(entry.shape)
    elif isinstance(shape, Either):
        for each in shape.shapes:
            yield from _list_tables(each)
    elif isinstance(shape, ListOf):
        yield from _list_tables(shape.item)
    elif isinstance(shape, MapOf):
        yield from _list_tables(shape.value)
