"""What the head of a gang left in the bucket before its nodes ended: the outcome of its run, and the log."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Protocol

from broker.agent.agent_bucket import name_log, name_outcome
from broker.errors import BrokerError
from broker.nouns import noun
from broker.runtime.gang import parse_progress
from broker.storage import open_bucket
from broker.types import Progress, RunStatus


@noun
class RunResult:
    """`returncode` is None where no program ended by itself, and `failed_rank` where it is not known whose did.
    `lease_left_s`: of the head, when the run ended. `unflushed`: as in `GangReport`."""

    status: RunStatus
    returncode: int | None = None
    reason: str = ""
    lease_left_s: float | None = None
    progress: Progress | None = None
    failed_rank: int | None = None
    unflushed: str = ""


class Outcomes(Protocol):
    """Neither verb raises: a bucket that cannot be read from here tells nothing."""

    async def read_outcome(self, place: str, attempt: int) -> RunResult | None:
        """What the attempt's head left below `place`; None where there is nothing."""
        ...

    async def read_log(self, place: str, attempt: int) -> bytes | None:
        """The log as `agent_bucket.read_bounded` made it."""
        ...


class BucketOutcomes:
    async def read_outcome(self, place: str, attempt: int) -> RunResult | None:
        content = await asyncio.to_thread(_read, place, name_outcome(attempt))
        return None if content is None else parse_outcome(content)

    async def read_log(self, place: str, attempt: int) -> bytes | None:
        return await asyncio.to_thread(_read, place, name_log(attempt))


def parse_outcome(content: bytes) -> RunResult | None:
    """None for what no agent wrote: a program can write to its job's folder."""
    try:
        found: Mapping[str, Any] = json.loads(content)
        status = RunStatus(found["status"])
        returncode, left_s, progress = found.get("returncode"), found.get("lease_left_s"), found.get("progress")
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if not status.is_terminal:
        return None
    return RunResult(
        status=status,
        returncode=returncode if isinstance(returncode, int) and not isinstance(returncode, bool) else None,
        reason=str(found.get("reason") or ""),
        unflushed=str(found.get("unflushed") or "") if status is RunStatus.FAILED else "",
        failed_rank=rank if isinstance(rank := found.get("failed_rank"), int) else None,
        lease_left_s=float(left_s) if isinstance(left_s, int | float) and not isinstance(left_s, bool) else None,
        progress=parse_progress(progress) if isinstance(progress, dict) else None,
    )


def _read(place: str, key: str) -> bytes | None:
    try:
        return open_bucket(place).read(key)
    except BrokerError:
        return None
