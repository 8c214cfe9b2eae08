"""docs/TASK_FILE.md has every field of the dialect, with the descriptions shown by editors."""

from __future__ import annotations

import os
from pathlib import Path

from broker.task.allowed import RULES
from broker.task.schema import list_tables

PAGE = Path(__file__).parent.parent.parent / "docs" / "TASK_FILE.md"
MARK = "<!-- Below: one row per field, from broker/task/fields*.py. BROKER_UPDATE_SNAPSHOTS=1 pytest rewrites it. -->"


def write_reference() -> str:
    lines: list[str] = []
    tables = {table.name: table for table in list_tables() if table.name != "alternative"}
    for name, table in tables.items():
        lines += ["", f"### {name.replace('_', ' ')}", "", table.about, "", "| field | meaning |", "| --- | --- |"]
        for key, entry in table.fields.items():
            if key.startswith("_"):
                continue
            about = entry.about
            if entry.later:
                about += f" **{'Not launched' if entry.later.blocks_launch else 'No effect'}:** {entry.later.message}."
            for message in dict.fromkeys(later.message for later in entry.at.values()):
                clouds = ", ".join(cloud for cloud, later in entry.at.items() if later.message == message)
                about += f" **Not supported on {clouds}:** {message}."
            lines.append(f"| `{key}` | {about} |".replace("\\|", "|"))
    return "\n".join([*lines, *write_rules()]) + "\n"


def write_rules() -> list[str]:
    """Render the rules for texts from broker/task/allowed.py."""
    lines = [
        "",
        "## Allowed values",
        "",
        "A value that violates its rule is refused when the file is read, with its position. No value may contain a",
        "zero byte or half of a surrogate pair. Flags and `broker.plan` follow the same rules. A label that one cloud",
        "refuses is an error if no other cloud can run the task; otherwise it is a note.",
        "",
        "| value | must be | source |",
        "| --- | --- | --- |",
    ]
    return lines + [f"| {kind} | {rule.expected} | {rule.source} |" for kind, rule in RULES.items()]


def test_reference_has_every_field_in_the_words_of_the_table() -> None:
    text = PAGE.read_text()
    head, mark, rows = text.partition(MARK)
    if os.environ.get("BROKER_UPDATE_SNAPSHOTS"):
        PAGE.write_text(head + MARK + "\n" + write_reference())
        return
    assert mark
    assert rows == "\n" + write_reference()
