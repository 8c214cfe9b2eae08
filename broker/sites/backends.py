"""Recognise nodes of a cloud that was native when they were launched and goes through SkyPilot now, or the reverse."""

from __future__ import annotations

from broker.errors import AuthError
from broker.sites import FILES
from broker.types import Node

SKYPILOT = "sky://"  # the handles of its nodes


def find_other_backend(node: Node, *, is_native: bool) -> AuthError | None:
    """Return an AuthError for a node that only the other backend can list and terminate.

    Creating or removing the cloud's file while nodes run does not end them.
    """
    file = FILES.get(node.cloud)
    if file is None or node.handle.startswith(SKYPILOT) is not is_native:
        return None
    if is_native:
        return AuthError(
            f"node `{node.id}` was launched through SkyPilot, which `{file}` has replaced, so it cannot be checked",
            hints=(f"move `{file}` away until the node has ended",),
        )
    return AuthError(
        f"node `{node.id}` was launched natively, but there is no `{file}` any more, so it cannot be checked",
        hints=(f"restore `{file}` until the node has ended",),
    )
