"""The interface to SkyPilot: a worker in SkyPilot's interpreter that reads and writes JSON lines.

A separate process, because SkyPilot pins different versions than we do, prints to stdout and takes seconds to import.
"""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from broker.clock import within
from broker.clouds.sky.errors import SkyError, translate
from broker.clouds.sky.gangs import Request, ServerState, SkyClusterRow
from broker.errors import AuthError, TransientError, UnknownOutcomeError

log = logging.getLogger(__name__)

WORKER = Path(__file__).with_name("worker.py")
CALL_S_MAX = 120.0  # a server that was just started takes most of a minute until its first response
SLOW_S_MAX = 900.0  # stopping machines, checking a login with the cloud
SSH_S = 120.0  # `sky status`, which the worker runs
ENDED = "SkyPilot's worker ended"
# Calls without an answer, of the eight that the worker can make at once, after which it is replaced: SkyPilot waits for
# its API server without a limit, and for ever if the network changes meanwhile.
OVERDUE_MAX = 3


class Engine(Protocol):
    """Verbs of SkyPilot. All raise CloudError; TransientError if SkyPilot's API server cannot be reached."""

    async def hello(self) -> Mapping[str, str]:
        """Return `version` and `url` of the server; does not start one."""

    async def list_enabled(self) -> Sequence[str]:
        """List the clouds that SkyPilot can use, in lower case, as of its last check."""

    async def check(self, cloud: str) -> tuple[bool, str]:
        """Check with the cloud itself whether it can be used; return the result and SkyPilot's report."""

    async def launch(self, name: str, task: Mapping[str, Any], *, is_dry: bool = False) -> str:
        """Start a launch and return the request's id. UnknownOutcomeError: the server may have accepted it."""

    async def fetch_state(self, prefix: str, request_ids: Sequence[str]) -> ServerState:
        """Return clusters and live requests by cluster name prefix, and the status of `request_ids`."""

    async def refresh(self, names: Sequence[str]) -> None:
        """Ask SkyPilot to query the clouds about these clusters; a later `fetch_state` shows the result."""

    async def fetch(self, request_id: str) -> None:
        """Wait until a request ends; raise its error."""

    async def end(self, name: str) -> None:
        """Cancel a launch and start taking the cluster down; already gone is success."""

    async def stop(self, name: str) -> None:
        """Stop a cluster and wait until it is stopped."""

    async def write_ssh(self, name: str) -> Path | None:
        """Write a file for `ssh -F` with the hosts NAME, NAME-worker1, ...; None if there is no such cluster."""


