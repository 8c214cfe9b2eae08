"""Run a command on a node and pass its output on as it appears, in bounded memory however much there is."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Sequence

from broker.errors import TransientError
from broker.runtime.base import CanStream
from broker.types import Node

# Runs on the node, with Python 3.8. Writes one JSON object a line: `out` or `err` in base64, at last `code`. The
# command ends when the input of this program closes: the user has left, in whatever way.
RELAY = """\
import base64, json, os, select, signal, subprocess, sys
def send(**message):
    data = json.dumps(message).encode() + b"\\n"
    while data:
        data = data[os.write(1, data):]
def encode(data):
    return base64.b64encode(data).decode()
try:
    process = subprocess.Popen(
        sys.argv[1:], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
except OSError as error:
    send(err=encode(f"{sys.argv[1]}: {error.strerror}\\n".encode()))
    send(code=127 if isinstance(error, FileNotFoundError) else 126)
    sys.exit()
pipes = {process.stdout.fileno(): "out", process.stderr.fileno(): "err"}
try:
    while True:
        has_ended = process.poll() is not None
        ready = select.select([0, *pipes], [], [], 0 if has_ended else 0.1)[0]
        if 0 in ready and not os.read(0, 65536):
            raise EOFError
        for each in [each for each in ready if each]:
            data = os.read(each, 65536)
            if data:
                send(**{pipes[each]: encode(data)})
            else:
                del pipes[each]
        if has_ended and not any(each in ready for each in pipes):
            break
    code = process.returncode
    send(code=code if code >= 0 else 128 - code)
except (OSError, EOFError):
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""


async def run_with_output(
    transport: CanStream, node: Node, argv: Sequence[str], *, timeout_s: float, on_output: Callable[[str, bytes], None]
) -> int:
    """Run a command without input; return its exit code, 128 plus the number for a signal.

    `on_output` gets each piece of its output, after `out` or `err`. Output of processes that the command leaves
    behind is not waited for. Raises TransientError if the node cannot be reached, if the connection is lost, and after
    `timeout_s`, when the command is killed.
    """
    words = ["python3", "-I", "-S", "-c", RELAY, *argv]
    stream = await transport.open_stream(node, words, carries_calls=False)
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    message = await stream.read()
                except TransientError as error:
                    raise TransientError(f"the connection to node `{node.id}` ended before the command") from error
                if "code" in message:
                    return int(message["code"])
                for name, data in message.items():
                    on_output(name, base64.b64decode(data))
    except TimeoutError as error:
        raise TransientError(f"the command on node `{node.id}` did not end within {timeout_s:g} s") from error
    finally:
        stream.close()  # its program ends the command
