"""Discovery and signalling of the processes of one torture run, and of no other process of this machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

KINDS = ("daemon", "keeper", "machine", "watcher", "runner", "witness", "trainer", "program", "command")


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process.

    `node` is the folder name of the local node or the test-bed's host it runs on, where it runs on one.
    """

    pid: int
    kind: str
    node: str
    command: str


def list_processes(mark: str) -> list[Process]:
    """List processes whose state folder or node is below `mark`, found by their environment, which children inherit."""
    return [found for entry in Path("/proc").glob("[0-9]*") if (found := read_process(int(entry.name), mark))]


def read_process(pid: int, mark: str) -> Process | None:
    """Read a process; return None for one that is gone, a zombie, or not ours."""
    if pid == os.getpid():
        return None
    try:
        entry = Path(f"/proc/{pid}")
        command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        variables = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    if not command or not any(
        each.startswith((f"BROKER_HOME={mark}", f"BROKER_NODE_DIR={mark}")) for each in variables
    ):
        return None
    node = next((each.partition("=")[2] for each in variables if each.startswith("BROKER_NODE_DIR=")), "")
    return Process(pid=pid, kind=name_kind(pid, command), node=Path(node).name, command=command)


def name_kind(pid: int, command: str) -> str:
    """Return its role. Keeper and machine are one program: the machine's parent is the keeper."""
    if "local_machine.py" in command:
        return "machine" if "local_machine.py" in read_command(read_parent(pid)) else "keeper"
    signs = {
        "agent.py _watch": "watcher",
        "agent.py _run": "runner",
        "witness.py": "witness",
        "trainers.lm": "trainer",
        "broker daemon": "daemon",
        "-m broker ": "command",
    }
    return next((kind for sign, kind in signs.items() if sign in command), "program")


def read_command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def read_parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def send_signal(process: Process, number: int, read: Callable[[int], Process | None]) -> bool:
    """Send a signal and return whether it was delivered.

    A descriptor pins the process, so a reused id is never signalled. `read` returns the process with an id, None for
    one that is not ours.
    """
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        found = read(process.pid)
        if found is None or found.kind != process.kind:
            return False
        signal.pidfd_send_signal(descriptor, number)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
