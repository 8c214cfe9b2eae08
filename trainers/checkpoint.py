"""Saves and restores everything that must survive, in the background, complete or not at all.

Knows no strategy: it is handed objects with a `state_dict`, by name. On the storage:
`attempts/<number>` registers attempts; `step-<n>-attempt-<n>-<run>/` holds shards and, written last, `manifest.json`.
"""

import hashlib
import json
import re
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from trainers.errors import CheckpointError, StaleAttemptError
from trainers.ranks import Ranks
from trainers.storage import Storage

MANIFEST_VERSION = 2
# Checkpoints in a row that may fail before the run does: what is not saved is paid for again after a preemption.
FAILURES_MAX = 3
NAME_PATTERN = re.compile(r"step-(\d{8,})-attempt-(\d{4,})-([0-9a-f]{8})")

Decision = TypeVar("Decision")

# True and intended where one process trains alone.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")
warnings.filterwarnings("ignore", message="Detected an existing checkpoint")  # one that failed, written once more


class Stateful(Protocol):
    """An object that must survive. Tensors in its state are the live ones, so a checkpoint can be read into them."""

    def state_dict(self) -> dict[str, Any]:
        """All that `load_state_dict` needs, in nested dicts."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Take over a saved state."""
        ...


class HeldByOne:
    """State whose values differ between ranks, of which one rank's are shared: it alone writes them, all read them."""

    def __init__(self, state: Stateful, *, is_holder: bool) -> None:
        """Stand for `state`."""
        self._state, self.is_holder = state, is_holder

    def state_dict(self) -> dict[str, Any]:
        """The state's."""
        return self._state.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The state's."""
        self._state.load_state_dict(state)


