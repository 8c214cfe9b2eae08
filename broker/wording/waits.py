"""Render the reason why a job waits."""

from __future__ import annotations

from broker.types import JobWait, WaitReason


def describe_wait(wait: JobWait, *, now_s: float) -> str:
    """Return a clause that continues "Job 3 waits"; "" if the status already shows the reason."""
    match wait.reason:
        case WaitReason.LIMIT:
            return f"for {describe_slots(wait.limit, wait.project)}, at position {wait.position}"
        case WaitReason.CAPACITY:
            left_s = max(0.0, (wait.until_s or now_s) - now_s)
            return f"for capacity; next request in {left_s:.0f} s"
        case WaitReason.NEEDS:
            return "for the jobs that it depends on"
        case WaitReason.START:
            return ""


def describe_slots(limit: int | None, project: str) -> str:
    """Return the slot that a job waits for, with the setting's name: `one of 20 slots (...)`, `the only slot (...)`."""
    of = f" of project {project} (`max_live_jobs_by_project`)" if project else " (`max_live_jobs`)"
    return f"the only slot{of}" if limit == 1 else f"one of {limit} slots{of}"
