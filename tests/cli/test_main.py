"""The entry of every command: global options, and Ctrl-C while Python still imports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from broker import __version__
from broker.cli import other_words
from broker.cli.commands import COMMANDS
from broker.cli.main import WITH_OTHER_WORDS, app, main

ROOT = Path(__file__).parent.parent.parent

# Loaded by Python at its start: simulates Ctrl-C when the module in the variable is looked up.
INTERRUPT_AT_IMPORT = """\
import os, signal, sys

class Interrupter:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPT_AT"]:
            os.kill(os.getpid(), signal.SIGINT)
        return None

signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background inherits an ignored one
sys.meta_path.insert(0, Interrupter())
"""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "broker", *arguments],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environment}, timeout=300,
    )  # fmt: skip


def test_version_is_printed_without_a_command() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{__version__}\n", "")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_characters_that_a_terminal_lacks_are_escaped(encoding: str, tmp_path: Path) -> None:
    environment = {"PYTHONIOENCODING": encoding, "BROKER_HOME": str(tmp_path), "BROKER_OFFLINE": "1"}
    command = ["launch", "--infra", "local", "-c", "dev", "--yes", "--", "printf", "\\xe2\\x96\\x88 100%%"]
    try:
        done = run(*command, **environment)
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith("\n\\u2588 100%\n")
    finally:
        run("down", "dev", **environment)


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_command_with_a_closed_output_runs(closed: str, tmp_path: Path) -> None:
    command = f'"{sys.executable}" -m broker gpus H100:8 {closed}'
    environment = {**os.environ, "BROKER_HOME": str(tmp_path), "BROKER_OFFLINE": "1"}
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr and "error" not in done.stderr


def test_command_with_a_closed_input_does_not_ask(tmp_path: Path) -> None:
    environment = {"BROKER_HOME": str(tmp_path), "BROKER_OFFLINE": "1"}
    assert run("launch", "--infra", "local", "-c", "dev", "--yes", "--", "true", **environment).returncode == 0
    command = f'"{sys.executable}" -m broker down dev <&-'
    done = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environment}, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("module", ["broker.cli.main", "typer", "broker.cli.plan", "broker.task.loader"])
def test_ctrl_c_during_imports_leaves_without_a_traceback(module: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPT_AT_IMPORT)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = run("plan", "--gpus", "H100:8", PYTHONPATH=path, INTERRUPT_AT=module, BROKER_HOME=str(tmp_path))
    assert done.returncode == 130, done.stderr
    assert done.stderr == "\ninterrupted\n"


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["storage", "ls"], "No such command 'storage': write buckets to `file_mounts`"),
        (["launch", "--cloud", "gcp", "x.yaml"], "No such option: --cloud: use `--infra CLOUD`"),
        (["jobs", "launch", "--region", "x"], "No such option: --region: use `--infra CLOUD/REGION`"),
        (["gpus", "--region", "us-east-1"], "No such option: --region: use `--cloud CLOUD --all-regions`"),
        (["gpus", "list"], "No such command 'gpus list': use `broker gpus`"),
        (["jobs", "pool", "apply", "x.yaml"], "No such command 'jobs pool': worker pools are not supported"),
        (["exec", "-c", "dev", "x.yaml"], "No such option: -c: write the cluster first: `broker exec CLUSTER"),
        (["exec", "dev", "x.yaml", "--region", "x"], "No such option: --region: the cluster's machines are used"),
        (["jobs", "launch", "-c", "x", "x.yaml"], "No such option: -c: use `--name`"),
        (["logs", "dev", "--tail", "10"], "No such option: --tail: use `--no-follow`, and `tail` of your shell"),
        (["status", "--ip", "dev"], "No such option: --ip: use `broker status CLUSTER --json`"),
        (["jobs", "queue", "--limit", "5"], "No such option: --limit: use `--json`, and select with `jq`"),
        (["down", "dev", "--async"], "No such option: --async: omit it: the command waits for the result"),
        (["down", "-p", "dev"], "No such option: -p: use `broker gc`"),
        (["queue"], "Missing argument 'CLUSTER': name one cluster; `broker status` lists them"),
        (["queue", "a", "b"], "Got unexpected extra argument(s) (b): name one cluster; `broker status` lists them"),
        (["check", "aws", "gcp"], "(gcp): name one cloud, or none to check all"),
        (["jobs", "logs"], "Missing argument 'JOB': name one job; `broker jobs queue` lists them"),
        (["lanch"], "No such command 'lanch'. Did you mean 'launch', 'plan'?"),
        (["launch", "--gpu", "x"], "No such option: --gpu (Possible options: --cpus, --gpus)"),
    ],
)
def test_word_of_another_program_has_a_hint(
    arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main(arguments)
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (["prices", "x", "--region", "y"], "--infra"),
        (["down", "x", "--async"], "-d"),
        (["catalog", "update", "--zone", "x"], "--infra"),
    ],
)
def test_hint_names_no_option_that_the_command_lacks(
    arguments: list[str], flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main(arguments)
    told = capsys.readouterr().err
    assert "No such option: " in told and f"use `{flag}" not in told


def test_words_of_other_programs_are_not_broker_s_own() -> None:
    assert not {*other_words.COMMANDS} & {*COMMANDS}


@pytest.mark.parametrize("words", other_words.FLAGS_OF)
def test_hint_about_a_flag_is_for_a_command_without_it(words: str) -> None:
    command: Any = typer.main.get_command(app)
    for word in words.split():
        command = command.get_command(None, word)
    own = {flag for each in command.params for flag in (*each.opts, *each.secondary_opts)}
    assert not own & {*other_words.FLAGS_OF[words]}


def test_other_word_after_a_command_is_looked_up() -> None:
    assert {each.split()[0] for each in other_words.COMMANDS if " " in each} == {*WITH_OTHER_WORDS}


@pytest.mark.parametrize(
    "arguments",
    [
        ("server", "limits", "set", "--user", "ada", "--usd-per-month", "nan"),
        ("check", "aws", "--live", "--spend", "NaN"),
        ("advise", "--params", "7B", "--tokens", "1B", "--budget", "nan"),
    ],
)
def test_a_limit_that_nothing_exceeds_is_refused(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """No amount is larger than NaN: a budget of it would be no budget."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert f"'{arguments[-2]}': nan is not a number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lease", "words"),
    [
        ("inf", "inf is not a finite number"),
        ("-inf", "is not in the range"),
        ("nan", "nan is not a number"),
        ("-1", "is not in the range"),
        ("0", "is not in the range"),
    ],
)
def test_lease_of_a_map_is_a_finite_number_of_seconds(
    lease: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With an infinite one, the shard of a lost worker would never be given to another."""
    with pytest.raises(SystemExit) as ended:
        main(("map", "task.yaml", "--input", "in", "--output", "out", f"--lease={lease}"))
    message = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert ended.value.code == 2 and "--lease" in message and words in message
