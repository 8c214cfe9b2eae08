"""On a terminal, one module draws colour, bars and views. In a pipe, under NO_COLOR and with TERM=dumb: plain lines."""

from __future__ import annotations

import ast
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from broker.cli import terminal
from broker.cli.render import print_error, print_table

ROOT = Path(__file__).parent.parent.parent
ESCAPE = "\x1b["
COLUMNS = 80


def run(code: str, *, is_terminal: bool, **environment: str) -> str:
    """Run a program of these lines; return stdout and stderr together."""
    given = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM", "COLUMNS")}
    given |= {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT), **environment}
    argv = [sys.executable, "-c", code]
    if not is_terminal:
        done = subprocess.run(argv, capture_output=True, text=True, env=given, timeout=300)
        return done.stdout + done.stderr
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    with subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, env=given) as process:
        os.close(theirs)
        told = b""
        while True:
            try:
                chunk = os.read(ours, 65536)
            except OSError:  # Linux: the other end is closed
                break
            if not chunk:
                break
            told += chunk
        assert process.wait(timeout=300) == 0, told
    os.close(ours)
    return told.decode().replace("\r\n", "\n")


TABLE = """
from broker.cli.render import print_table
print_table(["NAME", "STATUS"], [["UP", "RUNNING"], ["b", "FAILED"]])
"""
BAR = """
import sys
from broker.cli.terminal import show_progress, show_wait
from broker.cli.render import print_line, print_note
with show_progress("sending", total=8) as bar:
    for _ in range(8):
        bar.advance()
    print_note("a note meanwhile")
    print_line("data")
with show_wait("looking") as bar:
    bar.describe("still looking")
print("RICH", "rich" in sys.modules)
"""
VIEW = """
from broker.cli.terminal import show_view
with show_view() as view:
    if view is None:
        print("no view")
    else:
        view.show(["first"])
        view.show(["second", "x" * 200])
"""


def test_table_has_colour_on_a_terminal_and_states_alone_have_their_own() -> None:
    head, running, failed = run(TABLE, is_terminal=True).splitlines()
    assert head.startswith("\x1b[1m")
    assert running == f"UP    {terminal.GOOD}RUNNING{terminal.RESET}", "a job that is called UP is not a state"
    assert terminal.BAD in failed


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=["NO_COLOR", "dumb"])
def test_terminal_set_to_plain_text_gets_it(environment: dict[str, str]) -> None:
    for code in (TABLE, BAR, VIEW):
        told, piped = run(code, is_terminal=True, **environment), run(code, is_terminal=False)
        assert sorted(told.splitlines()) == sorted(piped.splitlines()) and "\x1b" not in told


def test_pipe_gets_quarters_without_importing_rich() -> None:
    told = run(BAR, is_terminal=False)
    assert [line for line in told.splitlines() if line.startswith("sending")] == [
        "sending: 25%", "sending: 50%", "sending: 75%", "sending: 100%"
    ]  # fmt: skip
    assert "looking ..." in told and "RICH False" in told


def test_bar_is_drawn_on_a_terminal_without_breaking_lines_above_it() -> None:
    told = run(BAR, is_terminal=True)
    assert "RICH True" in told and ESCAPE in told and "8/8" in told
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", told).replace("\r", "\n").splitlines()
    assert "a note meanwhile" in [line.rstrip() for line in plain] and "data" in [line.rstrip() for line in plain]


def test_view_is_drawn_over_and_cut_to_the_screen() -> None:
    told = run(VIEW, is_terminal=True)
    assert "first" in told and "second" in told
    assert "x" * 100 not in told, "a line is cut, not wrapped"
    assert run(VIEW, is_terminal=False) == "no view\n"


def test_plan_on_a_terminal_is_coloured_without_rich() -> None:
    code = (
        "import sys\nfrom broker.cli.main import main\n"
        "try: main(['plan', '--gpus', 'H100:8'])\nexcept SystemExit: pass\nprint('RICH', 'rich' in sys.modules)"
    )
    told = run(code, is_terminal=True)
    assert "\x1b[1m" in told and "RICH False" in told


@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}], ids=["colour", "NO_COLOR"])
def test_ctrl_c_on_the_keyboard_ends_a_live_view_without_a_traceback(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """The terminal itself turns the key into a signal to its foreground process group."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        pytest.skip("a background job of a shell ignores the signal, and so do all processes that it starts")
    given = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
    given |= {"TERM": "xterm-256color", "BROKER_HOME": str(tmp_path), "PYTHONPATH": str(ROOT), **environment}
    code = "import os, sys, pty; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    argv = [sys.executable, "-c", code, sys.executable, "-m", "broker", "jobs", "queue", "--watch"]
    told = b""
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=given) as process:
        assert process.stdin is not None and process.stdout is not None
        while b"broker jobs launch" not in told:
            chunk = os.read(process.stdout.fileno(), 65536)
            assert chunk, told
            told += chunk
        process.stdin.write(b"\x03")
        process.stdin.flush()
        rest, _ = process.communicate(timeout=300)
    told += rest
    assert process.returncode in (0, 130) and b"Traceback" not in told
    assert (b"\x1b" in told) is not bool(environment)


def test_rich_is_used_in_one_place() -> None:
    users = {
        path.name
        for path in (ROOT / "broker").rglob("*.py")
        if re.search(r"^\s*(from|import) rich", path.read_text(), re.M)
    }
    assert users == {"terminal.py"}


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("launch", {"show_progress", "show_wait"}),  # uploads, and the search for machines
        ("lifecycle", {"show_wait"}),
        ("simulate", {"show_progress"}),
        ("catalog", {"show_wait"}),
        ("rehearse", {"show_wait"}),
        ("jobs_queue", {"show_view"}),
        ("jobs_watch", {"show_view"}),
        ("serve_top", {"show_view"}),
        ("map", {"show_progress"}),
        ("sweep", {"show_progress"}),
    ],
)
def test_command_that_takes_long_shows_its_progress(command: str, shown: set[str]) -> None:
    tree = ast.parse((ROOT / f"broker/cli/{command}.py").read_text())
    functions = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    called = {each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in functions}
    assert called & {"show_progress", "show_wait", "show_view"} == shown


def test_upload_is_shown_in_bytes_on_a_terminal() -> None:
    code = (
        "from broker.cli.launch import show_upload\n"
        "with show_upload('s3://bucket/key') as tell:\n    tell(500_000, 2_000_000)\n    tell(2_000_000, 2_000_000)"
    )
    told = run(code, is_terminal=True)
    assert "uploading to s3://bucket/key" in told and "MB" in told
    assert run(code, is_terminal=False).splitlines()[-1] == "uploading to s3://bucket/key: 100%"


def test_errors_are_plain_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    from broker.errors import UsageError

    print_table(["STATUS"], [["UP"]])
    print_error(UsageError("it is so", hints=["do that"]))
    out, err = capsys.readouterr()
    assert out == "STATUS\nUP\n" and err == "error: it is so\n\nhint: do that\n"
