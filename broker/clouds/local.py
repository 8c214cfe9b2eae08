"""The local cloud: nodes are process trees on this machine, each in its own folder.

Everything can be rehearsed on it.

`list_nodes` reads the processes themselves (a lock that a node holds while it lives), never a record.

A file ROOT/faults.json {"zones": {"local-a": "capacity"}} makes a zone refuse, to rehearse failover.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from broker.clock import Clock
from broker.clouds import local_machine
from broker.config import Config
from broker.errors import CapacityError, StateError, TransientError, UnknownOutcomeError, UsageError
from broker.locks import hold_lock, is_locked
from broker.types import Node, NodeList, NodeRequest, NodeState

BOOT_S_MAX = 120.0  # far more than required: a busy or suspended machine may stall for many seconds
KILL_S_MAX = 120.0
KEEP_ENDED_S = 3600.0  # as EC2, which lists a terminated instance for about an hour
# Variables that a node inherits from our environment; HOME, TMPDIR and credentials are excluded.
PASSED_ENV = (
    *("LANG", "LC_ALL", "USER", "LOGNAME", "SHELL", "TZ", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "CUDA_VISIBLE_DEVICES"),
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)
LEFT_OVERS = (  # from the previous boot: a restarted node has neither lease nor autostop until it is given one
    *("ended.json", "machine.json", "preempt.json", "home/.broker/shutdown", "home/.broker/preemption"),
    *("home/.broker/lease.json", "home/.broker/heard.json", "home/.broker/autostop.json", "home/.broker/boot"),
)

Result = TypeVar("Result")


def make_cloud(config: Config, *, clock: Clock) -> LocalCloud:
    """Make the cloud for the registry; this machine requires no login."""
    return LocalCloud(config.local_cloud, clock=clock)


class LocalCloud:
    """Cloud, CanStop and CanPreempt over folders ROOT/<node-id>. Every change is made under the lock ROOT/lock."""

    name: ClassVar[str] = "local"
    settle_s: ClassVar[float] = 0.0
    extends_gangs: ClassVar[bool] = True

    def __init__(self, root: Path, *, clock: Clock) -> None:
        self._root = root.absolute()
        self._clock = clock

    async def check(self) -> None:
        """Verify that the folder can be locked and written. Raises CloudError."""
        await self._locked(lambda: None)

    async def create_nodes(self, request: NodeRequest) -> Sequence[Node]:
        """Start one machine process per node; a repeated token returns the same nodes."""
        return await self._locked(lambda: self._create(request))

    async def list_nodes(self, owner: str) -> NodeList:
        """List the owner's nodes, ended ones included; the list is always complete."""
        return await self._locked(lambda: NodeList(nodes=tuple(node for node in self._list() if node.owner == owner)))

    async def terminate_nodes(self, nodes: Sequence[Node]) -> None:
        """Kill all processes of the nodes; one that is gone counts as success."""
        ids = [node.id for node in nodes]
        await self._locked(lambda: self._end(ids, state="TERMINATED", reason="terminated"))

    async def stop_nodes(self, ids: Sequence[str]) -> None:
        """Kill all processes of the nodes, and keep their folders."""
        await self._locked(lambda: self._end(ids, state="STOPPED", reason="stopped"))

    async def start_nodes(self, ids: Sequence[str]) -> None:
        """Start the machine processes of stopped nodes again, with the same folders."""
        await self._locked(lambda: self._start(ids))

    async def preempt_nodes(self, ids: Sequence[str], *, notice_s: float) -> None:
        """Preempt nodes as a spot market does.

        They end immediately, or after a notice that the agent passes on to the program.
        """
        if notice_s <= 0:
            await self._locked(lambda: self._end(ids, state="TERMINATED", reason="preempted"))
        else:
            await self._locked(lambda: self._give_notice(ids, notice_s))

    async def _locked(self, action: Callable[[], Result]) -> Result:
        def act() -> Result:
            try:
                self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
                with hold_lock(self._root / "lock"):
                    return action()
            except OSError as error:
                raise TransientError(
                    f"the local cloud cannot use {error.filename or self._root}: {error.strerror or error}",
                    hints=("check that the disk is not full and that you own the folder",),
                ) from error

        return await asyncio.to_thread(act)

    def _create(self, request: NodeRequest) -> list[Node]:
        placement = request.placement
        digest = hashlib.sha256(f"{request.owner}\0{request.token}".encode()).hexdigest()[:10]
        base = f"{re.sub(r'[^a-zA-Z0-9-]', '-', request.cluster)[:40]}-{request.attempt}-{digest}"
        folders = [self._root / f"{base}-{rank}" for rank in range(placement.node_count)]
        if not any(folder.exists() for folder in folders):
            self._check_capacity(placement.offer.zone or "")
        for rank, folder in enumerate(folders):
            if read_json(folder / "node.json") is None:
                shutil.rmtree(folder, ignore_errors=True)  # the rest of a node whose file a loss of power has damaged
                self._make_folder(folder, request, rank)
        for folder in folders:
            if not (folder / "machine.json").exists() and not (folder / "ended.json").exists():
                boot(folder)
        return [node for folder in folders if (node := self._observe(folder))]

    def _check_capacity(self, zone: str) -> None:
        try:
            fault = json.loads((self._root / "faults.json").read_bytes()).get("zones", {}).get(zone)
        except FileNotFoundError:
            return
        except (ValueError, AttributeError):
            text = f'{self._root / "faults.json"} must be JSON such as {{"zones": {{"local-a": "capacity"}}}}'
            raise UsageError(text) from None
        if fault == "capacity":
            raise CapacityError(f"no capacity in `{zone}`", scope="zone")

    def _make_folder(self, folder: Path, request: NodeRequest, rank: int) -> None:
        """Create the node's folder atomically: it appears under its name only with its tags in it.

        First remove the remains of an earlier one that a full disk or a kill interrupted: under the lock no other
        process creates one.
        """
        for left in self._root.glob(".new-*"):
            shutil.rmtree(left, ignore_errors=True)
        placement = request.placement
        aside = Path(tempfile.mkdtemp(prefix=".new-", dir=self._root))
        for name in ("home", "home/.broker", "tmp"):
            (aside / name).mkdir(mode=0o700)
        record = {
            "owner": request.owner,
            "cluster": request.cluster,
            "attempt": request.attempt,
            "rank": rank,
            "token": request.token,
            "region": placement.offer.region,
            "zone": placement.offer.zone,
            "is_spot": placement.is_spot,
            "usd_hour": placement.usd_hour / placement.node_count,
            "created_s": self._clock.now_s(),
            "labels": dict(request.spec.labels),
            "address": pick_address({node.address for node in self._list() if node.state is not NodeState.TERMINATED}),
            "socket": str(socket_folder() / f"{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}.sock"),
        }
        local_machine.write_json(str(aside / "node.json"), record)
        aside.rename(folder)

    def _list(self) -> list[Node]:
        nodes = (self._observe(folder) for folder in sorted(self._root.iterdir()) if not folder.name.startswith("."))
        return [node for node in nodes if node]

    def _observe(self, folder: Path) -> Node | None:
        """Return the node as its processes show it; record a dead one and clean up after it."""
        record = read_json(folder / "node.json")
        if record is None:
            return None
        ended: dict[str, Any] | None = None
        if is_alive(folder):
            state = NodeState.RUNNING
        elif not (folder / "machine.json").exists() and not (folder / "ended.json").exists():
            state = NodeState.PENDING  # its creator died before the boot; the same token boots it
        else:
            ended = determine_end(folder)
            state = NodeState(ended["state"])
            Path(record["socket"]).unlink(missing_ok=True)
            if state is NodeState.TERMINATED:
                for name in ("home", "tmp"):
                    shutil.rmtree(folder / name, ignore_errors=True)
                if self._clock.now_s() - ended["ended_s"] > KEEP_ENDED_S:
                    shutil.rmtree(folder, ignore_errors=True)
                    return None
        return Node(
            id=folder.name,
            cloud=self.name,
            owner=record["owner"],
            cluster=record["cluster"],
            attempt=record["attempt"],
            rank=record["rank"],
            state=state,
            address=record["address"],
            region=record["region"],
            zone=record["zone"],
            token=record["token"],
            is_spot=record["is_spot"],
            usd_hour=record["usd_hour"],
            created_s=record["created_s"],
            ended_s=ended["ended_s"] if ended else None,
            reason=ended["reason"] if ended else "",
            handle=str(folder),
        )

    def _find(self, ids: Sequence[str]) -> list[Path]:
        folders = [self._root / id for id in ids if Path(id).name == id]
        return [folder for folder in folders if (folder / "node.json").exists()]

    def _end(self, ids: Sequence[str], *, state: str, reason: str) -> None:
        """End every node, then raise the first failure."""
        failures: list[Exception] = []
        for folder in self._find(ids):
            try:
                ended = read_json(folder / "ended.json")
                if ended and ended["state"] == "STOPPED" and state == "TERMINATED":
                    (folder / "ended.json").unlink(missing_ok=True)
                local_machine.record_end(str(folder), state=state, reason=reason)
                kill(folder)
                self._observe(folder)
            except (OSError, UnknownOutcomeError) as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def _start(self, ids: Sequence[str]) -> None:
        for folder in self._find(ids):
            node = self._observe(folder)
            if node and node.state is NodeState.TERMINATED:
                raise UsageError(f"node `{node.id}` is terminated and cannot be started")
            if node and node.state is NodeState.STOPPED:
                for name in LEFT_OVERS:
                    (folder / name).unlink(missing_ok=True)
                boot(folder)

    def _give_notice(self, ids: Sequence[str], notice_s: float) -> None:
        for folder in self._find(ids):
            if is_alive(folder) and not (folder / "preempt.json").exists():
                notice = {"notice_s": notice_s, "time_s": self._clock.now_s()}
                local_machine.write_json(str(folder / "preempt.json"), notice)
                local_machine.write_json(str(folder / "home/.broker/preemption"), notice)


