"""The first process of a pod's container; it runs the local cloud's machine in a folder of its own.

Standard library only; the pod's command holds this source. The kubelet signals this process: SIGTERM is the notice
before an eviction, and SIGKILL follows after the pod's grace period, which ends every process of the container.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time

TICK_S = 1.0


def main(settings: dict[str, object], machine: str) -> None:
    """Run the node to its end, and exit with the machine's code, which says how it ended."""
    os.umask(0o077)
    root = str(settings["root"])
    os.makedirs(root, mode=0o700, exist_ok=True)
    status = os.lstat(root)
    assert status.st_uid == os.getuid() and not status.st_mode & 0o077, f"{root} is not a private folder"
    folder = os.path.join(root, str(settings["name"]))
    for name in ("home/.broker", "tmp"):
        os.makedirs(os.path.join(folder, name), mode=0o700)
    socket = os.path.join(root, hashlib.sha256(folder.encode()).hexdigest()[:16] + ".sock")
    record = {"socket": socket, "notice_s": settings["notice_s"], "created_s": time.time()}
    for name, text in (("node.json", json.dumps(record)), ("machine.py", machine)):
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            file.write(text)
    own = {"HOME": os.path.join(folder, "home"), "TMPDIR": os.path.join(folder, "tmp"), "BROKER_NODE_DIR": folder}
    environment = {**os.environ, **own, "PYTHONUNBUFFERED": "1", "BROKER_HOST_HOME": os.path.expanduser("~")}
    argv = [sys.executable, "-I", "-S", os.path.join(folder, "machine.py"), folder, "foreground"]
    process = subprocess.Popen(argv, env=environment, cwd=folder, stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
    code = wait(process, folder, float(str(settings["unclaimed_s"])))
    os._exit(code if code >= 0 else 76)


def wait(process: subprocess.Popen[bytes], folder: str, unclaimed_s: float) -> int:
    """Return the machine's exit code. A node on which no agent was called within `unclaimed_s` has lost its creator.

    A monotonic clock: the machine's time may be set while the pod runs.
    """
    end_s = time.monotonic() + unclaimed_s
    state = os.path.join(folder, "home", ".broker")
    while True:
        try:
            return process.wait(TICK_S)
        except subprocess.TimeoutExpired:
            if time.monotonic() < end_s or os.path.isdir(os.path.join(state, "runs")):
                continue
            with open(os.path.join(state, "shutdown"), "w", encoding="utf-8") as file:
                file.write("lease")
            return process.wait()
