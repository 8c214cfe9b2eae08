"""The task that holds a node of an allocation; it runs the local cloud's machine in a folder of its own.

Standard library only; `srun` starts it once per node with settings and the source of the machine. Slurm signals this
process: SIGTERM is the notice before a preemption or the time limit, SIGUSR1 ends the node.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

YOUNG_S = 60.0


def main(settings: dict[str, object], machine: str) -> None:
    """Run the node to its end, remove its folder, and exit with the machine's code, which says how it ended."""
    os.umask(0o077)
    root = str(settings["root"])
    os.makedirs(root, mode=0o700, exist_ok=True)
    status = os.lstat(root)
    assert status.st_uid == os.getuid() and not status.st_mode & 0o077, f"{root} is not a private folder"
    remove_stale(root)
    folder = os.path.join(root, f"{settings['name']}-{os.environ['SLURM_PROCID']}")
    for name in ("home/.broker", "tmp"):
        os.makedirs(os.path.join(folder, name), mode=0o700)
    socket = os.path.join(root, hashlib.sha256(folder.encode()).hexdigest()[:16] + ".sock")
    record = {"socket": socket, "notice_s": settings["notice_s"], "created_s": time.time()}
    for name, text in (("node.json", json.dumps(record)), ("machine.py", machine)):
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            file.write(text)
    own = {"HOME": os.path.join(folder, "home"), "TMPDIR": os.path.join(folder, "tmp"), "BROKER_NODE_DIR": folder}
    own["PATH"] = find_path(folder)
    environment = {**os.environ, **own, "PYTHONUNBUFFERED": "1", "BROKER_HOST_HOME": os.path.expanduser("~")}
    argv = [sys.executable, "-I", "-S", os.path.join(folder, "machine.py"), folder, "foreground"]
    process = subprocess.Popen(argv, env=environment, cwd=folder, stdin=subprocess.DEVNULL)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: process.send_signal(number))
    code = process.wait()
    shutil.rmtree(folder, ignore_errors=True)
    remove(socket)
    os._exit(code if code >= 0 else 76)


def find_path(folder: str) -> str:
    """Return PATH.

    If the host's `python3` is too old (RHEL 8), the Python of this process precedes it by that name: the agent is
    started by it.
    """
    path = os.environ.get("PATH", os.defpath)
    if os.environ.get("BROKER_PYTHON", "python3") == "python3":
        return path
    place = os.path.join(folder, "bin")
    os.makedirs(place, mode=0o700, exist_ok=True)
    if not os.path.lexists(os.path.join(place, "python3")):
        os.symlink(sys.executable, os.path.join(place, "python3"))
    return place + os.pathsep + path


def remove_stale(root: str) -> None:
    """Remove the files of nodes that were killed on this host; a live node holds its lock."""
    for name in os.listdir(root):
        folder = os.path.join(root, name)
        try:
            if time.time() - os.stat(folder).st_mtime < YOUNG_S:
                continue  # between the creation of the lock and its acquisition, a starting node looks dead
            lock = os.open(os.path.join(folder, "alive.lock"), os.O_RDWR)
        except OSError:
            continue  # a socket, or a node that is just starting
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)


def remove(path: str) -> None:
    """Delete a file. An error is ignored: the node has ended, and its exit code must still be reported."""
    try:
        os.unlink(path)
    except OSError:
        pass
