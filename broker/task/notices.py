"""What a task asks for and broker does not do: said before a plan, refused before a launch."""

from __future__ import annotations

from collections.abc import Sequence

from broker.errors import Issue, TaskError
from broker.types import Notice


def refuse_blocking(notices: Sequence[Notice]) -> None:
    """Raises TaskError with every notice that keeps a task from being launched."""
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
    """`note: FILE:LINE:COLUMN: what is not done (what to do instead)`, on one line."""
    hint = f" ({notice.hint})" if notice.hint else ""
    return f"note: {notice.origin}: {notice.message}{hint}"
