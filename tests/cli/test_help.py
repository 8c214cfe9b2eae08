"""Every help text, as a snapshot. A change of one is reviewed as a diff of `__snapshots__/`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
from click.testing import CliRunner
from syrupy.assertion import SnapshotAssertion

from broker.cli.commands import COMMANDS, GROUPS
from broker.cli.main import app
from tests.cli.screens import TextExtension

ROOT = typer.main.get_command(app)


def list_commands() -> Iterator[str]:
    """`plan`, `jobs`, `jobs launch` and so on; the top level is the empty line."""
    yield ""
    for name in COMMANDS:
        yield name
        if name in GROUPS:
            group: Any = ROOT.get_command(None, name)  # type: ignore[attr-defined]
            yield from (f"{name} {each}" for each in group.list_commands(None))


@pytest.fixture
def snapshot(snapshot: SnapshotAssertion) -> SnapshotAssertion:
    return snapshot.use_extension(TextExtension)


@pytest.mark.parametrize("command", list(list_commands()), ids=lambda line: line.replace(" ", "-") or "broker")
def test_help(command: str, snapshot: SnapshotAssertion) -> None:
    done = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"}).invoke(
        ROOT, [*command.split(), "--help"], prog_name="broker"
    )
    assert done.exit_code == 0, done.output
    assert all(len(line) <= 80 for line in done.output.splitlines())
    assert done.output == snapshot
