"""Carry out one request on a server's machine: run by `python3 -I -S`, with the standard library only.

    FOLDER/owner               the installation that set up the server; requests of another one are refused
    FOLDER/releases/DIGEST/    unpacked wheels of broker; `current` links to the one in use
    FOLDER/broker              the command `broker` of that release, on the server's state
    FOLDER/server.log          output of the server and its supervisor; `server.log.1` is the part before it
    FOLDER/python/             an environment with the packages that broker needs, unless an installed Python has them
    FOLDER/state/              BROKER_HOME of the server, mode 0700

Every verb may be repeated: one that was interrupted is completed by the next call. Python 3.8 and later, Linux.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from typing import TYPE_CHECKING, Any, Callable

if TYPE_CHECKING:  # sent ahead of this file, into the same namespace
    from broker.hosting.host_supervisor import (
        add_setting,
        copy_over,
        find_supervisor,
        forget,
        forget_releases,
        is_supervisor,
        last_line,
        make_environment,
        make_unit,
        read_json,
        read_schema,
        read_text,
        sync,
        sync_tree,
        write_bytes,
        write_command,
        write_json,
        write_missing,
        write_text,
    )
    from broker.runtime.node_python import NoPythonError, find_broker_python

UNIT = "/etc/systemd/system/broker-server.service"
NAME = "broker-server.service"
STOP_S, KILL_S, READY_S = 20.0, 5.0, 120.0
POLL_S = 0.1
MARK = "moved-in"  # the word of a move: beside its state, and in `FOLDER` where an earlier version wrote it


class RequestError(Exception):
    """An error for the user: what happened, and the next step."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def main() -> None:
    """Carry out the request in the first line of stdin, and print the answer as JSON."""
    os.umask(0o077)
    request = json.loads(sys.stdin.buffer.readline())
    content = sys.stdin.buffer.read()
    folder = os.path.abspath(os.path.expanduser(request["folder"]))
    try:
        answer = {"answer": carry_out(request, folder, content)}
    except RequestError as error:
        answer = {"error": str(error), "hint": error.hint}
    except OSError as error:
        answer = {"error": "%s: %s" % (error.filename or folder, error.strerror or error), "hint": ""}
    print(json.dumps(answer))


