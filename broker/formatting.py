"""Format numbers, amounts, durations and untrusted text for people and for `--json`."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def strip_control(text: str) -> str:
    """Remove control characters: remote output must not control this terminal."""
    return _CONTROL.sub("", text)


def format_count(count: int, noun: str) -> str:
    """Format a count with its noun: `1 node`, `2 nodes`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def join_choices(choices: Sequence[str]) -> str:
    """Join alternatives: `a`, `a or b`, `a, b or c`."""
    *first, last = choices
    return f"{', '.join(first)} or {last}" if first else last


def format_usd(amount: float | None, *, is_estimated: bool = False) -> str:
    """Format an amount with two decimals, or four if it is below 1; `~` marks an estimate, `-` is None."""
    if amount is None:
        return "-"
    digits = 2 if amount >= 1 or amount == 0 else 4
    return f"{'~' if is_estimated else ''}{amount:,.{digits}f}"


def format_share(share: float | None) -> str:
    """Format a fraction of 1 as a whole percentage; `-` for None."""
    return "-" if share is None else f"{share:.0%}"


def format_bytes(count: float | None) -> str:
    """Format bytes with a binary unit and three digits, such as `1.50 GiB`; `-` for None."""
    if count is None:
        return "-"
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while count >= 999.5 and len(units) > 1:
        count /= 1024
        del units[0]
    digits = 0 if units[0] == "B" or count >= 99.95 else 1 if count >= 9.995 else 2
    return f"{count:.{digits}f} {units[0]}"


def format_part(used: float | None, total: float | None) -> str:
    """Format the bytes in use and the total, naming the unit once if both share it: `20.0 of 64.0 GiB`."""
    first, second = format_bytes(used), format_bytes(total)
    number, _, unit = first.partition(" ")
    return f"{number if second.endswith(f' {unit}') else first} of {second}"


def format_ms(value_s: float | None) -> str:
    """Format seconds as whole milliseconds, or as seconds from ten seconds; `-` for None."""
    if value_s is None:
        return "-"
    return f"{value_s * 1000:.0f}ms" if value_s < 10 else f"{value_s:.0f}s"


def format_hours(hours: float | None) -> str:
    """Format hours like `format_duration`; `-` for None."""
    return "-" if hours is None else format_duration(hours * 3600)


def format_duration(seconds: float) -> str:
    """Format seconds with their two largest units, such as `2h 05m`."""
    seconds = round(seconds, 3)  # 50 minutes in hours, times 3600, may be 2,999.9999999
    if seconds < 60:
        return f"{seconds:.0f}s" if seconds >= 10 else f"{seconds:.1f}s"
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes}m {int(seconds % 60):02d}s"
    hours = minutes // 60
    return f"{hours}h {minutes % 60:02d}m" if hours < 48 else f"{hours // 24}d {hours % 24}h"


def format_date(time_s: float) -> str:
    """Format a time in seconds since the epoch as a local date."""
    return time.strftime("%Y-%m-%d", time.localtime(time_s))


def format_minute(time_s: float) -> str:
    """Format a time in seconds since the epoch as a local date and minute."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(time_s))


def format_second(time_s: float) -> str:
    """Format a time in seconds since the epoch as a local date and time of day."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))


def format_time_of_day(time_s: float) -> str:
    """Format a time in seconds since the epoch as a local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(time_s))


def to_plain(value: Any) -> Any:
    """Convert frozen dataclasses to JSON-ready data; secrets become `***`."""
    import msgspec

    from broker.types import Secret

    def encode(each: Any) -> Any:
        if isinstance(each, Secret):
            return "***"
        if isinstance(each, Mapping):
            return {key: encode(item) for key, item in each.items()}
        if isinstance(each, (list, tuple)):
            return [encode(item) for item in each]
        if hasattr(each, "__dataclass_fields__"):
            return {name: encode(getattr(each, name)) for name in each.__dataclass_fields__}
        return msgspec.to_builtins(each)

    return encode(value)
