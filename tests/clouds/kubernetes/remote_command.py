"""`kubectl exec` over a WebSocket: the subprotocol v5.channel.k8s.io of Kubernetes' remote commands.

Each binary message begins with the number of its channel: 0 stdin, 1 stdout, 2 stderr, 3 the Status object at the end,
4 the size of the terminal. Version 5 adds channel 255, whose second byte names the channel that its sender closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence

from aiohttp import WSMsgType, web

PROTOCOL = "v5.channel.k8s.io"
STDIN, STDOUT, STDERR, ERROR, CLOSE = 0, 1, 2, 3, 255
CHUNK = 32768


async def run_remote_command(
    request: web.Request, argv: Sequence[str], environment: Mapping[str, str]
) -> web.StreamResponse:
    """Run a command in a container's environment, connected to the client's channels."""
    socket = web.WebSocketResponse(protocols=[PROTOCOL], max_msg_size=0)
    if not socket.can_prepare(request).ok or socket.can_prepare(request).protocol != PROTOCOL:
        return web.Response(status=400, text=f"only {PROTOCOL} is served")
    await socket.prepare(request)
    process = await asyncio.create_subprocess_exec(
        *argv, env=dict(environment), cwd="/", start_new_session=True, stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout and process.stderr
    reader = asyncio.create_task(_copy_input(socket, process))
    await asyncio.gather(_copy_output(socket, STDOUT, process.stdout), _copy_output(socket, STDERR, process.stderr))
    code = await process.wait()
    with contextlib.suppress(ConnectionError):  # the client may be gone
        await socket.send_bytes(bytes([ERROR]) + json.dumps(make_status(code)).encode())
        await socket.close()
    reader.cancel()
    return socket


async def _copy_input(socket: web.WebSocketResponse, process: asyncio.subprocess.Process) -> None:
    """Copy the client's input; when it is closed, or the client is gone, the command's input ends."""
    assert process.stdin
    try:
        async for message in socket:
            if message.type is not WSMsgType.BINARY or not message.data:
                continue
            channel, data = message.data[0], message.data[1:]
            if channel == STDIN and data:
                process.stdin.write(data)
                await process.stdin.drain()
            elif channel == CLOSE and data[:1] == bytes([STDIN]):
                process.stdin.close()
    except (ConnectionError, BrokenPipeError):
        pass
    finally:
        process.stdin.close()


async def _copy_output(socket: web.WebSocketResponse, channel: int, stream: asyncio.StreamReader) -> None:
    while data := await stream.read(CHUNK):
        try:
            await socket.send_bytes(bytes([channel]) + data)
        except ConnectionError:
            return


def make_status(code: int) -> dict[str, object]:
    """Return the Status object for an exit code."""
    if code == 0:
        return {"metadata": {}, "status": "Success"}
    return {
        "metadata": {}, "status": "Failure", "reason": "NonZeroExitCode",
        "message": f"command terminated with non-zero exit code: exit status {code}",
        "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]},
    }  # fmt: skip
