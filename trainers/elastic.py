"""A worker of an elastic run: finds its place in the world, and starts again in the next one.

A worker that has lost a peer may hang in a collective that nothing can interrupt. So the thread that hears of the
change keeps the state in memory that outlives the program, and executes the program anew, in the same process.
"""

import json
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainers.config import RunConfig
from trainers.errors import TrainerError
from trainers.launch import find_free_port
from trainers.preemption import PreemptionNotice

if TYPE_CHECKING:
    from trainers.checkpoint import CheckpointManager
    from trainers.loop import Position
    from trainers.ranks import Ranks

BEAT_S = 2.0
CONNECT_S_MAX = 120.0
# A peer's death is heard of at once, a machine that vanished after `rendezvous.SILENCE_S_MAX`.
CHANGE_S_MAX = 40.0
LOCK_S_MAX = 30.0
VOTE_S_MAX = 120.0


@dataclass(frozen=True, kw_only=True)
class World:
    """This generation, as the rendezvous told it."""

    generation: int
    rank: int
    world_size: int
    address: str
    port: int
    steps: tuple[int, ...]  # of the state that each rank holds in memory; -1 for none

    @property
    def step(self) -> int:
        """The newest state that some rank holds; -1 where none does."""
        return max(self.steps)


class Member:
    """This process's place among workers that come and go."""

    def __init__(self, meeting: str) -> None:
        """Come to the rendezvous at `host:port`, and wait to be let in."""
        self._kept = int(os.environ.get("BROKER_ELASTIC_STATE", "-1"))  # a file descriptor
        self._lock: Any = None
        self._position: Position | None = None
        self._shared: Mapping[str, Any] = {}
        self._verdicts: queue.Queue[str] = queue.Queue()
        self.is_change_asked = False
        self._is_lost = threading.Event()
        host, _, port = meeting.rpartition(":")
        self._wire = connect(host, int(port))
        self._lines = self._wire.makefile("rb")
        self._id = os.environ["BROKER_ELASTIC_MEMBER"]
        self._send(
            kind="hello",
            id=self._id,
            port=find_free_port(),
            order=json.loads(os.environ["BROKER_ELASTIC_ORDER"]),
            step=int(os.environ.get("BROKER_ELASTIC_STEP", "-1")),
        )
        threading.Thread(target=self._beat, name="elastic-beat", daemon=True).start()
        self.world = self._await_world()
        os.environ.update(
            RANK=str(self.world.rank),
            WORLD_SIZE=str(self.world.world_size),
            MASTER_ADDR=self.world.address,
            MASTER_PORT=str(self.world.port),
            BROKER_ELASTIC_ORDER=json.dumps([0, self.world.rank]),
        )
        threading.Thread(target=self._listen, name="elastic", daemon=True).start()

    def offer(self, lock: Any, position: "Position", shared: Mapping[str, Any]) -> None:
        """From now on this is the state to keep. It is whole, and of that position, while `lock` is free."""
        self._lock, self._position, self._shared = lock, position, shared

    def take_over(self, ranks: "Ranks", shared: Mapping[str, Any]) -> int | None:
        """Fill the objects with the newest state that any rank kept; its step, or None where nobody kept any.

        A collective call. Ranks that kept it read their own; to the others the first of those sends it.
        """
        best = self.world.step
        if best < 0:
            return None
        import torch

        if self.world.steps[ranks.rank] == best:
            with os.fdopen(os.dup(self._kept), "rb") as file:
                file.seek(0)
                state = torch.load(file, map_location="cpu", weights_only=True)
            for key, each in shared.items():
                each.load_state_dict(state[key])
        if any(step != best for step in self.world.steps):
            source = self.world.steps.index(best)
            for _, each in sorted(shared.items()):
                each.load_state_dict(spread(each.state_dict(), source))
        return best

    def vote(self, *, is_leaving: bool) -> str:
        """After a step at which all ranks stop: `stay`, `again` in a new world, `go` alone, or `stop` all together."""
        self.is_change_asked = False
        if self._is_lost.is_set():
            return "stop"
        self._send(kind="vote", is_leaving=is_leaving)
        try:
            return self._verdicts.get(timeout=VOTE_S_MAX)
        except queue.Empty:
            return "stop"

    def finish(self) -> None:
        """Tell that the run is over, so that nobody minds this process going."""
        self._send(kind="done")

    def await_change(self) -> None:
        """After an error that a lost peer may have caused: does not return if one is gone."""
        self._is_lost.wait(CHANGE_S_MAX)

    def restart(self) -> None:
        """Execute the program anew, with the state in memory. Does not return."""
        if self._position is not None:
            import torch

            if not self._lock.acquire(timeout=LOCK_S_MAX):
                print("error: the state cannot be kept: a step does not end", file=sys.stderr, flush=True)
                os._exit(1)
            # The lock is kept: this program changes nothing any more.
            kept = os.memfd_create("elastic", 0)
            with os.fdopen(os.dup(kept), "wb") as file:
                torch.save({key: each.state_dict() for key, each in self._shared.items()}, file)
            self._kept = kept
            os.environ["BROKER_ELASTIC_STEP"] = str(self._position.steps_done)
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        for each in Path("/proc/self/fd").iterdir():
            # Left open, sockets of torch's would live on and keep a peer waiting.
            with suppress(OSError):
                os.set_inheritable(int(each.name), int(each.name) <= 2 or int(each.name) == self._kept)
        os.environ["BROKER_ELASTIC_STATE"] = str(self._kept)
        sys.stdout.flush()
        os.execv(sys.executable, sys.orig_argv)

    def _await_world(self) -> World:
        while line := self._lines.readline():
            message = json.loads(line)
            if message.pop("kind") == "world":
                return World(**{**message, "steps": tuple(message["steps"])})
            if "reason" in message:
                raise TrainerError(message["reason"])
        raise TrainerError("the rendezvous of `--elastic` ended: the first node is gone")

    def _listen(self) -> None:
        with suppress(OSError):
            while line := self._lines.readline():
                message = json.loads(line)
                if message["kind"] == "joiner":
                    self.is_change_asked = True
                elif message["kind"] == "change":
                    self.restart()
                elif message["kind"] == "verdict":
                    self._verdicts.put(message["verdict"])
        self._is_lost.set()  # training goes on; the next loss ends it

    def _beat(self) -> None:
        while not self._is_lost.wait(BEAT_S):
            self._send(kind="beat")

    def _send(self, **message: Any) -> None:
        with suppress(OSError):
            self._wire.sendall(json.dumps(message).encode() + b"\n")


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """What is to be done when the ranks stop between two steps because the world is to change."""

    member: Member
    notice: PreemptionNotice
    is_kept: bool  # whether the state goes along in memory

    def decide(self, checkpoints: "CheckpointManager", step: int) -> str:
        """`stay`, `go` or `stop`; does not return where this rank goes on in another world."""
        verdict = self.member.vote(is_leaving=self.notice.is_given())
        if verdict in ("again", "go") and not self.is_kept:
            checkpoints.save(step)
            checkpoints.wait()
        if verdict == "again":
            self.member.restart()
        return verdict


