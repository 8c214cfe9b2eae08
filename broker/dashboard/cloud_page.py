"""Show the page of clouds: the recorded results of `broker check`. No cloud is queried for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from broker.app.checks import Checks, CloudCheck
from broker.dashboard.html import Content, Markup, element, join, table
from broker.formatting import format_duration


def show_clouds(checks: Checks, now_s: float) -> Markup:
    """Show which clouds could launch nodes when they were last checked, and the commands that fix the others."""
    if not checks.clouds:
        return element(
            "p", "No check is recorded. Run ", element("code", "broker check"), ", then load this page again."
        )
    cells: list[Sequence[Content]] = [
        [
            name, element("span", "yes" if each.can_launch else "no", class_="good" if each.can_launch else "wait"),
            each.note, f"{format_duration(max(0.0, now_s - each.time_s))} ago",
        ]
        for name, each in checks.clouds.items()
    ]  # fmt: skip
    return join(
        [
            element("p", "Recorded by ", element("code", "broker check"), "; no cloud is contacted.", class_="faint"),
            table(["Cloud", "Can launch", "Note", "Checked"], cells, caption="Clouds"),
            *(part for name, each in checks.clouds.items() for part in _show_findings(name, each, now_s)),
        ]
    )


def _show_findings(name: str, check: CloudCheck, now_s: float) -> Iterator[Markup]:
    if not check.findings:
        return
    yield element("h2", name)
    cells: list[Sequence[Content]] = []
    for each in check.findings:
        word, kind = ("ok", "good") if each.is_ok else ("wrong", "bad") if each.is_needed else ("none", "wait")
        command = element("code", each.command) if each.command else "-"
        cells.append([element("span", word, class_=kind), each.name, each.note, command])
    yield table(["Result", "Item", "Note", "Command that fixes it"], cells, caption=f"Findings of {name}")
    yield element("p", f"Checked {format_duration(max(0.0, now_s - check.findings_s))} ago.", class_="faint")