def boot(folder: Path) -> None:
    """Start the node's processes and wait until they respond (about 40 ms)."""
    command = [sys.executable, "-I", "-S", local_machine.__file__, str(folder)]
    try:
        done = subprocess.run(
            command, env=make_env(folder), cwd=folder, timeout=BOOT_S_MAX, stdin=subprocess.DEVNULL, capture_output=True
        )
    except subprocess.TimeoutExpired as error:
        raise UnknownOutcomeError(f"node `{folder.name}` did not boot within {BOOT_S_MAX:g} s") from error
    if done.returncode and not is_alive(folder):
        raise UnknownOutcomeError(f"node `{folder.name}` did not boot", hints=(f"see `{folder / 'machine.log'}`",))


def make_env(folder: Path) -> dict[str, str]:
    """Return a clean environment in which `python` is ours."""
    passed = {name: os.environ[name] for name in PASSED_ENV if name in os.environ}  # noqa: TID251 - passed on
    search = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]  # noqa: TID251 - passed on
    home = {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "BROKER_NODE_DIR": str(folder)}
    return {**passed, **home, "PATH": os.pathsep.join(search), "PYTHONUNBUFFERED": "1"}


def is_alive(folder: Path) -> bool:
    """Return whether the keeper of a local node lives: it holds a lock that the kernel releases with it."""
    return is_locked(folder / "alive.lock")


