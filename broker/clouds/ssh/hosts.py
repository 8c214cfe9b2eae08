"""Call the program on a host over ssh: claim it, list and end claims, measure it."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from broker.clock import within
from broker.clouds import local_machine, usual_python
from broker.clouds.sent_source import read_source
from broker.clouds.ssh import host_program
from broker.errors import TransientError
from broker.sites.host_python import NO_PYTHON, make_python_argv
from broker.sites.openssh import Completed, explain
from broker.sites.pools import Host

CALL_S = 60.0
NOT_FOUND = 127  # exit code of a shell
COMMAND = f"exec {shlex.join(make_python_argv('-'))}"

# Runs a program on a host, as `run_by_ssh` does; tests substitute hosts without sshd.
RunOnHost = Callable[[Host, bytes, float], Awaitable[Completed]]


async def run_by_ssh(host: Host, program: bytes, timeout_s: float) -> Completed:
    """Run the program over ssh.

    Raises TransientError if the host does not answer, AuthError if it refuses the login.
    """
    return await host.login.run(COMMAND, stdin=program, timeout_s=timeout_s)


async def call_host(run: RunOnHost, host: Host, verb: str, **fields: object) -> Any:
    """Return the program's answer. Raises CloudError."""
    return (await ask_host(run, host, verb, **fields))["answer"]


async def ask_host(run: RunOnHost, host: Host, verb: str, **fields: object) -> Mapping[str, Any]:
    """Return the program's `answer`, and the `uid` of the login. Raises CloudError."""
    program = make_program({"verb": verb, **fields})
    done = await run(host, program, CALL_S)
    try:
        found: Mapping[str, Any] = json.loads(done.stdout.decode().strip().rpartition("\n")[2])
        return {"answer": found["answer"], "uid": found["uid"]}
    except (ValueError, KeyError, TypeError) as error:
        why = explain(done.stderr) or f": exit code {done.returncode}"
        hints = ("install Python 3.8 or newer on the host",) if done.returncode in (NOT_FOUND, NO_PYTHON) else ()
        raise TransientError(f"broker's program failed on host `{host.name}`{why}", hints=hints) from error


def make_program(request: Mapping[str, object]) -> bytes:
    """Return the program's source with its request; only a claim needs the machine's source."""
    machine = read_source(local_machine.__file__) if request["verb"] == "claim" else ""
    program = "\n".join(read_source(str(each.__file__)) for each in (host_program, usual_python))
    return f"{program}\nmain(json.loads({json.dumps(request)!r}), {machine!r})\n".encode()


async def fence(host: Host) -> bool:
    """Run the host's fence command on this machine; return whether it confirmed that the host is off."""
    if not host.fence:
        return False
    argv = [word.replace("{host}", host.name) for word in host.fence]
    argv = ["sh", "-c", argv[0]] if len(argv) == 1 else argv
    try:
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, start_new_session=True
        )
        return await within(process.wait(), CALL_S) == 0
    except (OSError, TimeoutError):
        return False
