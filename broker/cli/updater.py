"""`broker updater`: update old prices. Commands that used prices start it, detached."""

from __future__ import annotations

import logging
import os
import signal

from broker.app.freshness import TOTAL_S_MAX, update_due_clouds
from broker.cli.context import make_context

NICENESS = 15
log = logging.getLogger(__name__)


def updater() -> None:
    """Update the prices that are due, once, in bounded time."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    signal.alarm(TOTAL_S_MAX)  # ends the process wherever it waits: a kill at any instant leaves a whole book
    os.nice(NICENESS)
    for each in update_due_clouds(make_context()):
        if each.error is None:
            log.info("%s: %s offers from %s, %s prices changed", each.cloud, each.offers, each.source, each.changed)
        else:
            log.warning("%s: not updated: %s", each.cloud, each.error)
