"""The context of one request: an own store connection, clouds that the operator admits, and a clock that may stop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from broker.app.container import Context
from broker.clock import SystemClock
from broker.frozen import frozen

if TYPE_CHECKING:
    from broker.clouds.base import Cloud

LOCAL = "local"


class DisconnectedError(Exception):
    """The client of a reading verb is gone."""


class RequestClock(SystemClock):
    """A clock whose sleeps end once the client of a request is gone."""

    def __init__(self, gone: threading.Event) -> None:
        self._gone = gone

    async def sleep(self, duration_s: float) -> None:
        if self._gone.is_set():
            raise DisconnectedError
        await super().sleep(duration_s)


@frozen
class Policy:
    """What the operator chose: who runs the controllers, and whether tasks may run on the server's own machine."""

    has_controller: bool = True
    has_local_cloud: bool = False


class ServerContext(Context):
    """A context in the thread of one request."""

    def __init__(
        self,
        home: Path | None,
        *,
        policy: Policy,
        on_note: Callable[[str], None] = lambda text: None,
        gone: threading.Event | None = None,
    ) -> None:
        super().__init__(home, on_note=on_note)
        self._policy = policy
        if gone is not None:
            self.clock = RequestClock(gone)

    @cached_property
    def clouds(self) -> Mapping[str, Cloud]:
        """The clouds that are set up here. Programs on the local cloud run as the server's own user."""
        from broker.app.container import LazyClouds

        found = super().clouds
        if self._policy.has_local_cloud:
            return found
        from broker.clouds import CLOUDS

        return LazyClouds([name for name in CLOUDS if name != LOCAL], found.get)

    def ensure_daemon(self) -> None:
        """Start the controllers unless they run elsewhere, started by `broker server controller`."""
        if self._policy.has_controller:
            super().ensure_daemon()
