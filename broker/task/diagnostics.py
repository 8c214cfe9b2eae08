"""Render one issue of a task file: position, message, source line with a caret, hint."""

from __future__ import annotations

from broker.errors import Issue

_WIDTH = 100  # of the source line; longer lines are cut around the caret
_LEAD = 60


def render_issue(issue: Issue) -> str:
    """Return plain text of several lines, without a final newline."""
    place = f"{issue.file}:{issue.line}:{issue.column}" if issue.line else issue.file
    lines = [f"{place}: {issue.message}"]
    if issue.source_line is not None and issue.column:
        number = f"{issue.line:5d}"
        # Control characters of the file must not reach the terminal.
        source = "".join(each if each.isprintable() or each == "\t" else "?" for each in issue.source_line.rstrip())
        start = max(0, issue.column - 1 - _LEAD)
        lead = "".join("\t" if letter == "\t" else " " for letter in source[start : issue.column - 1])
        lines += [f"{number} | {source[start : start + _WIDTH]}", f"{' ' * len(number)} | {lead}^"]
    if issue.hint:
        lines.append(f"hint: {issue.hint}")
    return "\n".join(lines)
