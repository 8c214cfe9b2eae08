"""The report of `broker rehearse --html`: a page in the style of `broker report`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from broker.cli.rehearse_show import list_figures, list_findings, list_service_figures
from broker.dashboard.html import Content, element, table
from broker.dashboard.model import JobPage
from broker.dashboard.pages import show_attempts
from broker.dashboard.paper import save_paper, show_figures, write_paper
from broker.dashboard.progress import show_progress
from broker.dashboard.timeline import draw_timeline
from broker.rehearsal.result import Rehearsal
from broker.rehearsal.service_result import ServiceRehearsal
from broker.rehearsal.verdict import Finding

HEADS = ["Level", "About", "Finding", "What to do"]
FOOT = "Clouds, time and prices were simulated; the program was real."
LEVELS = {"good": ("good", "good"), "note": ("note", "wait"), "bad": ("bad", "bad")}  # -> word and colour


def write_rehearsal(file: Path, result: Rehearsal, page: JobPage, log: Sequence[str]) -> None:
    """Write the report: totals, findings, attempts, steps and loss. Raises UsageError if the file is not written."""
    text = write_paper(
        f"Rehearsal of {page.job.name}",
        show_figures(list_figures(result)),
        *_show_findings(list_findings(result)),
        element("h2", "Attempts"),
        draw_timeline(page),
        show_attempts(page),
        show_progress(page, log),
        element("p", FOOT, class_="faint"),
    )
    save_paper(file, text)


def write_service_rehearsal(file: Path, result: ServiceRehearsal) -> None:
    """Write the report of a service: totals and findings. Raises UsageError if the file is not written."""
    text = write_paper(
        f"Rehearsal of service {result.service}",
        show_figures(list_service_figures(result)),
        *_show_findings(result.findings),
        element("p", FOOT, class_="faint"),
    )
    save_paper(file, text)


def _show_findings(findings: Iterable[Finding]) -> list[Content]:
    rows: list[Sequence[Content]] = [
        [element("span", LEVELS[each.level][0], class_=LEVELS[each.level][1]), each.about, each.text, each.hint or "-"]
        for each in findings
    ]
    return [element("h2", "Findings"), table(HEADS, rows, caption="Findings")]
