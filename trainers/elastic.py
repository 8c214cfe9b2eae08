"""A worker of an elastic run: it joins a world, and restarts in the next one when ranks leave or arrive.

A worker that has lost a peer may hang in a collective that nothing can interrupt. The thread that is notified of the
change therefore saves the state in memory that outlives the program, and re-executes the program in the same process.
"""

import json
import math
import os
import queue
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainers.config import RunConfig
from trainers.errors import CheckpointError, StaleAttemptError, TrainerError
from trainers.launch import find_free_port
from trainers.preemption import EXIT_CODE_PREEMPTED, PreemptionNotice
from trainers.rendezvous_search import PreviousWorld, RendezvousAddresses, read_past
from trainers.standby import COMMAND_VARIABLE, EXIT_CODE_HANDED_OVER, PATH_VARIABLE, STATE_VARIABLE, hand_over

if TYPE_CHECKING:
    from trainers.checkpoint import CheckpointManager
    from trainers.live_state import LiveState
    from trainers.peer_checkpoint import PeerCheckpoint
    from trainers.ranks import Ranks
    from trainers.state_transfer import Holding
    from trainers.strategies.grid import Part

BEAT_S = 2.0
SEARCH_S = 3.0
# The death of a peer is detected at once, a vanished machine after `rendezvous.SILENCE_S_MAX`.
CHANGE_S_MAX = 40.0
# A rank whose error is not explained by then says so. The death of a peer has long been detected.
EXPLAINED_S_MAX = 5.0
# Errors in a program, which no lost peer causes: collectives raise RuntimeError, and their users TrainerError.
MISTAKES = (AttributeError, ImportError, LookupError, NameError, SyntaxError, TypeError)
VOTE_S_MAX = 120.0
# In the memory kept: step, name of the world that computed it, index of the part and number of parts.
HOLDING_VARIABLE = "BROKER_ELASTIC_HOLDING"
NOTHING_HELD = "[-1, 0, 0, 1]"


@dataclass(frozen=True, kw_only=True)
class World:
    """A generation of the gang, as announced by the rendezvous."""

    generation: int
    name: int  # random: the same step of another world is not bit-identical
    rank: int
    world_size: int
    address: str
    port: int
    holdings: tuple[tuple[int, int, int, int], ...]  # per rank: step in memory, its world, index and number of parts
    members: tuple[str, ...] = ()  # ids, if the rendezvous may move

    def read_holdings(self) -> "Sequence[Holding]":
        """Return what each rank kept in memory from the previous world."""
        from trainers.state_transfer import Holding
        from trainers.strategies.grid import Part

        return [
            Holding(step=step, world=world, part=Part(index=index, count=count))
            for step, world, index, count in self.holdings
        ]


