"""Facts of the README and the task files of the docs hold."""

from __future__ import annotations

import re
import tomllib

import pytest
import yaml

from broker.cli.commands import COMMANDS, HIDDEN
from broker.errors import BrokerError
from broker.task.loader import load_tasks_text
from tests.docs.pages import INLINE, ROOT, Block, list_blocks, list_pages

README = (ROOT / "README.md").read_text()


def read_table(heading: str) -> list[list[str]]:
    """Read the cells of the first table after a heading, without its head."""
    lines = README.partition(f"{heading}\n")[2].partition("\n## ")[0].splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def list_errors(base: type[BrokerError] = BrokerError) -> list[type[BrokerError]]:
    return [base, *(each for child in base.__subclasses__() for each in list_errors(child))]


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 165


def test_every_exit_code_of_an_error_has_its_row() -> None:
    rows = {int(code) for code, _ in read_table("## Exit codes")}
    assert {error.exit_code for error in list_errors()} <= rows
    assert {0, 130} <= rows


def test_extras_of_the_table_are_those_of_the_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {name for cell, _ in read_table("## Install") for name in INLINE.findall(cell)}
    assert named <= set(extras)
    assert {"aws", "gcp", "sky", "storage", "train", "serve", "server", "oidc", "all"} == named


def test_tour_names_every_command() -> None:
    hidden = {*HIDDEN, "schema"}
    words = set(re.findall(r"[\w-]+", " ".join(INLINE.findall(README)) + README.partition("## Tour")[2]))
    assert set(COMMANDS) - hidden <= words


def list_tasks() -> list[Block]:
    """List the blocks that are whole task files."""
    found = []
    for page in list_pages():
        for block in list_blocks(page):
            if block.language in ("", "yaml") and re.search(r"^(run|setup): ", block.text, re.MULTILINE):
                found.append(block)
    return found


@pytest.mark.parametrize("block", list_tasks(), ids=lambda block: f"{block.page.name}:{block.line}")
def test_task_of_the_docs_loads(block: Block) -> None:
    assert list(yaml.safe_load_all(block.text))
    assert load_tasks_text(block.text, str(block.page))
