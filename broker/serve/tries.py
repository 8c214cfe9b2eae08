"""Count how often a request was sent, and to which replicas."""

from __future__ import annotations

from aiohttp import web

from broker.clock import Clock
from broker.serve.data_path import WAIT_S_MAX

TRIES_MAX = 4


class Tries:
    """The replicas that a request was sent to. It waits for one until `deadline_s`, a minute after the newest loss."""

    def __init__(self, clock: Clock, *, wait_s_max: float = WAIT_S_MAX) -> None:
        self._clock, self._wait_s_max = clock, wait_s_max
        self.tried: set[int] = set()
        self.refusal: web.Response | None = None  # of a busy replica, for a client that gets no better response
        self.sent = 0
        self.deadline_s = clock.now_s() + wait_s_max

    @property
    def are_used_up(self) -> bool:
        """Return whether the request was sent too often: it may itself be what ends its replicas."""
        return self.sent >= TRIES_MAX

    def add_refusal(self, refusal: web.Response) -> None:
        """Record that a replica did not take the request."""
        self.sent += 1
        self.refusal = refusal

    def add_loss(self) -> None:
        """Record that a replica was lost, perhaps after it had computed for long."""
        self.sent += 1
        self.deadline_s = self._clock.now_s() + self._wait_s_max
