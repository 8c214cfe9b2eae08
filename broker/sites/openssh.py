"""Run ssh, rsync or a local command to completion with a timeout, and explain failures."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from broker.clock import within
from broker.errors import StateError, TransientError
from broker.frozen import frozen

CONNECT_S = 5
# A host that loses power does not close connections: three unanswered keepalives, one per second, do.
ALIVE_INTERVAL_S, ALIVE_COUNT_MAX = 1, 3
PERSIST_S = 600


@frozen
class Completed:
    """Exit code and output of a command that ran on a node."""

    returncode: int
    stdout: bytes
    stderr: bytes


def find_program(name: str) -> str:
    """Return the path of one of OpenSSH's programs. Raises StateError if it is not installed."""
    path = shutil.which(name)
    if path is None:
        hints = ("install OpenSSH's client (`apt-get install openssh-client`)",)
        raise StateError(f"`{name}` is not installed on this machine, or not in a folder of PATH", hints=hints)
    return path


async def call(
    argv: Sequence[str], *, stdin: bytes | IO[bytes], timeout_s: float, what: str, env: Mapping[str, str] | None = None
) -> Completed:
    """Run one program to completion. Raises TransientError after `timeout_s`; `what` names the other end.

    stderr goes to a file, because a persistent connection may hold it open forever.
    """
    with tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE if isinstance(stdin, bytes) else stdin,
            stdout=asyncio.subprocess.PIPE if "-f" not in argv else asyncio.subprocess.DEVNULL,
            stderr=errors,
            env=env,
            start_new_session=True,  # Ctrl-C in the terminal must not reach our connections
        )
        try:
            data = stdin if isinstance(stdin, bytes) else None
            stdout, _ = await within(process.communicate(data), timeout_s)
        except TimeoutError as error:
            raise TransientError(f"{what} did not answer within {timeout_s:g} s") from error
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        errors.seek(0)
        return Completed(returncode=process.returncode or 0, stdout=stdout or b"", stderr=errors.read())


def explain(stderr: bytes) -> str:
    """Return the last line of ssh's stderr, as the end of an error message."""
    text = stderr.decode(errors="replace")
    if "HOST IDENTIFICATION HAS CHANGED" in text or "Host key verification failed" in text:
        return ": its host key is unknown or has changed"
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
    return f": {last[:200]}" if last else ""


def escape(path: Path) -> str:
    """Escape a path for ssh's configuration: quoted, `%` doubled."""
    text = str(path).replace("%", "%%")
    return f'"{text}"' if " " in text else text


def make_control_folder() -> Path:
    """Return a private folder for sockets, because access to a socket allows a login.

    Raises StateError if the folder is not private.
    """
    base = tempfile.gettempdir()
    folder = Path(base if len(base) < 40 else "/tmp") / f"broker-ssh-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise StateError(f"`{folder}` is not a folder that only you can access", hints=(f"remove `{folder}`",))
    return folder