def carry_out(request: dict[str, Any], folder: str, content: bytes) -> object:
    """Run one verb under the folder's lock. Raises RequestError if the folder belongs to another installation."""
    verb = request["verb"]
    if not os.path.isdir(folder):
        if verb in ("status", "stop", "remove"):
            return {"is_installed": False}
        os.makedirs(folder, mode=0o700)
    lock = os.open(os.path.join(folder, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    owner = read_text(os.path.join(folder, "owner"))
    if owner and owner != request["owner"]:
        raise RequestError(
            "%s on that machine holds the server of another installation (%s)" % (folder, owner),
            "choose another folder with `--folder`",
        )
    write_text(os.path.join(folder, "owner"), request["owner"])
    verbs: dict[str, Callable[[], object]] = {
        "install": lambda: install(folder, request, content),
        "start": lambda: start(folder, request),
        "status": lambda: read_status(folder),
        "stop": lambda: stop(folder),
        "adopt": lambda: adopt(folder, request, content),
        "remove": lambda: remove(folder, is_idle_only=bool(request.get("is_idle_only"))),
    }
    return verbs[verb]()


def install(folder: str, request: dict[str, Any], content: bytes) -> object:
    """Unpack the wheel, find or install a Python, and write the settings.

    Existing releases, keys, settings and state stay.
    """
    digest = request["digest"]
    release = os.path.join(folder, "releases", digest)
    if not os.path.isdir(release):
        if hashlib.sha256(content).hexdigest() != digest:
            raise RequestError("the wheel was damaged in transit", "repeat the command")
        aside = "%s.new-%d" % (release, os.getpid())
        shutil.rmtree(aside, ignore_errors=True)
        zipfile.ZipFile(io.BytesIO(content)).extractall(aside)
        os.rename(aside, release)
    state = os.path.join(folder, "state")
    os.makedirs(state, mode=0o700, exist_ok=True)
    write_missing(state, request.get("files", {}))
    python = find_python(folder, release, request)
    write_text(os.path.join(release, "python.path"), python)
    is_restored = bool(request.get("restore_from")) and not os.path.exists(os.path.join(state, "state.db"))
    if is_restored:  # before the settings: a file that exists is not restored, and the policy and logins are in it
        restore(folder, release, python, request["restore_from"])
    write_missing(state, request.get("settings", {}))
    add_setting(
        os.path.join(state, "config.toml"), request.get("config") or "", is_replacing=is_restored,
        before=lambda: stop(folder),
    )  # fmt: skip
    return {"python": python, "owner": read_text(os.path.join(state, "owner"))}


def restore(folder: str, release: str, python: str, url: str) -> None:
    """Restore the newest backup into the empty state folder."""
    done = subprocess.run(
        [python, "-m", "broker", "server", "restore", "--from", url, "--yes"], cwd=folder, capture_output=True,
        env=make_environment(folder, release), universal_newlines=True,
    )  # fmt: skip
    if done.returncode:
        raise RequestError("the backup cannot be restored: " + last_line(done.stderr), "check `--restore-from`")


def find_python(folder: str, release: str, request: dict[str, Any]) -> str:
    """Return a Python 3.11 or later with the packages: an installed one if possible, else a new environment."""
    try:
        return find_broker_python(
            os.path.join(folder, "python"), release, needs=request["needs"], packages=request["packages"],
            named=request.get("python") or "",
        )  # fmt: skip
    except NoPythonError as error:
        raise RequestError(str(error), error.hint) from error


def start(folder: str, request: dict[str, Any]) -> object:
    """Run this release; do nothing if it is already running and supervised.

    An earlier release is replaced. If this one does not start, the earlier one is restored, unless it cannot read the
    state any more.
    """
    database = os.path.join(folder, "state", "state.db")
    current = os.path.join(folder, "current")
    before = os.path.basename(os.path.realpath(current)) if os.path.islink(current) else ""
    write_json(os.path.join(folder, "start.json"), request["arguments"])
    found = read_status(folder)
    if before == request["digest"] and found["is_running"] and find_supervisor(folder):
        return found
    stop(folder)
    schema = read_schema(database)
    write_command(folder)
    switch(folder, request["digest"])
    try:
        run(folder)
    except RequestError as error:
        changed = read_schema(database)
        if before and schema not in (0, changed):  # it stays, and is restarted: the version before can only fail
            raise RequestError(
                "%s; it has migrated the state to schema %d, which the version before cannot read" % (error, changed),
                "%s; then repeat `broker server upgrade`, also with a later version. Jobs continue on their nodes, and "
                "the state before is the newest file in %s" % (error.hint, os.path.join(folder, "state", "backups")),
            ) from error
        if before and before != request["digest"]:
            stop(folder)
            switch(folder, before)
            try:
                run(folder)
            except RequestError as second:
                raise RequestError("%s; and the version before: %s" % (error, second), error.hint) from error
        raise
    forget_releases(folder, (before, request["digest"]))
    return read_status(folder)


def switch(folder: str, digest: str) -> None:
    """Point `current` to a release, atomically."""
    aside = os.path.join(folder, ".current")
    if os.path.islink(aside):
        os.unlink(aside)
    os.symlink(os.path.join("releases", digest), aside)
    os.replace(aside, os.path.join(folder, "current"))


def run(folder: str) -> None:
    """Start the supervisor, as a systemd unit if this user may create one; return once the server listens.

    Raises RequestError if it does not listen within READY_S.
    """
    program = os.path.join(folder, "current", "broker", "hosting", "host_supervisor.py")
    argv = [sys.executable, "-I", "-S", program, folder]
    forget(os.path.join(folder, "state", "server", "listening.json"))
    forget(os.path.join(folder, "given-up"))
    if can_use_systemd():
        write_as_root(UNIT, make_unit(folder, argv))
        for words in (("daemon-reload",), ("enable", "--now", NAME)):
            done = subprocess.run(
                as_root("systemctl", *words), check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            if done.returncode:
                reason = last_line(done.stdout.decode("utf-8", "replace"))
                raise RequestError("`systemctl %s` failed: %s" % (" ".join(words), reason), "see %s" % UNIT)
    else:
        with open(os.path.join(folder, "server.log"), "ab") as log:
            subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder, start_new_session=True)
    end_s = time.monotonic() + READY_S
    while not read_status(folder)["is_running"]:
        if time.monotonic() > end_s or (os.path.exists(os.path.join(folder, "given-up"))):
            raise RequestError(
                "the server did not start: " + last_line(read_text(os.path.join(folder, "server.log"))),
                "see server.log in %s on that machine" % folder,
            )
        time.sleep(POLL_S)


def read_status(folder: str) -> dict[str, Any]:
    """Return whether the server runs, since when, and its secrets.

    The recorded PID counts only if the process belongs to this folder: after a reboot another program may have it.
    """
    state = os.path.join(folder, "state", "server")
    listening = read_json(os.path.join(state, "listening.json"))
    pid = int(listening.get("pid", 0))
    is_running = bool(pid) and runs_for(pid, folder)
    return {
        "is_installed": os.path.islink(os.path.join(folder, "current")),
        "is_running": is_running,
        "state": os.path.join(folder, "state"),
        "owner": read_text(os.path.join(folder, "state", "owner")),
        "listening": listening,
        "uptime_s": time.time() - listening["started_s"] if is_running else None,
        "backup": read_json(os.path.join(state, "backup.json")),
        "now_s": time.time(),
        "token": read_text(os.path.join(state, "admin.token")),
        "key": read_text(os.path.join(folder, "state", "secret.key")),
        "is_systemd": os.path.exists(UNIT) and can_use_systemd(),
    }


def runs_for(pid: int, folder: str) -> bool:
    """Return whether a process has the server's state folder in its environment."""
    try:
        with open("/proc/%d/environ" % pid, "rb") as file:
            return ("BROKER_HOME=%s" % os.path.join(folder, "state")).encode() in file.read().split(b"\0")
    except OSError:
        return False


def stop(folder: str) -> object:
    """Stop the server, its supervisor and its daemon; jobs continue on their nodes."""
    if can_use_systemd() and os.path.exists(UNIT):
        subprocess.run(as_root("systemctl", "disable", "--now", NAME), check=False, stderr=subprocess.DEVNULL)
    pids = find_supervisor(folder)
    end(lambda: [pid for pid in pids if is_supervisor(pid, folder)])
    end(lambda: [int(name) for name in os.listdir("/proc") if name.isdigit() and runs_for(int(name), folder)])
    return {"is_installed": True}


def end(find: Callable[[], list[int]]) -> None:
    """Send SIGTERM to the processes that `find` lists, and SIGKILL to those that remain."""
    for number, wait_s in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, KILL_S)):
        found = find()
        for pid in found:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass
        end_s = time.monotonic() + wait_s
        while found and time.monotonic() < end_s:
            time.sleep(POLL_S)
            found = find()


