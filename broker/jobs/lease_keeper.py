"""Keep the lease of a controller process while its event loop is blocked, by a thread with its own connection.

In a shared store, this is the lease of its claims; in a state folder, the heartbeat of the leader. The thread is idle
unless the loop has been silent for `SILENT_S`. It only extends a lease that has not ended: it claims nothing, and
brings back no lease that ended or was resigned. Epochs alone decide who may write (`state/claims.py`,
`state/leader.py`), so an extension at the wrong moment delays a takeover and allows no write. A loop that stays silent
for `HANG_S_MAX` counts as hung: its lease ends, and other processes take over its jobs. A process that is killed or
suspended loses its thread as well.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from broker.clock import Clock
from broker.errors import BrokerError
from broker.state.claims import LEASE_S
from broker.state.store import Store

log = logging.getLogger(__name__)

# The loop renews the lease every two seconds, so its last lease ends at least seven seconds after its last turn.
SILENT_S = 2.0
CHECK_EVERY_S = 1.0  # a first extension follows two to three seconds after the last turn
HANG_S_MAX = 60.0  # far above any blocking call that ends, such as planning on a slow machine
JOIN_S_MAX = LEASE_S


class LeaseHolder(Protocol):
    """A holder of a lease, and when its event loop last had a turn."""

    turn_s: float

    def extend(self, store: Store) -> bool:
        """Extend the lease if it has not ended, through this connection; return whether there is one now."""
        ...


class LeaseKeeper:
    """Decides, at each step, whether the lease has to be extended for the loop; used by one thread."""

    def __init__(self, holder: LeaseHolder, clock: Clock, open_store: Callable[[], Store]) -> None:
        self._holder = holder
        self._clock = clock
        self._open_store = open_store
        self._store: Store | None = None
        self._warned_s = 0.0  # the last turn of the loop before the newest warning

    def step(self) -> None:
        """Extend the lease if the loop is silent. If that fails, the next step tries again."""
        turn_s = self._holder.turn_s
        silent_s = self._clock.now_s() - turn_s
        if not SILENT_S <= silent_s < HANG_S_MAX:  # a clock that was set does not extend the lease either
            if silent_s >= HANG_S_MAX:
                self._warn(turn_s, f"the event loop has been blocked for {silent_s:.0f} s; other controllers take over")
            return
        try:
            self._store = self._store or self._open_store()
            self._holder.extend(self._store)
        except BrokerError as error:
            self._warn(turn_s, f"the lease was not extended while the event loop is blocked: {error.message}")

    def close(self) -> None:
        """Close the connection, if one was opened."""
        if self._store is not None:
            self._store.close()

    def _warn(self, turn_s: float, message: str) -> None:
        if turn_s != self._warned_s:
            log.warning("%s", message)
        self._warned_s = turn_s


@contextmanager
def keep_lease(
    holder: LeaseHolder, clock: Clock, open_store: Callable[[], Store], *, check_every_s: float = CHECK_EVERY_S
) -> Iterator[None]:
    """Keep the lease in the block. The thread opens the store on the first silence of the loop, with `open_store`."""
    ended = threading.Event()

    def run() -> None:
        keeper = LeaseKeeper(holder, clock, open_store)
        try:
            while not ended.wait(check_every_s):
                keeper.step()
        except Exception:  # the outermost edge of the thread; the loop itself still renews the lease
            log.exception("leases are no longer kept while the event loop is blocked")
        finally:
            keeper.close()

    thread = threading.Thread(target=run, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(JOIN_S_MAX)  # longer only if the store does not answer; the thread then ends with the process
