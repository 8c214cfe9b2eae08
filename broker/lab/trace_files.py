"""Traces on disk: a folder of JSON files, one per zone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from broker.errors import UsageError
from broker.lab.traces import Trace, parse_trace

FILES_MAX = 200
BYTES_MAX = 64 * 1024 * 1024


def read_traces(path: Path) -> list[Trace]:
    """Read a trace file, or all `*.json` of a folder, by name. Raise UsageError or SourceError."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        deeper = sorted({file.parent for file in path.glob("*/*.json")})
        hints = [f"pass `--traces {folder}`" for folder in deeper[:3]]
        raise UsageError(f"no traces (`*.json`) in {path}", hints=hints)
    if len(files) > FILES_MAX:
        raise UsageError(f"{path} has {len(files)} traces; the limit is {FILES_MAX}")
    return [_read(file) for file in files]


def align_traces(traces: Sequence[Trace]) -> list[Trace]:
    """Return zones of one market from the moment at which the last of their recordings began.

    `broker traces record` begins a zone at its first clear answer, perhaps hours after others. Zones would otherwise
    seem to change independently. Recordings without `started_s` begin together.
    Raise UsageError if two do not overlap.
    """
    begun = [each.started_s for each in traces if each.started_s is not None]
    if not begun or len(begun) < len(traces):
        return list(traces)
    latest_s, found = max(begun), list[Trace]()
    last = traces[begun.index(latest_s)]
    for each, started_s in zip(traces, begun, strict=True):
        skipped = round((latest_s - started_s) / 3600 / each.gap_hours)
        if skipped >= len(each.counts):
            raise UsageError(
                f"the recordings `{each.name}` and `{last.name}` do not overlap in time",
                hints=["pass `--apart` to replay each as a separate market"],
            )
        found.append(replace(each, counts=each.counts[skipped:], prices=each.prices[skipped:]) if skipped else each)
    return found


def _read(file: Path) -> Trace:
    try:
        if file.stat().st_size > BYTES_MAX:
            raise UsageError(f"{file} exceeds the limit of {BYTES_MAX // 1024 // 1024} MiB")
        return parse_trace(file.read_bytes(), file.stem)
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None
