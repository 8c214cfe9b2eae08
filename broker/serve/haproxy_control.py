"""The process of HAProxy and its control socket: start, reload, states of servers, figures.

HAProxy runs as a master with workers. A reload starts a worker with the new configuration, which takes over the
listening sockets; the old one serves the connections it has to their end, and no connection is refused.
"""

from __future__ import annotations

import asyncio
import csv
import os
import shutil
import signal
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from broker.errors import StateError
from broker.frozen import frozen

CONFIG = "haproxy.cfg"
SOCKET = "haproxy.sock"
SYSTEM_PATH = "/usr/sbin:/usr/local/sbin"  # not in the PATH of users on Debian
ANSWER_S = 5.0
SESSIONS_AT_ONCE = 100  # in one command, which has at most 16 KiB
POLL_S = 0.05
START_S = 60.0  # a busy machine takes seconds; without it, the balancer would be started again and again
END_S = 10.0


class NoAnswerError(Exception):
    """HAProxy did not answer; it may be starting, or gone."""


@frozen
class Worker:
    """A worker process. `is_old`: it serves its last connections after a reload."""

    pid: int
    is_old: bool


@frozen
class ServerFigures:
    """A server's figures in one worker: now, and since the worker began."""

    name: str
    in_flight: int
    broken: int


@frozen
class WorkerFigures:
    """One worker's figures; `arrivals` since it began."""

    arrivals: int
    queued: int
    servers: tuple[ServerFigures, ...]


def find_haproxy() -> str | None:
    """Return the path of the program; None if it is not installed."""
    return shutil.which("haproxy") or shutil.which("haproxy", path=SYSTEM_PATH)


def parse_workers(text: str) -> tuple[Worker, ...]:
    """Read the answer to `show proc`, in which old workers have a heading of their own."""
    found: list[Worker] = []
    is_old = False
    for line in text.splitlines():
        if line.startswith("#"):
            is_old = line.startswith("# old")
        elif (words := line.split()) and len(words) > 1 and words[1] == "worker":
            found.append(Worker(pid=int(words[0]), is_old=is_old))
    return tuple(found)


def parse_figures(text: str) -> WorkerFigures:
    """Read the answer to `show stat`: CSV with a heading, a line for each frontend, server and backend."""
    arrivals = queued = 0
    servers: list[ServerFigures] = []
    for row in csv.DictReader(text.lstrip().removeprefix("# ").splitlines()):
        kind = row.get("svname") or ""
        if kind == "FRONTEND":
            arrivals += int(row.get("req_tot") or row["stot"] or 0)
        elif kind == "BACKEND":
            queued += int(row["qcur"] or 0)
        elif kind:
            broken = int(row.get("srv_abrt") or 0)
            servers.append(ServerFigures(name=kind, in_flight=int(row["scur"] or 0), broken=broken))
    return WorkerFigures(arrivals=arrivals, queued=queued, servers=tuple(servers))


def parse_sessions(text: str) -> Mapping[str, str]:
    """Read the answer to `show sess`: the server of each session, by the session's id."""
    found = {}
    for line in text.splitlines():
        key, _, rest = line.partition(":")
        for word in rest.split():
            if word.startswith("srv="):
                found[key] = word.removeprefix("srv=")
    return found


