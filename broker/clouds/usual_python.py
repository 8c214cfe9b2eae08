"""Let a node's programs find a usable Python by its usual name.

Sent to hosts after `ssh/host_program.py` and `slurm/node_program.py`, into their namespace, so it has no `__future__`
import. Python 3.8 and later.
"""

import os
import sys


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