@dataclass(frozen=True, kw_only=True)
class CheckpointName:
    """What a checkpoint folder's name says."""

    step: int
    attempt: int
    run: str

    def __str__(self) -> str:
        return f"step-{self.step:08d}-attempt-{self.attempt:04d}-{self.run}"


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a manifest says lies beside it, and who wrote that."""

    world_size: int
    shared: frozenset[str]
    own: frozenset[str]


class CheckpointManager:
    """One job's checkpoints, as seen by one attempt. All ranks call the same verbs in the same order."""

    def __init__(
        self,
        storage: Storage,
        ranks: Ranks,
        *,
        attempt: int,
        keep: int,
        shared: Mapping[str, Stateful],
        own: Mapping[str, Stateful],
    ) -> None:
        """Register the attempt. `shared` state is one for all ranks; `own` differs from rank to rank."""
        self._storage, self._ranks = storage, ranks
        self._attempt, self._keep = attempt, keep
        self._shared, self._own = shared, own
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None
        self._failures = 0  # in a row
        self._step_saved: int | None = None
        self.step_committed: int | None = None
        self._is_copied = threading.Event()
        self._is_copied.set()
        self.stall_s = 0.0  # how long the last `save`, and `settle` after it, held up their caller
        self.write_s = 0.0  # how long the last committed one was on its way, training going on
        self._run = ranks.share(uuid.uuid4().hex[:8])
        self._decide(self._register)

    def _register(self) -> None:
        self._storage.create(f"attempts/{self._attempt:010d}", b"")
        if newer := self._find_newer_attempt():
            raise StaleAttemptError(newer)

    def _decide(self, look: Callable[[], Decision]) -> Decision:
        """Let the first rank look, and every rank have its answer, or raise its error."""
        answer: tuple[Any, CheckpointError | None] = None, None
        if self._ranks.is_first:
            try:
                answer = look(), None
            except CheckpointError as error:
                answer = None, error
            except OSError as error:
                answer = None, CheckpointError(f"checkpoints cannot be reached: {error}")
        value, problem = self._ranks.share(answer)
        if problem is not None:
            raise problem
        decision: Decision = value
        return decision

    def restore(self) -> int | None:
        """Load the newest complete checkpoint into the objects and return its step; None where there is none.

        Torn and corrupt ones are passed over with a warning. The first rank looks and decides for all.
        """
        choice = self._decide(lambda: find_newest(self._storage))
        if choice is None:
            return None
        name, contents = choice
        is_same_world = contents.world_size == self._ranks.world_size
        if not is_same_world and self._ranks.is_first:
            _warn(
                f"`{name}` was written by {contents.world_size} ranks, not {self._ranks.world_size}; "
                "random numbers start anew"
            )
        # Another strategy may have left out what this one keeps besides; that begins as it was made.
        shared = {key: each for key, each in self._shared.items() if key in contents.shared}
        own = {key: each for key, each in self._own.items() if key in contents.own and is_same_world}
        # One after the other: both may be read into the same tensors, and a rank's own values are to stay.
        state = {key: each.state_dict() for key, each in shared.items()}
        self._load(state, str(name))
        for key, each in shared.items():
            each.load_state_dict(state[key])
        if own:
            own_state = {self._own_key: {key: each.state_dict() for key, each in own.items()}}
            self._load(own_state, str(name))
            for key, each in own.items():
                each.load_state_dict(own_state[self._own_key][key])
        self._step_saved = self.step_committed = name.step
        return name.step

    def save(self, step: int) -> None:
        """Copy and write the state in the background. Waits for a save still under way.

        That one's failure is a warning, for training is worth more than one checkpoint; an error when the attempt is
        stale or a few in a row failed. No tensor of the state may change before `settle` returns: forward and
        backward may go on, the optimizer not. Saving the step that was saved last does nothing.
        """
        begin = time.perf_counter()
        try:
            self.wait()
        except StaleAttemptError:
            raise
        except CheckpointError as error:
            if self._failures >= FAILURES_MAX:
                raise
            if self._ranks.is_first:
                _warn(f"{error}; training goes on to the next checkpoint")
        if step == self._step_saved:
            return
        # Asked on every rank, for the ranks may have to settle what the state is.
        found = {key: (each, each.state_dict()) for key, each in self._shared.items()}
        live = {key: part for key, (each, part) in found.items() if getattr(each, "is_holder", True)}
        live[self._own_key] = {key: each.state_dict() for key, each in self._own.items()}
        self._step_saved = step
        name = CheckpointName(step=step, attempt=self._attempt, run=self._run)
        self._thread = threading.Thread(target=self._write, args=(name, live), name=f"checkpoint-{step}")
        self._is_copied.clear()
        self._thread.start()
        self.stall_s = time.perf_counter() - begin

    def settle(self) -> None:
        """Return when the state may change again: when it is copied, though not yet written."""
        if not self._is_copied.is_set():
            begin = time.perf_counter()
            self._is_copied.wait()
            self.stall_s += time.perf_counter() - begin

    def wait(self) -> None:
        """Return when the save under way is committed; raise what went wrong with it, on every rank."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            self._failures += 1
            self._step_saved = self.step_committed
            raise failure
        if self._step_saved is not None and self._step_saved == self.step_committed:
            self._failures = 0

    @property
    def _own_key(self) -> str:
        return f"rank-{self._ranks.rank}"

    def _load(self, state: dict[str, Any], name: str) -> None:
        import torch.distributed.checkpoint as dcp  # 0.6 s, which a fresh start need not pay

        is_alone = self._ranks.world_size == 1
        reader = self._storage.open_reader(name)
        dcp.load(state, storage_reader=reader, process_group=self._ranks.background_group, no_dist=is_alone)

    def _write(self, name: CheckpointName, live: dict[str, Any]) -> None:
        """Runs in the background thread; whatever goes wrong is kept for the next `wait`."""
        begin = time.perf_counter()
        try:
            try:
                state = _copy(live)
            finally:
                self._is_copied.set()
            import torch.distributed.checkpoint as dcp

            is_alone = self._ranks.world_size == 1
            writer = self._storage.open_writer(str(name))
            dcp.save(state, storage_writer=writer, process_group=self._ranks.background_group, no_dist=is_alone)
            files = self._collect_files(str(name))
            problem = self._commit(name, files) if self._ranks.is_first else None
            problem = self._ranks.share(problem, is_background=True)
            if problem is not None:
                raise problem
            self.step_committed = name.step
            self.write_s = time.perf_counter() - begin
            if self._ranks.is_first:
                remove_old(self._storage, newest=name, keep=self._keep)
        except CheckpointError as error:
            self._failure = error
        except BaseException as error:  # the library's own failure is no Exception
            self._failure = CheckpointError(f"`{name}` was not written: {error}")
            self._failure.__cause__ = error

    def _collect_files(self, name: str) -> dict[str, list[Any]]:
        """Every file with its checksum; each rank seals what it wrote itself."""
        mine: dict[str, Any] = {}
        problem: CheckpointError | None = None
        try:
            for file in self._storage.list_names(name):
                # The library names a rank's files `__<rank>_<n>.distcp`; the first rank writes the index beside them.
                if file.startswith(f"__{self._ranks.rank}_") or (self._ranks.is_first and file == ".metadata"):
                    mine[file] = self._storage.seal(f"{name}/{file}")
        except OSError as error:  # told to all, who would wait for this rank's answer
            problem = CheckpointError(f"`{name}` was not sealed: {error}")
        parts = self._ranks.collect((mine, problem))
        for _, failure in parts:
            if failure is not None:
                raise failure
        return {file: seal for part, _ in parts for file, seal in part.items()}

    def _commit(self, name: CheckpointName, files: dict[str, list[Any]]) -> CheckpointError | None:
        manifest = {
            "version": MANIFEST_VERSION,
            "step": name.step,
            "attempt": name.attempt,
            "world_size": self._ranks.world_size,
            "shared": sorted(self._shared),
            "own": sorted(self._own),
            "files": files,
        }
        content = json.dumps({**manifest, "seal": seal_manifest(manifest)}, indent=1).encode()
        try:
            if newer := self._find_newer_attempt():
                return StaleAttemptError(newer)
            is_ours = self._storage.create(f"{name}/manifest.json", content)
            # A write whose answer was lost on the way was repeated, and met itself.
            is_ours = is_ours or self._storage.read(f"{name}/manifest.json") == content
        except OSError as error:  # told to all ranks, rather than leaving the others to wait for an answer
            return CheckpointError(f"the manifest of `{name}` was not written: {error}")
        if not is_ours:
            return CheckpointError(f"`{name}` was already committed by someone else")
        return None

    def _find_newer_attempt(self) -> str | None:
        # Registered attempts are files that are only ever added, so the highest is a fence that cannot move back.
        highest = max((int(each) for each in self._storage.list_names("attempts") if each.isdigit()), default=0)
        if highest <= self._attempt:
            return None
        return f"attempt {self._attempt} is stale: attempt {highest} of this job has begun"


def find_newest(storage: Storage) -> tuple[CheckpointName, Contents] | None:
    """The newest complete checkpoint and what is in it, passing over what is torn or corrupt."""
    for name in list_checkpoints(storage):
        found = verify(storage, name)
        if isinstance(found, Contents):
            return name, found
        _warn(f"skipping checkpoint `{name}`: {found}")
    return None


def list_checkpoints(storage: Storage) -> list[CheckpointName]:
    """All checkpoint folders, complete or not, newest first."""
    matches = [match for match in map(NAME_PATTERN.fullmatch, storage.list_names("")) if match]
    names = [CheckpointName(step=int(match[1]), attempt=int(match[2]), run=match[3]) for match in matches]
    return sorted(names, key=lambda name: (name.step, name.attempt, name.run), reverse=True)


def verify(storage: Storage, name: CheckpointName) -> Contents | str:
    """Check every file against the manifest: what is in the checkpoint, or what is wrong with it."""
    content = storage.read(f"{name}/manifest.json")
    if content is None:
        return "it has no manifest, so writing it was cut short"
    try:
        manifest = json.loads(content)
        version, files = manifest["version"], dict(manifest["files"])
        seal = manifest.pop("seal", None)
        contents = Contents(
            world_size=int(manifest["world_size"]),
            shared=frozenset(manifest["shared"]),
            own=frozenset(manifest["own"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its manifest cannot be read ({error})"
    if version != MANIFEST_VERSION:
        return f"its manifest has version {version}, not {MANIFEST_VERSION}"
    if seal != seal_manifest(manifest):
        return "its manifest is not what was written"
    for file, seal in files.items():
        found = storage.checksum(f"{name}/{file}")
        if found is None:
            return f"`{file}` is missing"
        if list(found) != seal:
            return f"`{file}` is not what was written"
    return contents


def seal_manifest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of all that a manifest says; a flipped bit may well leave it readable."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def remove_old(storage: Storage, *, newest: CheckpointName, keep: int) -> None:
    """Keep the last complete checkpoints; remove older ones, and torn ones that no live process can still finish."""
    kept = 0
    for name in list_checkpoints(storage):
        is_complete = storage.read(f"{name}/manifest.json") is not None
        kept += is_complete
        # An attempt above ours is not ours to judge, and our own save is the newest.
        if name.attempt > newest.attempt or name == newest:
            continue
        if kept > keep or not is_complete:
            # The manifest goes first: a removal cut short leaves a torn checkpoint, not a corrupt one.
            storage.delete(f"{name}/manifest.json")
            storage.delete(str(name))


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copy(each) for key, each in value.items()}
    return value


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)
