"""Read the result and the log that a gang's head uploaded to the bucket before its nodes ended."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Protocol

from broker.agent.agent_bucket import name_log, name_outcome
from broker.errors import BrokerError
from broker.frozen import frozen
from broker.runtime.reports import parse_progress
from broker.storage import open_bucket
from broker.types import Progress, RunStatus


@frozen
class RunResult:
    """The result of a run.

    `returncode` is None if no program exited; `failed_rank` is None if it is unknown which program failed first.
    `lease_left_s`: the remaining lease of the head when the run ended. `unflushed`: as in `GangReport`.
    """

    status: RunStatus
    returncode: int | None = None
    reason: str = ""
    lease_left_s: float | None = None
    progress: Progress | None = None
    failed_rank: int | None = None
    unflushed: str = ""


class Outcomes(Protocol):
    """Results in buckets. Neither method raises: an unreadable bucket counts as empty."""

    async def read_outcome(self, place: str, attempt: int) -> RunResult | None:
        """Return the result that the attempt's head wrote below `place`; None if there is none."""
        ...

    async def read_log(self, place: str, attempt: int) -> bytes | None:
        """Return the log, as truncated by `agent_bucket.read_bounded`; None if there is none."""
        ...


class BucketOutcomes:
    """Read the outcomes and logs that agents write to the checkpoint bucket."""

    async def read_outcome(self, place: str, attempt: int) -> RunResult | None:
        """Return the result that the head wrote to the bucket; None if there is none."""
        content = await asyncio.to_thread(_read, place, name_outcome(attempt))
        return None if content is None else parse_outcome(content)

    async def read_log(self, place: str, attempt: int) -> bytes | None:
        """Return the log that the head wrote to the bucket; None if there is none."""
        return await asyncio.to_thread(_read, place, name_log(attempt))


def parse_outcome(content: bytes) -> RunResult | None:
    """Parse a result; None for content that no agent wrote, because a program can also write to its job's folder."""
    try:
        fields: Mapping[str, Any] = json.loads(content)
        status = RunStatus(fields["status"])
        returncode, left_s, progress = fields.get("returncode"), fields.get("lease_left_s"), fields.get("progress")
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if not status.is_terminal:
        return None
    return RunResult(
        status=status,
        returncode=returncode if isinstance(returncode, int) and not isinstance(returncode, bool) else None,
        reason=str(fields.get("reason") or ""),
        unflushed=str(fields.get("unflushed") or "") if status is RunStatus.FAILED else "",
        failed_rank=rank if isinstance(rank := fields.get("failed_rank"), int) else None,
        lease_left_s=float(left_s) if isinstance(left_s, int | float) and not isinstance(left_s, bool) else None,
        progress=parse_progress(progress) if isinstance(progress, dict) else None,
    )


def _read(place: str, key: str) -> bytes | None:
    try:
        return open_bucket(place).read(key)
    except BrokerError:
        return None
