"""Every `broker` command in the documentation exists with its flags, and the marked ones run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from broker.cli.commands import HIDDEN
from broker.cli.main import app
from tests.docs.pages import CHANGELOG, ROOT, Block, list_block_commands, list_blocks, list_commands, list_pages

PAGES = [page for page in list_pages() if page != CHANGELOG]  # the changelog also mentions former commands


COMPLETION = ("--install-completion", "--show-completion")


@pytest.fixture(scope="module")
def root() -> Any:
    return typer.main.get_command(app)


def find_problem(words: tuple[str, ...], root: Any) -> str:
    """Parse as the command line does, running nothing; return an empty text if it is accepted."""
    command = root
    if words and words[0] in COMPLETION:  # it acts while it is parsed, on the files of the user who runs the tests
        return "" if words[0] in {flag for param in command.params for flag in param.opts} else "no such option"
    context, arguments = None, list(words)
    try:
        while True:
            name = words[0] if context else "broker"
            context = command.make_context(name, list(arguments), parent=context)
            if not hasattr(command, "list_commands"):
                return ""
            arguments = [*context._protected_args, *context.args]
            if not arguments:
                return ""
            word = arguments.pop(0)
            if word.isupper() or word in HIDDEN:  # a placeholder for a command
                return ""
            command = command.get_command(context, word)
            if command is None:
                return f"no command `{word}`"
            if not arguments:  # `broker jobs logs` in a sentence names the command; its arguments are not the point
                return ""
    except SystemExit:
        return ""
    except Exception as error:
        if getattr(error, "exit_code", None) == 0:  # --help and --version print and exit, each in its own way
            return ""
        return getattr(error, "message", "") or str(error)


def test_unknown_commands_and_flags_are_reported(root: Any) -> None:
    assert find_problem(("plan", "task.yaml"), root) == ""
    assert find_problem(("jobs", "launch", "task.yaml", "--detach-run"), root) == ""
    assert find_problem(("jobs", "--help"), root) == ""
    assert find_problem(("--install-completion",), root) == ""
    assert "No such option" in find_problem(("jobs", "launch", "task.yaml", "--detached"), root)
    assert "no command" in find_problem(("jobs", "start", "x"), root)
    assert find_problem(("gpus", "--limit", "many"), root) != ""


def test_every_command_of_the_docs_is_accepted_by_the_command_line(root: Any) -> None:
    commands = [command for page in PAGES for command in list_commands(page)]
    assert len(commands) > 100
    refused = [f"{command}: {problem}" for command in commands if (problem := find_problem(command.words, root))]
    assert not refused, "\n".join(refused)


def list_marked() -> list[Block]:
    return [block for page in PAGES for block in list_blocks(page) if block.is_run]


def run_broker(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run at the top of the repository, without a login, with all state below `folder`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "GOOGLE_", "CLOUDSDK_"))}
    logins = ("CLOUDSDK_CONFIG", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "BROKER_SKY_PYTHON")
    nowhere = dict.fromkeys(logins, str(folder / "no-login"))
    environment = {**kept, **nowhere, "BROKER_HOME": str(folder / "home"), "TMPDIR": str(folder)}
    return subprocess.run(
        [sys.executable, "-m", "broker", *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )


@pytest.mark.slow
@pytest.mark.parametrize("block", list_marked(), ids=lambda block: f"{block.page.name}:{block.line}")
def test_marked_commands_run(block: Block, tmp_path: Path) -> None:
    """They run one after the other, as a reader would type them."""
    try:
        for command in list_block_commands(block):
            done = run_broker(tmp_path, *command.words)
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    finally:
        run_broker(tmp_path, "down", "--all", "--yes")
