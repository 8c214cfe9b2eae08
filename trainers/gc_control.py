"""Run Python's cyclic garbage collector only between steps, in the training thread.

By default Python collects in whichever thread allocates. The checkpoint or prefetch thread may collect while an
operation of the training thread, which has released the GIL, links a new node to the autograd graph: the collector then
reads reference counts that are changing, and frees live nodes (pytorch/pytorch#4437). DDP's backward pass fails with
`'NoneType' object has no attribute 'reducer'`. Collecting at the same step on all ranks also keeps them from waiting
for each other (as in torchtitan).
"""

import gc
from types import TracebackType

EVERY_STEPS = 20


class GcControl:
    """A context in which only `step` collects. Objects that exist on entry are frozen and never traversed."""

    def __init__(self) -> None:
        """Start counting at step 0."""
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
        """Collect if a collection is due. Call between two steps."""
        self._steps += 1
        if self._steps % EVERY_STEPS == 0:
            gc.collect()
