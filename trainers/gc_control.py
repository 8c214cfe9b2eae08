"""Run Python's cyclic garbage collector only between steps, in the training thread.

Left alone, Python collects in whichever thread happens to allocate. A checkpoint's or the prefetcher's may do so
while an operation of the training thread, without the interpreter's lock, links a new node to the graph: torch's
tensors are traversed by reference counts that change just then, and live nodes are taken for garbage
(pytorch/pytorch#4437). DDP's backward then ends with `'NoneType' object has no attribute 'reducer'`. Ranks that
collect at the same step also do not wait for each other (as in torchtitan).
"""

import gc
from types import TracebackType

EVERY_STEPS = 20


class GcControl:
    """A context in which only `step` collects. Objects that exist when it is entered are never traversed."""

    def __init__(self) -> None:
        """Start with no steps counted."""
        self._steps = 0

    def __enter__(self) -> "GcControl":
        """Disable automatic collection."""
        gc.collect()
        gc.freeze()
        gc.disable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Enable automatic collection again."""
        gc.unfreeze()
        gc.enable()

    def step(self) -> None:
        """Collect if it is time; called between two steps."""
        self._steps += 1
        if self._steps % EVERY_STEPS == 0:
            gc.collect()
