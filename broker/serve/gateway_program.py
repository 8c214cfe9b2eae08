"""The program of a gateway: unpacks broker, then runs the balancer and restarts it. `python3 -I -S`, in its own folder.

    settings.json   the wheel's digest, the packages that broker needs, and the Python to use, if it is named
    broker.whl      broker itself

Standard library only, Python 3.8 and later. The balancer starts once the controller has pushed its routing file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from typing import TYPE_CHECKING, Any

FOLDER = os.path.dirname(os.path.abspath(__file__))
if TYPE_CHECKING:
    from broker.runtime.node_python import NoPythonError, find_broker_python
elif __name__ == "__main__":
    sys.path.insert(0, FOLDER)  # `-I` omits it
    from node_python import NoPythonError, find_broker_python

SETTINGS, WHEEL = "settings.json", "broker.whl"
ROUTING = "routing.json"
POLL_S = 0.1
RESTART_S_MIN, RESTART_S_MAX = 0.1, 5.0
STEADY_S = 10.0  # a balancer that ran this long is restarted at once


def main() -> None:
    """Run the balancer until SIGTERM."""
    os.umask(0o077)
    data = os.path.join(os.environ.get("HOME") or os.path.expanduser("~"), ".broker")
    with open(os.path.join(FOLDER, SETTINGS), encoding="utf-8") as file:
        settings = json.load(file)
    root = os.path.join(data, "gateway-releases")
    try:
        release = unpack(root, settings["digest"])
        python = find_broker_python(
            os.path.join(root, "python"), release, needs=settings["needs"], packages=settings["packages"],
            named=settings["python"],
        )  # fmt: skip
    except NoPythonError as error:
        sys.exit("%s; %s" % (error, error.hint))
    folder = os.path.join(data, "exchange")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    own = {"BROKER_HOME": os.path.join(root, "home"), "PYTHONPATH": release, "BROKER_OFFLINE": "1"}
    supervise([python, "-m", "broker", "balancer", folder], folder, {**os.environ, **own})


def unpack(root: str, digest: str) -> str:
    """Unpack the wheel, completely or not at all; return its folder."""
    release = os.path.join(root, digest[:16])
    if os.path.isdir(release):
        return release
    with open(os.path.join(FOLDER, WHEEL), "rb") as file:
        if hashlib.sha256(file.read()).hexdigest() != digest:
            sys.exit("the wheel of broker was damaged in transit")
    aside = "%s.new-%d" % (release, os.getpid())
    shutil.rmtree(aside, ignore_errors=True)
    zipfile.ZipFile(os.path.join(FOLDER, WHEEL)).extractall(aside)
    os.rename(aside, release)
    return release


def supervise(argv: list[str], folder: str, environment: dict[str, Any]) -> None:
    """Restart the balancer whenever it ends, until SIGTERM, which it gets as well."""
    running: list[subprocess.Popen[bytes]] = []
    stopping: list[int] = []

    def stop(number: int, frame: object) -> None:
        stopping.append(number)  # `wait` must not be called here: the main thread is in it
        for child in running:
            child.terminate()

    signal.signal(signal.SIGTERM, stop)
    wait_s = RESTART_S_MIN
    while not stopping:
        if not os.path.exists(os.path.join(folder, ROUTING)):
            time.sleep(POLL_S)
            continue
        begin_s = time.monotonic()
        running[:] = [subprocess.Popen(argv, cwd=folder, env=environment, stdin=subprocess.DEVNULL)]
        if stopping:  # the signal came before the balancer was listed
            running[0].terminate()
        code = running[0].wait()
        running.clear()
        wait_s = RESTART_S_MIN if time.monotonic() - begin_s > STEADY_S else min(RESTART_S_MAX, 2 * wait_s)
        if not stopping:
            print("the balancer ended with %d; it is restarted" % code, file=sys.stderr, flush=True)
            time.sleep(wait_s)


if __name__ == "__main__":
    main()
