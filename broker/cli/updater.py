"""`broker updater`: update outdated prices. Commands that use prices start it as a detached process."""

from __future__ import annotations

import logging
import os
import signal

from broker.app.freshness import TOTAL_S_MAX, update_due_clouds
from broker.catalog.refresh import CloudRefresh
from broker.cli.context import make_context
from broker.cli.log_lines import write_log
from broker.serve.processes import wants_json_logs

NICENESS = 15
log = logging.getLogger(__name__)


def updater() -> None:
    """Update prices that are due, once, within a time limit."""
    context = make_context()
    write_log(is_json=wants_json_logs(context.config))
    signal.alarm(TOTAL_S_MAX)  # ends the process wherever it waits; the book is replaced as a whole
    os.nice(NICENESS)
    update_due_clouds(context, on_result=_log_result)


def _log_result(report: CloudRefresh) -> None:
    if report.error is None:
        log.info("%s: %s offers from %s, %s changed", report.cloud, report.offers, report.source, report.changed)
    else:
        log.warning("%s: not updated: %s", report.cloud, report.error)
