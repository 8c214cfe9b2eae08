"""Unsupported features that a task requests: reported before a plan, refused before a launch."""

from __future__ import annotations

from collections.abc import Sequence

from broker.errors import Issue, TaskError
from broker.types import Notice


def refuse_blocking(notices: Sequence[Notice]) -> None:
    """Raise TaskError with every notice that prevents a launch."""
    issues = [
        Issue(
            file=each.origin.file,
            line=each.origin.line,
            column=each.origin.column,
            message=each.message,
            hint=each.hint,
            source_line=each.source_line,
        )
        for each in notices
        if each.blocks_launch
    ]
    if issues:
        raise TaskError(issues)


def render_notice(notice: Notice) -> str:
    """Render `note: FILE:LINE:COLUMN: unsupported feature (alternative)` on one line."""
    hint = f" ({notice.hint})" if notice.hint else ""
    return f"note: {notice.origin}: {notice.message}{hint}"
