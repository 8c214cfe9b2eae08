"""Errors that end a request early: its replica is lost, or its client has left."""

from __future__ import annotations


class ReplicaLostError(Exception):
    """The replica did not answer, or its response was interrupted.

    `was_sent`: the replica may have received the request; otherwise any request may be repeated elsewhere.
    `is_alive`: the replica runs, but is too slow or does not support the request, so only another one may succeed.
    """

    def __init__(self, reason: str, *, was_sent: bool = True, is_alive: bool = False) -> None:
        super().__init__(reason)
        self.was_sent, self.is_alive = was_sent, is_alive


class ClientGoneError(Exception):
    """The client closed the connection, or sent a body that cannot be read."""
