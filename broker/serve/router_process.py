"""The process of an inference router, and its API: start, list of workers, adding and removing one.

smg (`pip install smg`) and vllm-router (`pip install vllm-router`) descend from SGLang's router and share most of
`GET /workers`, `POST /workers` and `DELETE /workers/ID`. smg registers a worker in the background, under an id.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

import aiohttp

from broker.errors import StateError
from broker.frozen import frozen
from broker.types import BalancerType

LOOPBACK = "127.0.0.1"
ANSWER_S = 5.0
POLL_S = 0.05
START_S = 60.0


class RouterError(Exception):
    """The router did not answer, or refused; it may be starting, or gone."""


@frozen
class RouterProgram:
    """A router's command line.

    Broker probes replicas, so the router's own health checks are off, or rare where they cannot be.
    """

    name: str
    command: tuple[str, ...]
    options: tuple[str, ...]
    takes_token_ids: bool  # as prompts, with which a stream continues on another replica


# By `load_balancing_policy`. Their policy of two choices refuses to start without two workers. With these thresholds,
# `cache_aware` prefers the replica that knows the prompt's beginning only among those that are equally busy.
POLICIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "least_load": ("cache_aware", "--balance-abs-threshold", "0", "--balance-rel-threshold", "1.0"),
        "round_robin": ("round_robin",),
        "prefix_affinity": ("cache_aware",),
    }
)
PROGRAMS: Mapping[BalancerType, RouterProgram] = MappingProxyType(
    {
        BalancerType.SMG: RouterProgram(
            name="smg",
            command=("smg", "launch"),
            options=(
                # It would download tokenizers, keep responses, and ask engines for their loads.
                *("--disable-tokenizer-autoload", "--history-backend", "none", "--disable-load-monitoring"),
                *("--disable-health-check", "--log-level", "warn"),
            ),
            takes_token_ids=False,
        ),
        BalancerType.VLLM_ROUTER: RouterProgram(
            name="vllm-router",
            command=("vllm-router",),
            options=("--health-check-interval-secs", "86400", "--log-level", "warning"),
            takes_token_ids=True,
        ),
    }
)


@frozen
class RouterWorker:
    """A worker of the router: `key` identifies it in the API; one that is not ready gets no requests."""

    url: str
    key: str
    is_ready: bool


def find_router(kind: BalancerType) -> str | None:
    """Return the path of a router's program, on PATH or beside this Python; None if it is not installed."""
    name = PROGRAMS[kind].command[0]
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))


def make_argv(kind: BalancerType, balancing: str, *, port: int, metrics_port: int) -> list[str]:
    """Return the command line of a router without workers. Raises StateError if it is not installed."""
    path, program = find_router(kind), PROGRAMS[kind]
    if path is None:
        raise StateError(f"{program.name} is not installed", hints=[f"install it with `pip install {program.name}`"])
    return [
        *(path, *program.command[1:], "--host", LOOPBACK, "--port", str(port)),
        *("--policy", *POLICIES[balancing]),
        *("--prometheus-host", LOOPBACK, "--prometheus-port", str(metrics_port), *program.options),
    ]


def parse_workers(content: Any) -> tuple[RouterWorker, ...]:
    """Read the answer to `GET /workers`; those that drain are left out. Raises RouterError for another answer."""
    try:
        return tuple(
            RouterWorker(url=each["url"], key=each.get("id") or each["url"], is_ready=each["is_healthy"])
            for each in content["workers"]
            if each.get("status") != "draining"
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise RouterError(f"unexpected list of workers: {error!r}") from error


class RouterProcess:
    """A router on the loopback. If this process is killed, the kernel ends it."""

    def __init__(self, kind: BalancerType, balancing: str, folder: Path) -> None:
        self._kind, self._balancing, self._folder = kind, balancing, folder
        self._process: asyncio.subprocess.Process | None = None
        self._session: aiohttp.ClientSession | None = None
        self.port = 0

    async def start(self) -> None:
        """Start without workers, at another port each time, and wait until it answers. Raises StateError."""
        port, metrics_port = _draw_free_ports(2)
        argv = make_argv(self._kind, self._balancing, port=port, metrics_port=metrics_port)
        if setpriv := shutil.which("setpriv"):  # the kernel sends the signal when this process is gone
            argv = [setpriv, "--pdeathsig", "KILL", *argv]
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S))
        self.port = port
        name = PROGRAMS[self._kind].name
        try:
            self._process = await asyncio.create_subprocess_exec(
                *argv, stdin=asyncio.subprocess.DEVNULL, cwd=self._folder
            )
        except OSError as error:  # for example, no more processes
            raise StateError(f"{name} did not start: {error}") from error
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                while self._process.returncode is None:
                    with contextlib.suppress(RouterError):
                        await self.list_workers()
                        return
                    await asyncio.sleep(POLL_S)
        await self._end()
        raise StateError(f"{name} did not start; see the log of the balancer")

    async def wait(self) -> None:
        """Return when the process has ended."""
        if self._process is not None:
            await self._process.wait()

    async def stop(self) -> None:
        """End the process and its open requests; an ended one is no error."""
        await self._end()
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def list_workers(self) -> Sequence[RouterWorker]:
        """List the workers. Raises RouterError."""
        return parse_workers(await self._request("GET", "/workers"))

    async def add_worker(self, url: str) -> None:
        """Add a worker, perhaps in the background. Raises RouterError."""
        await self._request("POST", "/workers", {"url": url})

    async def remove_worker(self, worker: RouterWorker) -> None:
        """Remove a worker; its open requests continue. Raises RouterError."""
        if self._kind is BalancerType.SMG:
            await self._request("DELETE", f"/workers/{quote(worker.key, safe='')}")
        else:
            await self._request("POST", f"/remove_worker?url={quote(worker.url, safe='')}")

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):  # smg would take minutes to end at SIGTERM
                process.kill()
            await process.wait()

    async def _request(self, method: str, path: str, content: object = None) -> Any:
        assert self._session is not None
        address = f"http://{LOOPBACK}:{self.port}{path}"
        try:
            async with self._session.request(method, address, json=content) as response:
                text = await response.text()
                if response.status >= 300:
                    raise RouterError(f"{method} {path}: {response.status} {text[:200]}")
                return await response.json() if response.content_type == "application/json" else text
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise RouterError(f"{method} {path}: {str(error) or type(error).__name__}") from error


def _draw_free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in probes:
            each.bind((LOOPBACK, 0))
        return [each.getsockname()[1] for each in probes]
