"""A program in a terminal of its own, whose user types from another thread."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from broker.app.consoles import WAITING_BYTES_MAX, Console, ScreenSize


def run(
    script: str, *, console: Console | None = None, on_text: Callable[[Console, str], None] = lambda console, text: None
) -> tuple[int, str]:
    """Run a script of the shell; `on_text` is called with all output so far, and may type."""
    console = console or Console()
    seen = bytearray()

    def note(data: bytes) -> None:
        seen.extend(data)
        on_text(console, seen.decode(errors="replace"))

    code = console.run(["sh", "-c", script], env={}, folder="/", size=ScreenSize(rows=30, columns=99), on_output=note)
    return code, seen.decode(errors="replace")


def when(marker: str, act: Callable[[Console], object]) -> Callable[[Console, str], None]:
    """Act once, as soon as the output has the marker."""
    done: list[str] = []

    def look(console: Console, text: str) -> None:
        if marker in text and not done:
            done.append(text)
            act(console)

    return look


def test_program_has_a_terminal_of_the_size_reads_input_and_its_exit_code_counts() -> None:
    console = Console()
    assert console.put(b"hello\n", None)
    code, text = run('stty size; read line; echo "<$line>"; exit 7', console=console)
    assert code == 7 and "30 99" in text and "<hello>" in text


def test_first_output_is_empty_so_that_the_user_may_begin_to_type() -> None:
    def type_at_once(console: Console, text: str) -> None:
        if not text:
            console.put(b"go\n", None)

    assert "<go>" in run('read line; echo "<$line>"', on_text=type_at_once)[1]


def test_change_of_the_size_and_ctrl_c_reach_the_program() -> None:
    trap = 'trap "stty size; exit 9" WINCH; trap "exit 3" INT; echo ready; read line; wait; sleep 1000 & wait'
    resize = when("ready", lambda console: console.put(b"\n", ScreenSize(rows=50, columns=132)))
    code, text = run(trap, on_text=resize)
    assert code == 9 and "50 132" in text
    assert run(trap, on_text=when("ready", lambda console: console.put(b"\x03", None)))[0] == 3


def test_ctrl_c_reaches_the_program_of_a_server_that_ignores_it() -> None:
    """As one that a script starts with `&`."""
    ignored = {each: signal.signal(each, signal.SIG_IGN) for each in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)}
    try:
        ready = when("ready", lambda console: console.put(b"\x03\n\n", None))
        assert run("echo ready; read line; read line; exit 4", on_text=ready)[0] == 130
    finally:
        for each, handler in ignored.items():
            signal.signal(each, handler)


def test_program_ends_when_its_user_has_left() -> None:
    code, _ = run("echo ready; sleep 1000 & wait", on_text=when("ready", Console.close))
    assert code == 129
    console = Console()
    console.close()
    assert run("sleep 1000", console=console)[0] == 129, "who left before it began"


def test_program_that_ignores_the_loss_of_its_terminal_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.app.consoles.HANGUP_S", 0.05)
    code, _ = run('trap "" HUP; echo ready; sleep 1000 & wait', on_text=when("ready", Console.close))
    assert code == 137


def test_end_of_the_program_ends_the_terminal_although_a_child_has_it_open() -> None:
    code, text = run('trap "" HUP; sleep 1000 & echo child $!; exit 4')
    os.kill(int(text.split()[-1]), signal.SIGKILL)  # raises if it has ended
    assert code == 4


def test_large_output_and_input_pass_unchanged() -> None:
    console = Console()
    lines = b"".join(b"%07d\n" % number for number in range(20_000))
    assert console.put(lines, None) and not console.put(b"x" * WAITING_BYTES_MAX, None), "input is limited"
    code, text = run("stty -echo -onlcr; echo begin; head -n 20000", console=console)
    assert code == 0 and text.partition("begin\n")[2].encode() == lines