class ElasticMember:
    """The membership of one process in a gang whose workers join and leave."""

    def __init__(self, meeting: str, *, unit: int = 1, notice: PreemptionNotice | None = None) -> None:
        """Connect to the rendezvous at `meeting` and wait for a world, whose size is a multiple of `unit` ranks.

        `meeting` is a `host:port`, or a comma-separated list with one for each node: then the run survives the loss of
        its first node.
        """
        # File descriptors of memory from the previous world.
        self._kept = [int(number) for number in os.environ.get(STATE_VARIABLE, "").split(",") if number]
        self._peers: PeerCheckpoint | None = None
        self._live: LiveState | None = None
        self._taken: tuple[int, int] | None = None  # step and world of the state that was taken over
        self._verdicts: queue.Queue[str] = queue.Queue()
        self.is_change_asked = False
        self._is_lost = threading.Event()
        self._is_explained = threading.Event()  # no peer was lost, or it is unknown whether one was
        self._past = read_past(os.environ)
        self._places = RendezvousAddresses(meeting, self._past)
        self._is_done = False  # whether the connection is expected to end
        self._notice = notice
        self._restarting = threading.Lock()
        self._id, self._unit = os.environ["BROKER_ELASTIC_MEMBER"], unit
        self._leader, self._wire = self._places.connect(self._leave_if_noticed)
        threading.Thread(target=self._beat, name="elastic-beat", daemon=True).start()
        self.world = self._join()
        os.environ.update(
            RANK=str(self.world.rank),
            WORLD_SIZE=str(self.world.world_size),
            MASTER_ADDR=self.world.address,
            MASTER_PORT=str(self.world.port),
            BROKER_ELASTIC_ORDER=json.dumps([0, self.world.rank]),
        )
        threading.Thread(target=self._listen, name="elastic", daemon=True).start()

    def offer(self, live: "LiveState") -> None:
        """Register the state to keep."""
        with self._restarting:  # a restart keeps the former state or this one
            self._live = live
            for descriptor in self._kept:  # the state of the previous world takes as much memory again
                os.close(descriptor)
            self._kept = []

    def join_peers(self, ranks: "Ranks", shared: Mapping[str, Any], config: RunConfig) -> "PeerCheckpoint":
        """Return the copies of the state in the memory of other nodes, and keep them when this program restarts.

        A collective call.
        """
        from trainers.peer_checkpoint import PeerCheckpoint

        self._peers = PeerCheckpoint(
            ranks,
            shared,
            every_steps=config.checkpoint.peer_every_steps,
            node=self._id.partition(".")[0],
            inherited=self._kept,
            timeout_s=config.watchdog.checkpoint_s,
        )
        return self._peers

    @property
    def keeps_state(self) -> bool:
        """Whether the next world may continue from this rank's live state.

        Then an update must not be queued before the device has received the gradients of all ranks: if a peer is lost,
        those that did not arrive are undefined.
        """
        return self._live is not None

    def take_over(self, ranks: "Ranks", part: "Part", shared: Mapping[str, Any]) -> int | None:
        """Fill the objects with the newest state that this world has in memory. A collective call.

        Return the step of that state, or None if there is none.
        """
        import torch

        from trainers.state_transfer import transfer_state

        def read() -> Any:
            with os.fdopen(os.dup(self._kept[0]), "rb") as file:
                file.seek(0)
                return torch.load(file, map_location="cpu", weights_only=True)

        self._taken = transfer_state(ranks, part, self.world.read_holdings(), read, shared)
        return None if self._taken is None else self._taken[0]

    def vote(self, *, is_leaving: bool) -> str:
        """Vote between two steps at which all ranks stop; return the verdict of the rendezvous.

        `stay`: continue; `again`: restart in a new world; `go`: leave alone; `stop`: end with all ranks.
        """
        self.is_change_asked = False
        if self._is_lost.is_set():
            return "stop"
        self._send(kind="vote", is_leaving=is_leaving)
        try:
            verdict = self._verdicts.get(timeout=VOTE_S_MAX)
        except queue.Empty:
            verdict = "stop"
        self._is_done = verdict in ("go", "stop")
        return verdict

    def finish(self) -> None:
        """Report the end of the run, so that the rendezvous does not treat this exit as a loss."""
        self._is_done = True
        self._send(kind="done")

    def await_change(self, error: Exception) -> None:
        """Wait after an error that a lost peer may have caused. Does not return if a peer was lost.

        Returns at once if no peer can have caused it: it is a mistake in a program, or all ranks have failed.
        """
        if isinstance(error, MISTAKES):
            return
        self._send(kind="failed")
        if not self._is_explained.wait(EXPLAINED_S_MAX):
            text = str(error).partition("\n")[0]
            print(
                f"note: rank {self.world.rank} failed with {type(error).__name__}: {text}; "
                f"this ends it in {CHANGE_S_MAX - EXPLAINED_S_MAX:.0f} s, unless another rank proves to be lost",
                file=sys.stderr,
                flush=True,
            )
            self._is_explained.wait(CHANGE_S_MAX - EXPLAINED_S_MAX)

    def restart(self) -> None:
        """Re-execute the program with the state in memory. Never returns; a second thread that calls it blocks."""
        self._restarting.acquire()
        if self._peers is not None:
            self._kept = self._peers.hold()
        elif self._live is not None:
            kept = keep_state(self._live)
            self._kept = [] if kept is None else [kept]
            os.environ[HOLDING_VARIABLE] = NOTHING_HELD if kept is None else json.dumps(self._describe(self._live))
        world = self.world
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        for descriptor in Path("/proc/self/fd").iterdir():
            # Inherited sockets of torch would stay open and keep a peer waiting.
            with suppress(OSError):
                number = int(descriptor.name)
                os.set_inheritable(number, number <= 2 or number in self._kept)
        os.environ[STATE_VARIABLE] = ",".join(map(str, self._kept))
        epoch = self._places.epoch
        past = PreviousWorld(leader=self._leader, generation=world.generation, members=world.members, epoch=epoch)
        os.environ.update(past.write())
        sys.stdout.flush()
        if self._notice is not None:
            self._notice.hand_on()
        path = os.environ.get(PATH_VARIABLE)
        connection = hand_over(path, os.environ, self._kept) if path else None
        if connection is not None:
            os._exit(EXIT_CODE_HANDED_OVER)
        command = os.environ.get(COMMAND_VARIABLE)  # a standby has a command line of its own
        os.execv(sys.executable, json.loads(command) if command else sys.orig_argv)

    def _describe(self, live: "LiveState") -> tuple[int, int, int, int]:
        """Return what this rank holds. A state that was taken over belongs to its world until the next step."""
        step, index, count = live.holding
        if self._taken is not None and self._taken[0] == step:
            return step, self._taken[1], index, count
        return step, self.world.name, index, count

    def _join(self) -> World:
        """Wait at the rendezvous for a world; search again if the rendezvous moves."""
        while True:
            self._send(**self._introduce())
            found = threading.Event()
            threading.Thread(target=self._search, args=(found,), name="elastic-search", daemon=True).start()
            try:
                world = self._await_world()
            finally:
                found.set()
            if world is not None:
                return world
            self._wire.close()
            self._leave_if_noticed()
            if self._places.is_one:
                raise TrainerError("the rendezvous of `--elastic` ended: the first node is lost")
            self._leader, self._wire = self._places.connect(self._leave_if_noticed)

    def _is_leaving(self) -> bool:
        """Return whether a preemption notice has arrived, and no world counts on this rank: it is new."""
        return not self._past.generation and self._notice is not None and self._notice.is_given()

    def _leave_if_noticed(self) -> None:
        if self._is_leaving():
            raise SystemExit(EXIT_CODE_PREEMPTED)

    def _introduce(self) -> dict[str, Any]:
        past = self._past
        hello = {
            "kind": "hello",
            "id": self._id,
            "port": find_free_port(),
            "order": json.loads(os.environ["BROKER_ELASTIC_ORDER"]),
            "holding": json.loads(os.environ.get(HOLDING_VARIABLE, NOTHING_HELD)),
            "unit": self._unit,
        }
        hello["epoch"] = self._places.epoch
        if past.generation and (self._leader, self._places.epoch) != (past.leader, past.epoch):
            hello |= {"generation": past.generation, "former": list(past.members), "lost": f"{past.leader}."}
        return hello

    def _search(self, found: threading.Event) -> None:
        """While waiting for a world, disconnect if the run continues at another node, or to leave."""
        wire, leader = self._wire, self._leader
        while not found.wait(SEARCH_S):
            if self._is_leaving() or (not self._places.is_one and self._places.find_better(leader)):
                if not found.is_set():
                    wire.close()
                return

    def _await_world(self) -> World | None:
        """Return the world, or None if the connection ends first."""
        with suppress(OSError, ValueError):
            while True:
                message = self._wire.read()
                if message.pop("kind") == "world":
                    message["members"] = tuple(message.get("members", ()))
                    return World(**{**message, "holdings": tuple(map(tuple, message["holdings"]))})
                if message.get("is_over"):  # the run ended before this worker was admitted
                    raise SystemExit(EXIT_CODE_PREEMPTED if message.get("is_stopped") else 0)
                if "reason" in message:
                    raise TrainerError(message["reason"])
        return None

    def _listen(self) -> None:
        while True:
            try:
                message = self._wire.read()
            except (OSError, ValueError):  # not those of a restart, which could not begin again
                break
            if message["kind"] == "joiner":
                self.is_change_asked = True
            elif message["kind"] == "change":
                self.restart()
            elif message["kind"] == "verdict":
                self._verdicts.put(message["verdict"])
            elif message["kind"] == "failed":
                self._is_explained.set()
        if not self._places.is_one and not self._is_done:
            self.restart()  # the leader was lost, its ranks with it
        self._is_lost.set()  # training continues, but the next loss ends the run
        self._is_explained.set()

    def _beat(self) -> None:
        while not self._is_lost.wait(BEAT_S):
            self._send(kind="beat")

    def _send(self, **message: Any) -> None:
        with suppress(OSError):
            self._wire.send(**message)