def join_world(config: RunConfig) -> Member | None:
    """Meet the others of an elastic run, and learn this process's rank among them; None for any other run."""
    if not config.elastic:
        return None
    meeting = os.environ.get("BROKER_ELASTIC_AT")
    if meeting is None:
        raise TrainerError("`--elastic` needs our own launcher, not torchrun: `python -m trainers.launch -m`")
    if not hasattr(os, "memfd_create"):
        raise TrainerError("`--elastic` needs Linux: elsewhere no memory outlives a program")
    return Member(meeting)


def connect(host: str, port: int) -> socket.socket:
    """Try until the first node listens."""
    end_s = time.monotonic() + CONNECT_S_MAX
    while True:
        try:
            wire = socket.create_connection((host, port), timeout=10)
            wire.settimeout(None)
            return wire
        except OSError as error:
            if time.monotonic() > end_s:
                raise TrainerError(f"the rendezvous of `--elastic` at {host}:{port} cannot be reached") from error
            time.sleep(0.2)


def spread(state: Any, source: int) -> Any:
    """The state of the rank `source`, on every rank. Tensors are filled where they lie."""
    import torch
    import torch.distributed as dist

    if isinstance(state, torch.Tensor):
        dist.broadcast(state.detach(), src=source)
        return state
    if isinstance(state, dict):
        return {key: spread(each, source) for key, each in state.items()}
    box = [state]
    dist.broadcast_object_list(box, src=source)
    return box[0]
