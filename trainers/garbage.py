"""Cyclic garbage is collected between steps, by the thread that trains, and at no other time.

Left alone, Python collects in whichever thread happens to allocate. A checkpoint's or the prefetcher's may do so
while an operation of the training thread, without the interpreter's lock, links a new node to the graph: torch's
tensors are traversed by reference counts that change just then, and live nodes are taken for garbage
(pytorch/pytorch#4437). DDP's backward then ends with `'NoneType' object has no attribute 'reducer'`. Ranks that
collect at the same step also do not wait for each other.
"""

import gc
from types import TracebackType

EVERY_STEPS = 20


class Garbage:
    """A context: inside, only `step` collects. What lives at its beginning lives for the whole run, and is left out."""

    def __init__(self) -> None:
        self._steps = 0

    def __enter__(self) -> "Garbage":
        """From here on."""
        gc.collect()
        gc.freeze()
        gc.disable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """As Python does it again."""
        gc.unfreeze()
        gc.enable()

    def step(self) -> None:
        """To be called between two steps."""
        self._steps += 1
        if self._steps % EVERY_STEPS == 0:
            gc.collect()
