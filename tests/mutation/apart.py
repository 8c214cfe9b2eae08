"""A PID namespace for each run: a mutant may kill every process that it sees, so it sees only its own.

Folders, ports and `/dev/shm` stay shared.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from collections.abc import Sequence

UNSHARE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
USERS = ((), ("--user", "--map-current-user"))  # root needs no user namespace
# The first process of a namespace reaps orphans, and when it ends, the kernel kills all others.
INIT = ("sh", "-c", '"$@"; exit $?', "init")


def set_apart(command: Sequence[str]) -> list[str]:
    """Return the command that runs this one in a PID namespace of its own, or the same where none can be made."""
    return [*find_prefix(), *command]


@functools.cache
def find_prefix() -> tuple[str, ...]:
    for user in USERS if shutil.which("unshare") else ():
        prefix = (*UNSHARE, *user, *INIT)
        if subprocess.run([*prefix, "true"], stdin=subprocess.DEVNULL, capture_output=True).returncode == 0:
            return prefix
    print("note: no PID namespace can be made here; a mutant may end other processes of this user", file=sys.stderr)
    return ()