class HaproxyControl:
    """HAProxy in a service's folder. If this process is killed, HAProxy ends once its connections have."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start with the configuration in the folder, and wait until a worker serves. Raises StateError."""
        program = find_haproxy()
        if program is None:
            raise StateError("haproxy is not installed", hints=["install it with `apt-get install haproxy`"])
        argv = [program, "-W", "-S", f"unix@{SOCKET},mode,600", "-f", CONFIG]
        if setpriv := shutil.which("setpriv"):  # the kernel sends the signal when this process is gone
            argv = [setpriv, "--pdeathsig", "USR1", *argv]
        (self._folder / SOCKET).unlink(missing_ok=True)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *argv, stdin=asyncio.subprocess.DEVNULL, cwd=self._folder
            )
        except OSError as error:  # for example, no more processes
            raise StateError(f"haproxy did not start: {error}") from error
        try:
            async with asyncio.timeout(START_S):
                while self._process.returncode is None and not await self._find_current():
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            await self.stop()
        if self._process is None or self._process.returncode is not None:
            raise StateError("haproxy did not start; see the log of the balancer")

    async def wait(self) -> None:
        """Return when the process has ended."""
        if self._process is not None:
            await self._process.wait()

    async def stop(self) -> None:
        """End the process: open connections get ten seconds. An ended one is no error."""
        process, self._process = self._process, None
        if process is None:
            return
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGKILL):
            if process.returncode is None:
                process.send_signal(number)
            try:
                async with asyncio.timeout(END_S):
                    await process.wait()
                return
            except TimeoutError:
                continue

    async def reload(self) -> bool:
        """Start a new worker with the configuration in the folder; return whether it serves.

        A configuration that is refused changes nothing: the old worker keeps serving. Raises NoAnswerError.
        """
        before = {each.pid for each in await self.list_workers()}
        if self._process is None or self._process.returncode is not None:
            raise NoAnswerError
        self._process.send_signal(signal.SIGUSR2)
        deadline_s = asyncio.get_running_loop().time() + START_S
        while asyncio.get_running_loop().time() < deadline_s:
            await asyncio.sleep(POLL_S)
            try:
                current = await self._find_current()
            except NoAnswerError:  # the master starts itself again
                continue
            if current and current not in before:
                return True
        return False

    async def set_state(self, server: str, state: str) -> None:
        """Set the state of `BACKEND/SERVER` in the current worker. Raises NoAnswerError."""
        await self._query(f"@1 set server {server} state {state}")

    async def end_sessions(self, names: Collection[str]) -> None:
        """End the sessions of old workers at these servers. Raises NoAnswerError.

        One by one: `shutdown sessions server` is refused by a worker that no longer listens.
        """
        for worker in await self.list_workers():
            if not worker.is_old:
                continue
            figures = await self.read_figures(worker)
            if not any(each.name in names and each.in_flight for each in figures.servers):
                continue
            sessions = parse_sessions(await self._query(f"@!{worker.pid} show sess"))
            ended = [f"@!{worker.pid} shutdown session {key}" for key, name in sessions.items() if name in names]
            for start in range(0, len(ended), SESSIONS_AT_ONCE):
                await self._query(";".join(ended[start : start + SESSIONS_AT_ONCE]))

    async def list_workers(self) -> Sequence[Worker]:
        """List the workers, old ones included. Raises NoAnswerError."""
        return parse_workers(await self._query("show proc"))

    async def read_figures(self, worker: Worker) -> WorkerFigures:
        """Read the figures of one worker. Raises NoAnswerError."""
        text = await self._query(f"@!{worker.pid} show stat")
        if "svname" not in text:
            raise NoAnswerError
        return parse_figures(text)

    async def _find_current(self) -> int | None:
        """Return the process id of the worker that accepts connections; None while there is none."""
        try:
            workers = await self.list_workers()
        except NoAnswerError:
            return None
        return next((each.pid for each in workers if not each.is_old), None)

    async def _query(self, command: str) -> str:
        """Send one command and return the answer. Raises NoAnswerError."""
        # The name of a socket has at most 107 bytes; a state folder may have more.
        try:
            handle = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise NoAnswerError from error
        try:
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(f"/proc/self/fd/{handle}/{SOCKET}")
                try:
                    writer.write(f"{command}\n".encode())
                    writer.write_eof()
                    return (await reader.read(-1)).decode(errors="replace")
                finally:
                    writer.close()
        except (OSError, TimeoutError) as error:
            raise NoAnswerError from error
        finally:
            os.close(handle)
