"""Back up the server's state once a minute if it has changed, and check whether another server has replaced it."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from broker.app.backups import DATABASE, Backups, keep_record
from broker.clock import SystemClock
from broker.config import find_backup_url, find_state_url
from broker.errors import BrokerError, FencedError
from broker.state.faults import FAULTS, explain_fault

log = logging.getLogger(__name__)

BACKUP_S = 60.0
CONFIRM_S = 10.0  # keeps the confirmation recent for requests


async def keep_backup(home: Path) -> None:
    """Back up until cancelled, then one final time. Raises FencedError once another server has replaced this one."""
    clock = SystemClock()
    url = find_backup_url(home)
    if url is None or find_state_url(home) is not None:
        await asyncio.Event().wait()
        return
    backups = Backups(home, url, clock=clock)
    due_s = clock.now_s()
    try:
        while True:
            is_due = clock.now_s() >= due_s
            step = asyncio.ensure_future(asyncio.to_thread(_step, backups, home, is_due=is_due))
            await asyncio.shield(step)
            due_s = clock.now_s() + BACKUP_S if is_due else due_s
            await clock.sleep(CONFIRM_S)
    except asyncio.CancelledError:
        # A cancellation does not end the thread: its older copy would replace the final one if it arrived later.
        await asyncio.wait([step])
        await asyncio.to_thread(_step, backups, home, is_due=True)
        raise


def _step(backups: Backups, home: Path, *, is_due: bool) -> None:
    """Confirm the epoch and write changes; failures other than FencedError are recorded and retried."""
    try:
        backups.refresh()
        if is_due:
            backups.write_if_changed()
            keep_record(home, backups.url, now_s=SystemClock().now_s(), error=None)
    except FencedError:
        raise
    except BrokerError as error:
        _report(backups, home, error)
    except FAULTS as error:  # for example a disk without room for another copy: no reason to end the server
        _report(backups, home, explain_fault(home / DATABASE, error))


def _report(backups: Backups, home: Path, error: BrokerError) -> None:
    log.warning("the backup failed: %s", error.message)
    try:
        keep_record(home, backups.url, now_s=SystemClock().now_s(), error=error)
    except OSError as full:
        log.warning("this could not be recorded: %s", full)
