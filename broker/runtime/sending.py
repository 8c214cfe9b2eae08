"""Send a file or folder of this machine to a node, and tell the user's errors from temporary ones."""

from __future__ import annotations

from pathlib import Path

from broker.errors import InvalidRequestError, TransientError
from broker.runtime.base import Transport
from broker.types import Node


async def send_source(transport: Transport, node: Node, *, field: str, source: Path, target: str) -> None:
    """Copy the source that `field` of the task names to a node.

    Raises InvalidRequestError for a missing or unreadable source, which a retry cannot fix, and TransientError for a
    file that vanishes meanwhile, such as an editor's: the next try lists the files again.
    """
    path = source.expanduser()
    if not path.exists():
        raise InvalidRequestError(f"`{field}`: {path} no longer exists")
    try:
        await transport.put(node, path, target)
    except (FileNotFoundError, PermissionError) as error:
        if not isinstance(error.filename, str) or not Path(error.filename).is_relative_to(path):
            raise
        if isinstance(error, PermissionError):
            raise InvalidRequestError(f"`{field}`: cannot read {error.filename}: {error.strerror}") from error
        raise TransientError(f"{error.filename} disappeared while it was being copied") from error
