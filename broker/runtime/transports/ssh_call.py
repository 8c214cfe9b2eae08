"""Run ssh or rsync to completion with a timeout, and explain failures."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Sequence
from typing import IO

from broker.errors import StateError, TransientError
from broker.runtime.base import Completed


def find_program(name: str) -> str:
    """Return the path of one of OpenSSH's programs, or of rsync. Raises StateError if it is not installed."""
    path = shutil.which(name)
    if path is None:
        hints = ("install OpenSSH's client (`apt-get install openssh-client`)",)
        raise StateError(f"`{name}` is not installed", hints=hints)
    return path


async def call(argv: Sequence[str], *, stdin: bytes | IO[bytes], timeout_s: float, what: str) -> Completed:
    """Run one program to completion; stderr goes to a file because a persistent connection may hold it open forever."""
    with tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE if isinstance(stdin, bytes) else stdin,
            stdout=asyncio.subprocess.PIPE if "-f" not in argv else asyncio.subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,  # Ctrl-C in the terminal must not reach our connections
        )
        try:
            data = stdin if isinstance(stdin, bytes) else None
            stdout, _ = await asyncio.wait_for(process.communicate(data), timeout_s)
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
        return ": it shows a host key that is not the one made for it"
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
    return f": {last[:200]}" if last else ""
