"""Restart a server whenever it fails: `python3 -I -S host_supervisor.py FOLDER`; standard library only.

It also holds the helpers of `host_program.py`, which is sent after this file. Python 3.8 and later, Linux.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from typing import Any, Callable

REPLACED = "state/server/replaced"  # written by a server that another one has replaced
RESTART_S_MAX = 30.0
PAUSE_S = 0.1
OUTPUT = 1  # the descriptor of stdout
LOG = "server.log"
LOG_BYTES_MAX = 16 << 20  # then it becomes `server.log.1`, which replaces the one before
LOG_CHECK_S = 60.0


def supervise(folder: str) -> None:
    """Restart the server whenever it fails, until SIGTERM, or until it reports that another one has replaced it."""
    lock = os.open(os.path.join(folder, "supervisor.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    write_text(os.path.join(folder, "supervisor.pid"), str(os.getpid()))
    threading.Thread(target=keep_log_small, args=(folder,), daemon=True).start()
    wait_s, stopping = 1.0, []
    while True:
        release = os.path.realpath(os.path.join(folder, "current"))
        arguments = json.loads(read_text(os.path.join(folder, "start.json")))
        begin_s = time.monotonic()
        python = read_text(os.path.join(release, "python.path"))
        child = subprocess.Popen(
            [python, "-m", "broker", "server", "start", *arguments], cwd=folder, stdin=subprocess.DEVNULL,
            env=make_environment(folder, os.path.join(folder, "current")),
        )  # fmt: skip

        def pass_on(number: int, frame: object, child: subprocess.Popen[bytes] = child) -> None:
            stopping.append(number)  # `wait` must not be called here: the main thread is in it
            child.terminate()

        signal.signal(signal.SIGTERM, pass_on)
        code = child.wait()
        is_over = code == 0 or os.path.exists(os.path.join(folder, REPLACED))
        wait_s = 1.0 if time.monotonic() - begin_s > RESTART_S_MAX else min(RESTART_S_MAX, 2 * wait_s)
        restart_s = time.monotonic() + wait_s
        while not is_over and not stopping and time.monotonic() < restart_s:
            time.sleep(PAUSE_S)  # short, because a signal does not interrupt a sleep (PEP 475)
        if is_over or stopping:
            write_text(os.path.join(folder, "given-up"), str(code))
            return


def keep_log_small(folder: str) -> None:
    """Rotate the log for as long as this process lives."""
    pause = threading.Event()
    while not pause.wait(LOG_CHECK_S):
        try:
            rotate_log(folder, OUTPUT)
        except OSError:
            pass  # a full disk: the next check tries again


def rotate_log(folder: str, output: int, bytes_max: int = LOG_BYTES_MAX) -> bool:
    """Copy a log that has grown too large, then empty it; return whether it was. Raises OSError.

    The server and its daemon have the file open, in append mode: they continue at its new end. `output` is a descriptor
    of it, as systemd may have made the file as root. Lines written between the copy and the cut are lost.
    """
    path = os.path.join(folder, LOG)
    found = os.stat(path)
    if found.st_size <= bytes_max or not os.path.samestat(found, os.fstat(output)):
        return False
    aside = path + ".new"
    try:
        shutil.copyfile(path, aside)
        os.chmod(aside, 0o600)
        os.replace(aside, path + ".1")
    except OSError:
        forget(aside)  # a part of it, on a full disk
        raise
    os.ftruncate(output, 0)
    return True


def find_supervisor(folder: str) -> list[int]:
    """Return the PID of the supervisor; empty if it was killed, after which nothing restarts the server."""
    pid = read_text(os.path.join(folder, "supervisor.pid"))
    return [int(pid)] if pid and is_supervisor(int(pid), folder) else []


def is_supervisor(pid: int, folder: str) -> bool:
    """Return whether the process is the supervisor of this folder."""
    return folder.encode() in read_bytes("/proc/%d/cmdline" % pid).split(b"\0")


def make_environment(folder: str, release: str) -> dict[str, Any]:
    """Return the environment of the server, with its state folder and the release to run."""
    own = {"BROKER_HOME": os.path.join(folder, "state"), "PYTHONPATH": release, "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **own}


def write_command(folder: str) -> None:
    """Write the command `broker` of the current release, for the administrator of this machine.

    `-P`: a folder named `broker` in the working directory is not imported.
    """
    current = os.path.join(folder, "current")
    own = make_environment(folder, current)
    words = " ".join("%s=%s" % (name, shlex.quote(own[name])) for name in ("BROKER_HOME", "PYTHONPATH"))
    python = shlex.quote(os.path.join(current, "python.path"))
    path = os.path.join(folder, "broker")
    write_text(path, '#!/bin/sh\nexport %s\nexec "$(cat %s)" -P -m broker "$@"\n' % (words, python))
    os.chmod(path, 0o700)


def last_line(text: str) -> str:
    """Return the last line that begins with `error:`, else the last line that is not empty."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if line.startswith("error:")), lines[-1] if lines else "no output")


