"""Every help text as a snapshot. Review a change as a diff of `__snapshots__/`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
from click.testing import CliRunner
from syrupy.assertion import SnapshotAssertion

from broker.cli.commands import COMMANDS, PANELS
from broker.cli.main import app
from tests.cli.screens import TextExtension

ROOT = typer.main.get_command(app)


@cache
def find_command(line: str) -> Any:
    group, _, name = line.rpartition(" ")
    return find_command(group).get_command(None, name) if line else ROOT


def list_commands(line: str = "") -> Iterator[str]:
    """List `plan`, `jobs`, `jobs launch`, `serve keys create` and so on; the top level is the empty line."""
    yield line
    names = COMMANDS if not line else getattr(find_command(line), "commands", {})
    for name in names:
        yield from list_commands(f"{line} {name}".strip())


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
    assert not any(line.endswith("...") for line in done.output.splitlines()[2:]), "a summary is cut"
    assert done.output == snapshot


def test_every_command_is_in_one_panel() -> None:
    assert sorted(name for names in PANELS.values() for name in names) == sorted(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_listing_shows_the_first_sentence_of_the_page(name: str) -> None:
    assert find_command(name).help.split("\n")[0] == COMMANDS[name][1]


def test_every_option_and_argument_is_a_sentence() -> None:
    faults = []
    for line in list_commands():
        for each in find_command(line).params:
            text = each.help or ""
            if not text.endswith(".") or not (text[0].isupper() or text.startswith("vCPUs")):
                faults.append(f"{line} {each.name}: {text!r}")
    assert faults == []


def test_placeholders_are_in_capitals() -> None:
    """`{CLUSTER} [RUN...]`, `--port PORT`: not the name of a Python parameter or of its type."""
    faults = []
    for line in list_commands():
        context = typer.Context(find_command(line), info_name="broker")
        for each in find_command(line).params:
            placeholder = "" if getattr(each, "is_flag", False) else each.make_metavar(context)
            words = re.sub(r"<[^>]*[|][^>]*>|\.(?:yaml|svg)|sha256", "", placeholder)  # choices, names of files
            if words != words.upper():
                faults.append(f"{line}: {placeholder}")
    assert faults == []


def test_no_screen_is_named_like_a_test_file() -> None:
    """syrupy considers `test_state.txt` an unused snapshot of `test_state.py`, and fails a run of that file."""
    here = Path(__file__).parent
    screens = {each.stem for each in (here / "__snapshots__").rglob("*.txt")}
    assert screens and not screens & {each.stem for each in here.glob("*.py")}
