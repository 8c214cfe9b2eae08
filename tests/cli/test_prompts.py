"""A question ends the command with the documented exit codes: Ctrl-C, Ctrl-D, `n`, and an input without an answer."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from broker.cli import options
from broker.errors import UsageError

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    ("answer", "code", "told"),
    [(b"n\n", 1, "Aborted!"), (b"\x04", 1, "Aborted!"), (None, 130, "interrupted"), (b"y\n", 0, "")],
)
def test_answer_on_a_terminal_has_its_exit_code(answer: bytes | None, code: int, told: str, tmp_path: Path) -> None:
    """`answer` is None for Ctrl-C."""
    command = [sys.executable, "-m", "broker", "state", "reset"]
    environment = {**os.environ, "BROKER_HOME": str(tmp_path), "BROKER_OFFLINE": "1", "TERM": "dumb"}
    subprocess.run([*command[:3], "status"], env=environment, cwd=ROOT, timeout=300, check=True, capture_output=True)
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command,
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a suite in the background ignores it
    ) as process:
        assert process.stderr is not None
        question = b""
        while not question.endswith(b"[y/N]:"):
            read = process.stderr.read(1)
            assert read, question
            question += read
        if answer is None:
            process.send_signal(signal.SIGINT)
        else:
            os.write(ours, answer)
        _, errors = process.communicate(timeout=300)
    os.close(ours)
    os.close(theirs)
    assert (process.returncode, errors.decode().strip()) == (code, told)


def test_price_in_a_script_without_an_answer_names_the_option_that_confirms(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path(os.devnull).open() as ended:
        monkeypatch.setattr("sys.stdin", ended)
        with pytest.raises(UsageError, match="no answer") as caught:
            options.ask("Start at 5.00 USD/h?")
    assert caught.value.hints == ("confirm with `--yes`",)


def test_price_in_a_script_is_agreed_to_by_its_input(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "yes").write_text("y\nn\n")
    with (tmp_path / "yes").open() as answers:
        monkeypatch.setattr("sys.stdin", answers)
        options.ask("Start at 5.00 USD/h?")
        with pytest.raises(typer.Abort):
            options.ask("Start at 5.00 USD/h?")
