"""Unsupported features that a task requests: reported before a plan, refused before a launch."""

from __future__ import annotations

from collections.abc import Sequence

from broker.errors import Issue, TaskError
from broker.types import Notice


def refuse_blocking(notices: Sequence[Notice]) -> None:
    """Raise TaskError with every notice that prevents a launch."""
    issues = [
        Issue(
            file=notice.origin.file,
            line=notice.origin.line,
            column=notice.origin.column,
            message=notice.message,
            hint=notice.hint,
            source_line=notice.source_line,
        )
        for notice in notices
        if notice.blocks_launch
    ]
    if issues:
        raise TaskError(issues)


def render_notice(notice: Notice) -> str:
    """Render `note: FILE:LINE:COLUMN: unsupported feature (alternative)` on one line."""
    hint = f" ({notice.hint})" if notice.hint else ""
    return f"note: {notice.origin}: {notice.message}{hint}"