def remove(folder: str, *, is_idle_only: bool = False) -> object:
    """Stop the server and delete all its files; already gone is success.

    `is_idle_only`: a server that has got work since the sender looked continues instead.
    """
    stop(folder)
    if is_idle_only and has_work(os.path.join(folder, "state", "state.db"), jobs="NOT is_terminal"):
        try:
            run(folder)
        except RequestError:
            pass  # its machine must not be terminated all the same
        return {"is_installed": True, "has_work": True}
    if can_use_systemd() and os.path.exists(UNIT):
        subprocess.run(as_root("rm", "-f", UNIT), check=False)
    shutil.rmtree(folder, ignore_errors=True)
    return {"is_installed": False}


def adopt(folder: str, request: dict[str, Any], content: bytes) -> object:
    """Replace the empty state with that of another machine, once: a repeated call with the same word changes nothing.

    The next `start` creates a new token, because those of the empty state are gone. A state that has got work since the
    sender looked is kept: its jobs and machines are recorded nowhere else. The server is stopped in either case.
    """
    state, aside = os.path.join(folder, "state"), os.path.join(folder, "state.new")
    if request["word"] in (read_text(os.path.join(folder, MARK)), read_text(os.path.join(state, MARK))):
        return {"is_new": False}
    stop(folder)
    if os.path.isdir(state):
        if has_work(os.path.join(state, "state.db")):
            return {"is_new": False, "has_work": True}
        shutil.rmtree(aside, ignore_errors=True)
        os.makedirs(aside, mode=0o700)
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            for entry in archive.getmembers():
                source = archive.extractfile(entry)
                if source is not None and ".." not in entry.name and not entry.name.startswith("/"):
                    write_bytes(os.path.join(aside, entry.name), source.read())
        for name in ("config.toml", "uploads", "server/certificate.pem", "server/epoch.json", "secret.key"):
            if os.path.exists(os.path.join(state, name)):
                copy_over(os.path.join(state, name), os.path.join(aside, name))
        for name, target in request["links"].items():
            os.symlink(target, os.path.join(aside, name))
    write_text(os.path.join(aside, MARK), request["word"])  # in place at the same moment as the state
    sync_tree(aside)  # before the sender may record that its jobs are here
    if os.path.isdir(state):
        os.rename(state, os.path.join(folder, "state.before-%d" % int(time.time())))
    os.rename(aside, state)
    sync(folder)
    return {"is_new": True}


def has_work(database: str, jobs: str = "true") -> bool:
    """Return whether a state has such jobs, clusters or launches of its own, or services or schedules."""
    if not os.path.exists(database):
        return False
    try:
        import sqlite3  # absent from the minimal Python of some systems; every other verb works without it
    except ImportError:
        raise RequestError("that machine's Python has no `sqlite3`", "install it: `apt-get install python3`") from None
    connection = sqlite3.connect(database, timeout=STOP_S)
    try:
        known = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        wanted = {each: "true" for each in ("clusters", "services", "schedules")}
        wanted.update(intents="closed_s IS NULL", jobs=jobs)
        return any(
            connection.execute("SELECT EXISTS (SELECT 1 FROM %s WHERE %s)" % each).fetchone()[0]
            for each in wanted.items()
            if each[0] in known
        )
    finally:
        connection.close()


def can_use_systemd() -> bool:
    """Return whether systemd runs and this user may change units: root, or sudo without a password."""
    if not os.path.isdir("/run/systemd/system") or os.environ.get("BROKER_NO_SYSTEMD"):
        return False
    if os.geteuid() == 0:
        return True
    return bool(shutil.which("sudo")) and subprocess.run(["sudo", "-n", "true"], check=False).returncode == 0


def as_root(*words: str) -> list[str]:
    """Return the command that runs `words` as root."""
    return list(words) if os.geteuid() == 0 else ["sudo", "-n", *words]


def write_as_root(path: str, text: str) -> None:
    """Write a file as root, readable by everyone."""
    subprocess.run(as_root("tee", path), input=text.encode(), stdout=subprocess.DEVNULL, check=True)
    subprocess.run(as_root("chmod", "644", path), check=True)


if __name__ == "__main__":
    main()
