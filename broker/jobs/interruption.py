"""Stop a long operation of a job as soon as it is pointless, because of a cancel request, a limit or an ended group."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from broker.clock import Clock

T = TypeVar("T")


class Interrupted(Exception):
    """Raised when a long operation was interrupted."""


async def run_unless(
    work: Coroutine[Any, Any, T], *, is_pointless: Callable[[], bool], clock: Clock, look_s: float
) -> T:
    """Return the result of `work`. Raises Interrupted, and cancels it, once `is_pointless`, checked every `look_s`."""

    async def wait() -> None:
        while not is_pointless():
            await clock.sleep(look_s)

    operation, interruption = asyncio.ensure_future(work), asyncio.ensure_future(wait())
    try:
        await asyncio.wait({operation, interruption}, return_when=asyncio.FIRST_COMPLETED)
        if not operation.done():
            raise Interrupted
        return operation.result()
    finally:
        operation.cancel()
        interruption.cancel()
        await asyncio.gather(operation, interruption, return_exceptions=True)
