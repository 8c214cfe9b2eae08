"""Speak to a node's machine (`broker/clouds/local_machine.py`) over a stream that leads to its socket.

A request is a 4-byte length, a JSON header {argv, env, stdin, timeout_s}, then stdin; the answer likewise.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Mapping, Sequence

from broker.sites.openssh import Completed


def pack_header(
    argv: Sequence[str],
    *,
    timeout_s: float,
    stdin_bytes: int = 0,
    env: Mapping[str, str] | None = None,
    is_stream: bool = False,
) -> bytes:
    """Return the start of a request. With `is_stream` the rest of the stream is the command's input and output."""
    header = {"argv": list(argv), "env": dict(env or {}), "stdin": stdin_bytes, "timeout_s": timeout_s}
    request = json.dumps({**header, "is_stream": True} if is_stream else header).encode()
    return struct.pack("!I", len(request)) + request


async def read_answer(reader: asyncio.StreamReader) -> Completed:
    """Return the answer. Raises EOFError if the stream ends before it."""
    size = struct.unpack("!I", await reader.readexactly(4))[0]
    answer = json.loads(await reader.readexactly(size))
    stdout = await reader.readexactly(answer["stdout"])
    stderr = await reader.readexactly(answer["stderr"])
    return Completed(returncode=answer["returncode"], stdout=stdout, stderr=stderr)
