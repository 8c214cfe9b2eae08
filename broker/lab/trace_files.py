"""Traces on disk: a folder of JSON files, one per zone."""

from __future__ import annotations

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


def _read(file: Path) -> Trace:
    try:
        if file.stat().st_size > BYTES_MAX:
            raise UsageError(f"{file} exceeds the limit of {BYTES_MAX // 1024 // 1024} MiB")
        return parse_trace(file.read_bytes(), file.stem)
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None
