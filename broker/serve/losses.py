"""How a request ends early: its replica is lost, or its client has left."""

from __future__ import annotations


class ReplicaLostError(Exception):
    """The replica did not answer, or its response was interrupted.

    `was_sent`: the replica may have received the request; otherwise any request may be repeated elsewhere.
    """

    def __init__(self, reason: str, *, was_sent: bool = True) -> None:
        super().__init__(reason)
        self.was_sent = was_sent


class ClientGoneError(Exception):
    """The client closed the connection, or sent a body that cannot be read."""