class WorkerEngine:
    """An engine that starts the worker on the first call and restarts it after its end; usable from any event loop."""

    def __init__(self, python: str, *, worker: Path = WORKER) -> None:
        self._python = python
        self._worker = worker
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._waiting: dict[int, tuple[subprocess.Popen[str], Future[Any]]] = {}
        self._ids = count(1)
        self._overdue: set[int] = set()  # calls that the current worker has not answered in time

    def start(self) -> None:
        """Start the worker unless it runs. Idempotent."""
        with self._lock:
            self._ensure()

    def close(self) -> None:
        """End the worker; the next call starts another one."""
        with self._lock:
            process, self._process = self._process, None
            self._overdue.clear()
        if process is not None:
            assert process.stdin is not None, "it was made with a pipe"
            process.stdin.close()
            process.kill()
            process.wait()

    async def hello(self) -> Mapping[str, str]:
        """Return SkyPilot's version and the URL of its API server."""
        found: Mapping[str, str] = await self._call("hello")
        return found

    async def list_enabled(self) -> Sequence[str]:
        """Return the clouds that SkyPilot has enabled."""
        return [str(name) for name in await self._call("list_enabled")]

    async def check(self, cloud: str) -> tuple[bool, str]:
        """Run SkyPilot's check of one cloud, which contacts it and may take minutes."""
        reply = await self._call("check", cloud=cloud, limit_s=SLOW_S_MAX)
        return bool(reply["is_enabled"]), str(reply["text"])

    async def launch(self, name: str, task: Mapping[str, Any], *, is_dry: bool = False) -> str:
        """Submit a launch; a lost answer raises UnknownOutcomeError."""
        return str(await self._call("launch", name=name, task=task, is_dry=is_dry, does_change=True))

    async def fetch_state(self, prefix: str, request_ids: Sequence[str]) -> ServerState:
        """Return the server's clusters and requests by one call to the worker."""
        reply = await self._call("fetch_state", prefix=prefix, request_ids=list(request_ids))
        clusters = [SkyClusterRow(**each) for each in reply["clusters"]]
        requests = [Request(**each) for each in reply["requests"]]
        return ServerState(clusters=clusters, requests=requests, account=str(reply.get("account", "")))

    async def refresh(self, names: Sequence[str]) -> None:
        """Make SkyPilot query the clouds about these clusters, without waiting."""
        await self._call("refresh", names=list(names))

    async def fetch(self, request_id: str) -> None:
        """Wait for a request, and raise its error as our class."""
        await self._call("fetch", request_id=request_id, limit_s=SLOW_S_MAX)

    async def end(self, name: str) -> None:
        """Cancel a launch and start the teardown; a lost answer raises UnknownOutcomeError."""
        await self._call("end", name=name, does_change=True)

    async def stop(self, name: str) -> None:
        """Stop a cluster and wait for it, for minutes at most."""
        await self._call("stop", name=name, does_change=True, limit_s=SLOW_S_MAX)

    async def write_ssh(self, name: str) -> Path | None:
        """Make SkyPilot write its ssh configuration; None if it has no such cluster."""
        path = await self._call("write_ssh", name=name, limit_s=CALL_S_MAX + SSH_S)
        return Path(path) if path else None

    async def _call(
        self, verb: str, *, does_change: bool = False, limit_s: float = CALL_S_MAX, **arguments: Any
    ) -> Any:
        """Call the worker. No response to a call that changes something is an UnknownOutcomeError."""
        lost = UnknownOutcomeError if does_change else TransientError
        call_id, answer = self._send(verb, arguments)
        try:
            reply = await within(asyncio.wrap_future(answer), limit_s)
        except TimeoutError as error:
            self._note_overdue(call_id)
            raise lost(f"SkyPilot did not respond to `{verb}` within {limit_s:g} s") from error
        except EOFError as error:
            raise lost(f"{ENDED} during `{verb}`") from error
        finally:
            with self._lock:
                self._waiting.pop(call_id, None)
        if "fault" in reply:
            raise translate(SkyError.parse(reply["fault"]), does_change=does_change)
        return reply["value"]

    def _note_overdue(self, call_id: int) -> None:
        """Replace the worker once several of its calls hang; the answers of the others are lost."""
        with self._lock:
            self._overdue.add(call_id)
            is_stuck = len(self._overdue) >= OVERDUE_MAX
        if is_stuck:
            log.warning("SkyPilot's worker does not answer %s calls; replacing it", OVERDUE_MAX)
            self.close()

    def _send(self, verb: str, arguments: Mapping[str, Any]) -> tuple[int, Future[Any]]:
        with self._lock:
            process = self._ensure()
            call_id = next(self._ids)
            answer: Future[Any] = Future()
            self._waiting[call_id] = process, answer
            assert process.stdin is not None, "it was made with a pipe"
            try:
                process.stdin.write(json.dumps({"id": call_id, "verb": verb, "arguments": arguments}) + "\n")
                process.stdin.flush()
            except OSError as error:
                del self._waiting[call_id]
                raise TransientError(ENDED) from error
        return call_id, answer

    def _ensure(self) -> subprocess.Popen[str]:
        """Start the worker if needed, with the lock held.

        A process is kept until its reader has notified all waiters of its end.
        """
        if self._process is None:
            try:
                self._process = subprocess.Popen(
                    [self._python, str(self._worker)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    start_new_session=True,  # a Ctrl-C in the terminal is for us; we decide what to cancel
                )
            except OSError as error:
                raise AuthError(
                    f"`{self._python}` cannot be run: {error.strerror}",
                    hints=("set `BROKER_SKY_PYTHON` to the interpreter in which SkyPilot is installed",),
                ) from error
            threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        return self._process

    def _read(self, process: subprocess.Popen[str]) -> None:
        """Hand each answer to its waiter, in a thread; at the end, notify the rest."""
        assert process.stdout is not None, "it was made with a pipe"
        for line in process.stdout:
            try:
                reply = json.loads(line)
                call_id = reply["id"]
            except (ValueError, TypeError, KeyError):
                log.warning("SkyPilot's worker wrote a line that is not an answer: %s", line[:200])
                continue
            with self._lock:
                _, answer = self._waiting.pop(call_id, (None, None))
                self._overdue.discard(call_id)
            if answer is not None and answer.set_running_or_notify_cancel():
                answer.set_result(reply)
        process.wait()
        with self._lock:
            if self._process is process:
                self._process = None
            left = {each: answer for each, (asked, answer) in self._waiting.items() if asked is process}
            for each in left:
                del self._waiting[each]
        for answer in left.values():
            if answer.set_running_or_notify_cancel():
                answer.set_exception(EOFError())
