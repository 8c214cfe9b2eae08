"""Restore the newest complete checkpoint, which all ranks read and verify together.

The first rank reads the small parts (names, manifest, index) for all; every rank verifies the files that it needs
itself.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from trainers.errors import CheckpointError
from trainers.extra_state import pack_extra_state, unpack_extra_state
from trainers.manifest import (
    INDEX,
    CheckpointName,
    Contents,
    DamagedFile,
    divide,
    list_checkpoints,
    read_index,
    read_manifest,
    warn,
    warn_skipped,
)
from trainers.optimizer import local
from trainers.ranks import Ranks
from trainers.restore_progress import RestoreProgress
from trainers.snapshot import copy_state
from trainers.storage import Storage

if TYPE_CHECKING:
    from trainers.verified_reader import VerifiedReader

Decision = TypeVar("Decision")


class Stateful(Protocol):
    """An object with checkpointed state, whose tensors are the live ones: a checkpoint is read into them."""

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, in nested dicts."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Replace the state by a saved one."""
        ...


class Restorer:
    """Restores the objects of one rank. All ranks call the same methods in the same order."""

    def __init__(
        self,
        storage: Storage,
        ranks: Ranks,
        *,
        shared: Mapping[str, Stateful],
        own: Mapping[str, Stateful],
        find_conflict: Callable[[Mapping[str, Any]], str],
    ) -> None:
        """Restore into `shared` state, common to all ranks, and this rank's `own`."""
        self._storage, self._ranks, self._find_conflict = storage, ranks, find_conflict
        self._shared, self._own = shared, own
        self._own_name = name_own(ranks)
        self.skipped: list[CheckpointName] = []  # incomplete or damaged

    def restore(self, progress: RestoreProgress) -> CheckpointName | None:
        """Load the newest complete checkpoint into the objects and return its name; None if there is none.

        All ranks skip incomplete and corrupt checkpoints, with a warning. Each rank reads and verifies into a copy of
        the state, so that a damaged checkpoint leaves no trace; the copy takes as much memory as a save. `progress`
        reports the bytes read by all ranks.
        """
        names = decide(self._ranks, lambda: list_checkpoints(self._storage))
        live: dict[str, Any] | None = None
        for name in names:
            index_read = decide(self._ranks, lambda name=name: self._read_index(name))  # type: ignore[misc]
            if isinstance(index_read, DamagedFile):
                self._warn_skipped(name, index_read)
                continue
            contents, index = index_read
            if problem := self._find_conflict(contents.about):
                raise CheckpointError(
                    f"`{name}` does not fit this model: {problem}\n\n"
                    "hint: use the flags of the run that wrote it, or set `$BROKER_CHECKPOINT_DIR` to a new folder"
                )
            live = live or self._find_live()
            chosen = {key: state for key, state in live.items() if self._is_in(key, contents)}
            with progress.follow(name.step, str(name)):
                staged, damage = self._stage(name, contents, index, chosen, progress)
            if damage is not None:
                self._warn_skipped(name, damage)
                continue
            self._take_over(chosen, staged)
            if contents.world_size != self._ranks.world_size and self._ranks.is_first:
                warn(
                    f"`{name}` was written by {contents.world_size} ranks, not {self._ranks.world_size}; "
                    "random numbers start again"
                )
            return name
        return None

    def _read_index(self, name: CheckpointName) -> tuple[Contents, bytes] | DamagedFile:
        """Return contents and index of a checkpoint, or its damage. The first rank reads both, which are small."""
        try:
            contents = read_manifest(self._storage, name)
            return contents, read_index(self._storage, name, contents)
        except DamagedFile as damage:
            return damage

    def _find_live(self) -> dict[str, Any]:
        """Return the live state by its names in a checkpoint. A collective call for some strategies."""
        live = {key: holder.state_dict() for key, holder in self._shared.items()}
        live[self._own_name] = {key: holder.state_dict() for key, holder in self._own.items()}
        packed: dict[str, Any] = pack_extra_state(live)
        return packed

    def _is_in(self, key: str, contents: Contents) -> bool:
        """Return whether the checkpoint contains this state. State that it lacks keeps its initial values."""
        if key != self._own_name:
            return key in contents.shared
        return contents.world_size == self._ranks.world_size

    def _stage(
        self, name: CheckpointName, contents: Contents, index: bytes, chosen: dict[str, Any], progress: RestoreProgress
    ) -> tuple[dict[str, Any], DamagedFile | None]:
        """Read a checkpoint into a copy of the state; return the copy and the damage that any rank found."""
        import torch.distributed.checkpoint as dcp  # takes 0.6 s, and a fresh start does not need it
        from torch.distributed.checkpoint.api import CheckpointException

        from trainers.verified_reader import VerifiedReader

        ranks, staged = self._ranks, copy_state(chosen)
        if self._own_name in staged:
            own = {key: state for key, state in staged.pop(self._own_name).items() if key in contents.own}
            staged |= {self._own_name: own} if own else {}
        reader = VerifiedReader(
            self._storage, name, contents, index, note_wanted=progress.note_wanted, note_read=progress.note_read
        )
        alone = ranks.world_size == 1
        try:
            dcp.load(staged, storage_reader=reader, process_group=ranks.background_group, no_dist=alone)
        except CheckpointException as error:  # on all ranks: planning found a mismatch
            reasons = [str(failure) for failure, _ in error.failures.values()]
            raise CheckpointError(
                f"`{name}` does not fit this model: {reasons[0] if reasons else error}\n\n"
                "hint: use the `--model.*` flags of the run that wrote it, and if that was before vocabularies were "
                "rounded up, `--model.vocabulary_multiple 1`; to start a new run, set `$BROKER_CHECKPOINT_DIR` to a "
                "new folder"
            ) from None
        damage, verified = self._agree(reader)
        if damage is None:
            # Files that no rank needs, such as random numbers of former ranks, must be intact too.
            rest = contents.files.keys() - verified - {INDEX}
            reader.verify_files(divide(rest, rank=ranks.rank, world_size=ranks.world_size))
            damage, _ = self._agree(reader)
        return staged, damage

    def _agree(self, reader: "VerifiedReader") -> tuple[DamagedFile | None, set[str]]:
        """Return the damage that any rank found, and the files that the ranks have verified. A collective call.

        Raises CheckpointError on every rank if one could not read at all: then the checkpoint may be intact.
        """
        problem = reader.problem
        if isinstance(problem, OSError):
            problem = CheckpointError(f"checkpoints cannot be reached: {problem}")
        elif problem is not None and not isinstance(problem, DamagedFile):
            problem = CheckpointError(f"the checkpoint cannot be loaded: {problem}")
        parts = self._ranks.collect((problem, reader.verified))
        problems = [failure for failure, _ in parts if failure is not None]
        for failure in problems:
            if isinstance(failure, CheckpointError):
                raise failure from reader.problem
        return next(iter(problems), None), {file for _, files in parts for file in files}

    def _take_over(self, live: dict[str, Any], staged: dict[str, Any]) -> None:
        # In this order: both may refer to the same tensors, and the rank's own values take precedence.
        for key, holder in self._shared.items():
            if key in staged:
                holder.load_state_dict(unpack_extra_state(_fill(live[key], staged[key])))
        for key, state in staged.get(self._own_name, {}).items():
            self._own[key].load_state_dict(unpack_extra_state(_fill(live[self._own_name][key], state)))

    def _warn_skipped(self, name: CheckpointName, damage: DamagedFile) -> None:
        self.skipped.append(name)
        if self._ranks.is_first:
            warn_skipped(name, damage)


def name_own(ranks: Ranks) -> str:
    """Return the name of this rank's own state in a checkpoint."""
    return f"rank-{ranks.rank}"


def decide(ranks: Ranks, find: Callable[[], Decision]) -> Decision:
    """Call `find` on the first rank; return its result, or raise its error, on every rank."""
    answer: tuple[Any, CheckpointError | None] = None, None
    if ranks.is_first:
        try:
            answer = find(), None
        except CheckpointError as error:
            answer = None, error
        except OSError as error:
            answer = None, CheckpointError(f"checkpoints cannot be reached: {error}")
        except Exception as error:  # whatever it is, all ranks wait for the answer
            answer = None, CheckpointError(f"checkpoints cannot be read: {error!r}")
    value, problem = ranks.share(answer, is_background=True)
    if problem is not None:
        raise problem
    decision: Decision = value
    return decision


def _fill(live: Any, staged: Any) -> Any:
    """Return the live state with the staged values; tensors are copied in place."""
    if isinstance(live, dict):
        return {key: _fill(value, staged[key]) for key, value in live.items()}
    if not isinstance(live, torch.Tensor):
        return staged
    with torch.no_grad():
        local(live).copy_(local(staged))
    return live