def kill(folder: Path) -> None:
    """Kill the node's processes; each kills its own tree and releases the lock last."""
    give_up_s = time.monotonic() + KILL_S_MAX
    names = _list_names(folder)
    while is_alive(folder):
        pids = read_json(folder / "machine.json") or {}
        for pid in pids.values():
            if not local_machine.IS_LINUX or names & {*local_machine.read_text(f"/proc/{pid}/cmdline").split("\0")}:
                local_machine.send(pid, signal.SIGTERM)
        if time.monotonic() > give_up_s:
            raise UnknownOutcomeError(f"node `{folder.name}` does not terminate")
        time.sleep(0.002)  # noqa: TID251 - in a thread: waits for a kill


def _list_names(folder: Path) -> set[str]:
    """Return the paths that a node's processes may have been given: its state folder may be a link by now."""
    return {str(folder), str(folder.resolve())}


def determine_end(folder: Path) -> dict[str, Any]:
    """Return how a dead node ended. If neither process left a record (both were killed), clean up after them.

    Raises TransientError if the record cannot be written, e.g. on a full disk: failing is better than a list that
    changes later.
    """
    ended = read_json(folder / "ended.json")
    if ended is None:
        for name in _list_names(folder):
            for pid in local_machine.find_marked(name):
                local_machine.send(pid, signal.SIGKILL)
        local_machine.record_end(str(folder), state="TERMINATED", reason="crashed")
        ended = read_json(folder / "ended.json")
    if ended is None:
        raise TransientError(
            f"cannot record the end of node `{folder.name}`",
            hints=(f"free some disk space for `{folder.parent}`, and check that the folder is writable",),
        )
    return ended


def pick_address(taken: set[str]) -> str:
    """Pick a separate loopback address if the system has several (Linux: all of 127/8; macOS: one)."""
    for last in range(2, 255):
        address = f"127.0.0.{last}"
        if address in taken:
            continue
        with socket.socket() as probe:
            try:
                probe.bind((address, 0))
                return address
            except OSError:
                break
    return "127.0.0.1"


def socket_folder() -> Path:
    """Return a private folder with a short path.

    The path of a Unix socket is limited to 104 bytes (macOS) or 108 (Linux).
    """
    base = tempfile.gettempdir()
    folder = Path(base if len(base) < 50 else "/tmp") / f"broker-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise StateError(f"`{folder}` is not a private folder that you own", hints=(f"remove `{folder}`",))
    return folder


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; None if the file does not exist. Raises OSError.

    All of them are replaced atomically, so only a loss of power, which ends every node, leaves a damaged file. It is
    deleted: one such node must not make the list of all others fail.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        path.unlink(missing_ok=True)
        return None
    assert isinstance(value, dict), f"{path} does not contain a JSON object"
    return value
