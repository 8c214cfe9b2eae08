"""Draws one issue of a task file: place, message, source line with a caret, hint."""

from __future__ import annotations

from broker.errors import Issue


def render_issue(issue: Issue) -> str:
    """Plain text of several lines, without a closing newline."""
    place = f"{issue.file}:{issue.line}:{issue.column}" if issue.line else issue.file
    lines = [f"{place}: {issue.message}"]
    if issue.source_line is not None:
        number = f"{issue.line:5d}"
        lead = "".join("\t" if letter == "\t" else " " for letter in issue.source_line[: issue.column - 1])
        lines += [f"{number} | {issue.source_line.rstrip()}", f"{' ' * len(number)} | {lead}^"]
    if issue.hint:
        lines.append(f"hint: {issue.hint}")
    return "\n".join(lines)