def keep_state(live: "LiveState") -> int | None:
    """Return the descriptor of the state in memory; None, with a note, if that fails, as without memory for a copy."""
    try:
        return live.keep()
    except Exception as error:  # it would end the thread that restarts the program
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        print(f"note: the state was not kept and is read from a checkpoint: {text}", file=sys.stderr, flush=True)
        return None


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """Decides what to do when the ranks stop between two steps because the world is about to change."""

    member: ElasticMember
    notice: PreemptionNotice
    is_kept: bool  # whether every rank holds the whole state in memory
    peers: "PeerCheckpoint | None" = None

    def decide(self, checkpoints: "CheckpointManager", step: int) -> str:
        """Return `stay`, `go` or `stop`. Does not return if this rank continues in another world."""
        verdict = self.member.vote(is_leaving=self.notice.is_given())
        is_changing = verdict in ("again", "go")
        is_kept = self.is_kept
        if is_changing and self.peers is not None:
            is_kept = self.peers.secure(step, is_leaving=verdict == "go")
        if is_changing and not is_kept:
            self._save(checkpoints, step)
        if verdict == "again":
            self.member.restart()
        return verdict

    def _save(self, checkpoints: "CheckpointManager", step: int) -> None:
        """Save for the next world. If that fails, on all ranks, the world continues from an older checkpoint.

        An error here would end the run as failed: the ranks that leave are preempted, and the others have work to do.
        """
        try:
            checkpoints.save(step, is_last=True)
            checkpoints.wait()
        except StaleAttemptError:
            raise
        except CheckpointError as error:
            if self.member.world.rank == 0:
                print(
                    f"warning: {error}; the ranks that stay resume from the checkpoint before",
                    file=sys.stderr,
                    flush=True,
                )


def join_world(config: RunConfig, notice: PreemptionNotice) -> ElasticMember | None:
    """Join the other workers of an elastic run and return this process's membership; None for any other run."""
    meeting = os.environ.get("BROKER_ELASTIC_AT")
    if meeting is None:
        if not config.elastic:
            return None
        raise TrainerError("`--elastic` requires the bundled launcher, not torchrun: `python -m trainers.launch -m`")
    if not hasattr(os, "memfd_create"):
        raise TrainerError("`--elastic` requires Linux, where memory can outlive a program (memfd)")
    return ElasticMember(meeting, unit=find_unit(config), notice=notice)


def find_unit(config: RunConfig) -> int:
    """Return the unit of an elastic world: its size must be a multiple of this number of ranks to fit the mesh."""
    from trainers.strategies import find_axes

    if config.mesh:
        return math.prod(int(word) for word in config.mesh.split("x") if word.isdecimal() and int(word))
    return int(os.environ["LOCAL_WORLD_SIZE"]) if len(find_axes(config.strategy)) > 1 else 1
