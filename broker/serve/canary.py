"""A canary: a second version of a service that gets a share of its requests, in `canary.json` until it ends.

The service's own version remains the desired one. `promote` makes the canary the desired version, which then replaces
the other like any update; `rollback` removes the file, and its replicas are drained like those of an old version.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from broker.frozen import frozen
from broker.serve.files import ServiceFolder, read_file, write_file
from broker.serve.reconciling import Slot


@frozen
class Canary:
    """The version on trial, and its share of requests, between 0 and 1."""

    version: int
    share: float

    def choose_slots(self, slots: Sequence[Slot]) -> Sequence[Slot]:
        """Return the slots of its replicas: its share of the service's slots, at least one."""
        return slots[: max(1, math.ceil(self.share * len(slots)))]


def read_canary(folder: ServiceFolder) -> Canary | None:
    """Return the canary; None if there is none. Raises StateError for a damaged file."""
    return read_file(folder.canary, Canary)


def write_canary(folder: ServiceFolder, canary: Canary) -> None:
    """Start a canary, or change its share. Raises StateError."""
    write_file(folder.canary, canary)


def remove_canary(folder: ServiceFolder) -> None:
    """End a canary; without one, change nothing."""
    folder.canary.unlink(missing_ok=True)