def read_bytes(path: str) -> bytes:
    """Return a file's content; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def read_text(path: str) -> str:
    """Return a file's text without surrounding whitespace; empty if it cannot be read."""
    return read_bytes(path).decode("utf-8", "replace").strip()


def read_json(path: str) -> dict[str, Any]:
    """Return the JSON object in a file; empty if the file is missing or holds none."""
    try:
        found = json.loads(read_bytes(path) or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def write_text(path: str, text: str) -> None:
    """Replace a file, mode 0600, atomically."""
    aside = "%s.new-%d" % (path, os.getpid())
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    os.replace(aside, path)


def write_bytes(path: str, content: bytes) -> None:
    """Write a new file, mode 0600, with its folders."""
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)


def copy_over(source: str, target: str) -> None:
    """Copy a file, replacing another one, or a folder to a place where there is none."""
    if os.path.isdir(source):
        shutil.copytree(source, target)
    else:
        os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
        shutil.copy2(source, target)


def sync_tree(folder: str) -> None:
    """Flush a folder with all its files to the disk; links are not followed."""
    for root, _, names in os.walk(folder):
        for path in (os.path.join(root, name) for name in names):
            if not os.path.islink(path):
                sync(path)
        sync(root)


def sync(path: str) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: str, value: object) -> None:
    """Replace a file with JSON, atomically."""
    write_text(path, json.dumps(value))


def add_setting(path: str, line: str, *, is_replacing: bool, before: Callable[[], object]) -> None:
    """Add a line `NAME = VALUE`, if any, to a TOML file, before its tables; call `before` first unless it is there.

    The other lines are the operator's and stay. A line with this name stays, too, unless `is_replacing`.
    """
    name = line.partition("=")[0].strip()
    lines = read_text(path).splitlines()
    others = [each for each in lines if each.partition("=")[0].strip() != name]
    if name and (is_replacing or len(others) == len(lines)):
        before()
        write_text(path, "".join("%s\n" % each for each in (line.strip(), *others)))


def read_schema(database: str) -> int:
    """Return the version of a state file's schema; 0 if it is unknown."""
    if not os.path.exists(database):
        return 0
    try:
        import sqlite3  # absent from the minimal Python of some systems
    except ImportError:
        return 0
    try:
        connection = sqlite3.connect(database)
        try:
            return int(connection.execute("PRAGMA user_version").fetchone()[0])
        finally:
            connection.close()
    except sqlite3.Error:  # the server reports what is wrong with the file
        return 0


def write_missing(state: str, files: dict[str, str]) -> None:
    """Write the files that do not exist yet."""
    for name, text in files.items():
        if not os.path.exists(os.path.join(state, name)):
            write_text(os.path.join(state, name), text)


def forget(path: str) -> None:
    """Delete a file; already gone is success."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def forget_releases(folder: str, kept: tuple[str, ...]) -> None:
    """Delete all releases but the `kept` ones: the current one and its predecessor."""
    root = os.path.join(folder, "releases")
    for name in os.listdir(root):
        if name not in kept:
            shutil.rmtree(os.path.join(root, name), ignore_errors=True)


def make_unit(folder: str, argv: list[str]) -> str:
    """Make the systemd unit. `KillMode=process`: the daemon outlives a restart of the server.

    Words are quoted as described in systemd.syntax(7) and systemd.service(5): `%` and `$` would be expanded.
    """
    import getpass

    folder = folder.replace("%", "%%")
    escaped = (each.replace("\\", "\\\\").replace('"', '\\"') for each in argv)
    command = " ".join('"%s"' % each.replace("%", "%%").replace("$", "$$") for each in escaped)
    return (
        "[Unit]\nDescription=broker server\nAfter=network-online.target\nWants=network-online.target\n\n"
        "[Service]\nUser=%s\nWorkingDirectory=%s\nExecStart=%s\nRestart=on-failure\nRestartSec=2\n"
        "StandardOutput=append:%s/server.log\nStandardError=inherit\n"
        "KillMode=process\nNoNewPrivileges=true\n\n[Install]\nWantedBy=multi-user.target\n"
    ) % (getpass.getuser(), folder, command, folder)


if __name__ == "__main__" and len(sys.argv) == 2 and os.path.isabs(sys.argv[1]):
    supervise(sys.argv[1])
