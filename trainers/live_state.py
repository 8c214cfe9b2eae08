"""The state in this rank's memory from which the next world of an elastic run may continue: that of a complete step.

A peer may be lost at any moment of a step:

    forward, backward   parameters belong to the last step; buffers and extra state may have changed: copies are kept
    update              interrupted by an error, it leaves a mixture of two steps: nothing is kept
    otherwise           everything belongs to the last step
"""

import os
import sys
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # torch is imported after SIGTERM is handled
    from torch import Tensor, nn

    from trainers.loop import Position
    from trainers.strategies.grid import Part

# Time for an update to end. If it waits for a lost peer, it may never do so.
LOCK_S_MAX = 30.0


class ChangeLock:
    """Held while a step changes the state. An error in between leaves the state broken for good."""

    def __init__(self) -> None:
        """Start with a free lock and a whole state."""
        self._lock = threading.Lock()
        self.is_broken = False
        # Called at the end of each change, before the lock is released.
        self.on_change: Callable[[], None] = lambda: None

    def __enter__(self) -> None:
        """Begin a change."""
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End a change."""
        self.is_broken = True
        try:
            if kind is None:
                self.on_change()
                self.is_broken = False
        finally:
            self._lock.release()

    def end_changes(self) -> bool:
        """Prevent all later changes; return whether the state is that of a complete step."""
        return self._lock.acquire(timeout=LOCK_S_MAX) and not self.is_broken


class LiveState:
    """The part of the state on this rank, as of its last complete step."""

    def __init__(
        self,
        changing: ChangeLock,
        position: "Position",
        part: "Part",
        shared: Mapping[str, Any],
        wait: Callable[[], None] = lambda: None,
    ) -> None:
        """Follow the state that changes under `changing`; all of it now belongs to the step of `position`.

        `wait` returns when an update is done on the device.
        """
        import torch

        from trainers.extra_state import pack_extra_state

        self._changing, self._position, self._part, self._shared, self._wait = changing, position, part, shared, wait
        self._modules: dict[str, nn.Module] = {
            key: holder for key, holder in shared.items() if isinstance(holder, torch.nn.Module)
        }
        # Requested in the middle of a step, the state dict of a sharded module would reshard its parameters.
        self._fixed = {
            key: pack_extra_state(module.state_dict(keep_vars=True)) for key, module in self._modules.items()
        }
        self._buffers: dict[str, dict[str, Tensor]] = {key: {} for key in self._modules}
        self._extra: dict[str, dict[str, bytes]] = {}
        self._copy_changing()
        changing.on_change = self._complete

    @property
    def holding(self) -> tuple[int, int, int]:
        """The step, the index of the part, and the number of parts."""
        return self._position.steps_done, self._part.index, self._part.count

    def keep(self) -> int | None:
        """Save the state in memory that outlives the program; return its descriptor. Call it once.

        Returns None if this rank's state does not belong to one step.
        """
        import torch

        from trainers.ranks import abort_collectives
        from trainers.state_transfer import keep

        if not self._changing.end_changes():
            message = (
                "note: a step was interrupted while it changed the state, which is therefore read from a checkpoint"
            )
            print(message, file=sys.stderr, flush=True)
            return None
        # On a GPU the copies wait for all that is queued before them. Of a step that waits for a lost peer, this never
        # includes the update (`ElasticMember.keeps_state`), so the state stays that of `position`.
        abort_collectives()
        kept = os.memfd_create("elastic", 0)
        with os.fdopen(os.dup(kept), "wb") as file:
            state = {
                key: {**self._fixed[key], **self._buffers[key], **self._extra[key]}
                if key in self._fixed
                else holder.state_dict()
                for key, holder in self._shared.items()
            }
            torch.save(keep(state), file)
        return kept

    def _complete(self) -> None:
        self._wait()
        self._copy_changing()

    def _copy_changing(self) -> None:
        """Copy buffers and extra state before the next forward pass changes them.

        On a GPU the copies are queued before it.
        """
        from trainers.extra_state import read_extra_state

        for key, module in self._modules.items():
            self._extra[key] = read_extra_state(module, self._fixed[key])
            copies = self._buffers[key]
            for name, buffer in find_buffers(module, self._fixed[key]).items():
                place = copies.get(name)
                if place is None or place.shape != buffer.shape or place.dtype != buffer.dtype:
                    copies[name] = buffer.detach().clone()
                else:
                    place.copy_(buffer.detach())


def find_buffers(module: "nn.Module", state: Mapping[str, Any]) -> dict[str, "Tensor"]:
    """Return the module's present buffers among the names of its state: a pass may have replaced some by others."""
    buffers = module.named_buffers(remove_duplicate=False)
    return {name: buffer for name, buffer in buffers if name in state}
