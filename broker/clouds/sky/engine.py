"""The seam to SkyPilot, and what stands behind it: a worker in SkyPilot's interpreter, spoken to in JSON lines.

A process of its own: SkyPilot pins other versions than we do, prints where it likes and takes seconds to import.
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

from broker.clouds.sky.errors import SkyError, translate
from broker.clouds.sky.gangs import Look, Request, Seen
from broker.errors import AuthError, TransientError, UnknownOutcomeError

log = logging.getLogger(__name__)

WORKER = Path(__file__).with_name("worker.py")
CALL_S_MAX = 120.0  # a server that was just started takes most of a minute to its first answer
SLOW_S_MAX = 900.0  # stopping machines, asking clouds about a login
SSH_S = 120.0  # `sky status`, which the worker runs
ENDED = "SkyPilot's worker ended"


class Engine(Protocol):
    """Every verb raises CloudError, and TransientError where SkyPilot's API server cannot be reached."""

    async def hello(self) -> Mapping[str, str]:
        """`version` and `url` of the server; starts none."""

    async def list_enabled(self) -> Sequence[str]:
        """The clouds that SkyPilot can use, in lower case, as of its last check."""

    async def check(self, cloud: str) -> tuple[bool, str]:
        """Whether the cloud can be used, asked of the cloud itself, and what SkyPilot says about it."""

    async def launch(self, name: str, task: Mapping[str, Any], *, is_dry: bool = False) -> str:
        """Begin, and return the request's id. UnknownOutcomeError: it may have been taken on."""

    async def look(self, prefix: str, request_ids: Sequence[str]) -> Look:
        """Clusters and live requests by their cluster's name, and how `request_ids` stand."""

    async def refresh(self, names: Sequence[str]) -> None:
        """Have the clouds asked how these clusters are; a later look shows it."""

    async def fetch(self, request_id: str) -> None:
        """Wait for a request's end; raises what it failed with."""

    async def end(self, name: str) -> None:
        """Call off a launch, begin to take the cluster down; already gone is success."""

    async def stop(self, name: str) -> None: ...

    async def write_ssh(self, name: str) -> Path | None:
        """A file for `ssh -F` with the hosts NAME, NAME-worker1, ...; None where there is no such cluster."""


class WorkerEngine:
    """Starts the worker with the first call and again after its end; usable from any event loop."""

    def __init__(self, python: str, *, worker: Path = WORKER) -> None:
        self._python = python
        self._worker = worker
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._waiting: dict[int, tuple[subprocess.Popen[str], Future[Any]]] = {}
        self._ids = count(1)

    def start(self) -> None:
        """The worker, if it is not there; twice does no harm."""
        with self._lock:
            self._ensure()

    def close(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None, "it was made with a pipe"
            process.stdin.close()
            process.kill()
            process.wait()

    async def hello(self) -> Mapping[str, str]:
        found: Mapping[str, str] = await self._call("hello")
        return found

    async def list_enabled(self) -> Sequence[str]:
        return [str(name) for name in await self._call("list_enabled")]

    async def check(self, cloud: str) -> tuple[bool, str]:
        found = await self._call("check", cloud=cloud, limit_s=SLOW_S_MAX)
        return bool(found["is_enabled"]), str(found["text"])

    async def launch(self, name: str, task: Mapping[str, Any], *, is_dry: bool = False) -> str:
        return str(await self._call("launch", name=name, task=task, is_dry=is_dry, does_change=True))

    async def look(self, prefix: str, request_ids: Sequence[str]) -> Look:
        found = await self._call("look", prefix=prefix, request_ids=list(request_ids))
        clusters = [Seen(**each) for each in found["clusters"]]
        return Look(clusters=clusters, requests=[Request(**each) for each in found["requests"]])

    async def refresh(self, names: Sequence[str]) -> None:
        await self._call("refresh", names=list(names))

    async def fetch(self, request_id: str) -> None:
        await self._call("fetch", request_id=request_id, limit_s=SLOW_S_MAX)

    async def end(self, name: str) -> None:
        await self._call("end", name=name, does_change=True)

    async def stop(self, name: str) -> None:
        await self._call("stop", name=name, does_change=True, limit_s=SLOW_S_MAX)

    async def write_ssh(self, name: str) -> Path | None:
        path = await self._call("write_ssh", name=name, limit_s=CALL_S_MAX + SSH_S)
        return Path(path) if path else None

    async def _call(
        self, verb: str, *, does_change: bool = False, limit_s: float = CALL_S_MAX, **arguments: Any
    ) -> Any:
        """A silence after a call that changes something is an UnknownOutcomeError."""
        lost = UnknownOutcomeError if does_change else TransientError
        call_id, answer = self._send(verb, arguments)
        try:
            reply = await asyncio.wait_for(asyncio.wrap_future(answer), limit_s)
        except TimeoutError as error:
            raise lost(f"SkyPilot did not answer `{verb}` within {limit_s:g} s") from error
        except EOFError as error:
            raise lost(f"{ENDED} during `{verb}`") from error
        finally:
            with self._lock:
                self._waiting.pop(call_id, None)
        if "fault" in reply:
            raise translate(SkyError.parse(reply["fault"]), does_change=does_change)
        return reply["value"]

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
        """Called with the lock held. A process stands here until its reader has told everybody of its end."""
        if self._process is None:
            try:
                self._process = subprocess.Popen(
                    [self._python, str(self._worker)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    start_new_session=True,  # a Ctrl-C in the terminal is for us, and we say what to call off
                )
            except OSError as error:
                raise AuthError(
                    f"`{self._python}` cannot be run: {error.strerror}",
                    hints=("Set `BROKER_SKY_PYTHON` to the interpreter that SkyPilot is installed in.",),
                ) from error
            threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        return self._process

    def _read(self, process: subprocess.Popen[str]) -> None:
        """In a thread: hand each answer to who waits for it; at the end, tell the others."""
        assert process.stdout is not None, "it was made with a pipe"
        for line in process.stdout:
            try:
                reply = json.loads(line)
                call_id = reply["id"]
            except (ValueError, TypeError, KeyError):
                log.warning("SkyPilot's worker said what is no answer: %s", line[:200])
                continue
            with self._lock:
                _, answer = self._waiting.pop(call_id, (None, None))
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
