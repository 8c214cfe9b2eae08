"""IDs of a job's trace: hashes of its unique name, so that programs and a later export agree without a record."""

from __future__ import annotations

from hashlib import sha256

from broker.types import Job


def make_trace_id(job: Job) -> str:
    """Return the 32 hexadecimal digits of a job's trace."""
    return sha256(f"broker {job.stem}".encode()).hexdigest()[:32]


def make_span_id(job: Job, key: str) -> str:
    """Return the 16 hexadecimal digits of one of a job's spans."""
    return sha256(f"broker {job.stem} {key}".encode()).hexdigest()[:16]


def name_run(attempt: int) -> str:
    """Return the key of the span of an attempt's program."""
    return f"attempt {attempt} run"


def make_traceparent(job: Job, attempt: int) -> str:
    """Return W3C trace context whose parent is the run of an attempt (https://www.w3.org/TR/trace-context/)."""
    return f"00-{make_trace_id(job)}-{make_span_id(job, name_run(attempt))}-01"
