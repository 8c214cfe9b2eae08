"""Render why a job waits."""

from __future__ import annotations

from broker.types import JobWait, WaitReason


def describe_wait(wait: JobWait, *, now_s: float) -> str:
    """Return a clause that continues "Job 3 waits"; "" if the status says it already."""
    match wait.reason:
        case WaitReason.LIMIT:
            return f"for one of {wait.limit} slots (`max_live_jobs`), at position {wait.position}"
        case WaitReason.CAPACITY:
            left_s = max(0.0, (wait.until_s or now_s) - now_s)
            return f"for capacity; clouds are asked again in {left_s:.0f} s"
        case WaitReason.NEEDS:
            return "for the jobs that it needs"
        case WaitReason.START:
            return ""
