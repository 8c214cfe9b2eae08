"""Keep the prices of the clouds in use fresh: a command that uses prices starts one detached update if they are old.

The daemon and the server, which plan for days without a command, check too.
The command itself only reads one small file. The update is a separate process: at most one at a time, with limits on
time and bytes, low priority, and a log. Nothing waits for it: a cloud that cannot be updated keeps its prices.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from broker.app.market import find_cache
from broker.catalog.attempts import FRESH_S, read_attempts
from broker.config import find_auto_update, find_home
from broker.errors import BrokerError
from broker.frozen import frozen
from broker.locks import is_locked, try_lock

if TYPE_CHECKING:
    from broker.app.container import Context
    from broker.catalog.refresh import CloudRefresh
    from broker.catalog.sources.base import PriceSource
    from broker.clock import Clock

UPDATER = (sys.executable, "-m", "broker", "updater")
URL_VARIABLE = "BROKER_PRICES_URL_"  # followed by the source's name in capitals: another URL, such as a mirror
POLL_S = 600.0  # between checks of a process that lives for days; each reads one small file
RESTART_S = 600.0  # minimum time before an updater is restarted that died before it recorded its attempt
TOTAL_S_MAX = 600
BYTES_MAX = 128 << 20  # SkyPilot's files of all clouds are about 40 MiB
LOG_BYTES_MAX = 1 << 20


def start_update_if_due(clock: Clock, home: Path | None = None) -> bool:
    """Start the updater, detached, if prices may be old; return whether it was started. Never raises, never waits."""
    cache, now_s = find_cache(), clock.now_s()
    attempts = read_attempts(cache)
    try:
        if attempts and not any(each.is_due(now_s) for each in attempts.values()):
            return False
        if not find_auto_update(home) or is_locked(_locate_lock(cache)):
            return False
        # If no attempt is recorded, this is either the first start, or no cloud in use has a source.
        if not _claim_start(cache, now_s, every_s=RESTART_S if attempts else FRESH_S):
            return False
        import subprocess  # 8 ms, once in 7 hours

        with os.fdopen(_open_log(find_home(home), cache), "ab") as output:
            subprocess.Popen(
                UPDATER, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, cwd=cache
            )
    except (OSError, BrokerError):
        return False  # the cache is not writable, or a setting is invalid, which other commands report
    return True


async def keep_prices_fresh(clock: Clock, home: Path | None = None) -> NoReturn:
    """Start updates that are due, for a process that plans for days without a command, until it is cancelled."""
    import asyncio  # 40 ms that no command should pay

    while True:
        await asyncio.to_thread(start_update_if_due, clock, home)
        await clock.sleep(POLL_S)


def _claim_start(cache: Path, now_s: float, *, every_s: float) -> bool:
    """Mark the start; return False after a recent one. Ignore a mark in the future: the clock was set back since."""
    mark = cache / "price-updater.started"
    with suppress(FileNotFoundError):
        if 0 <= now_s - mark.stat().st_mtime < every_s:
            return False
    os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
    os.utime(mark, (now_s, now_s))
    return True


def _locate_lock(cache: Path) -> Path:
    return cache / "price-updater.lock"


def locate_log(home: Path, cache: Path) -> Path:
    """Return the updater's log: in the state folder, or next to the prices before there is one."""
    return home / "logs" / "prices.log" if home.exists() else cache / "prices.log"


def _open_log(home: Path, cache: Path) -> int:
    path = locate_log(home, cache)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    is_long = path.exists() and path.stat().st_size > LOG_BYTES_MAX
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if is_long else 0), 0o600)


def load_own_sources(names: Collection[str] | None = None) -> Mapping[str, PriceSource]:
    """Load the named price sources, or all, with the URLs set in the environment."""
    from broker.catalog.refresh import load_sources
    from broker.catalog.sources import SOURCES

    urls = {name: url for name in SOURCES if (url := os.getenv(f"{URL_VARIABLE}{name.upper()}"))}
    return {name: each for name, each in load_sources(urls).items() if names is None or name in names}


def list_used_clouds(context: Context) -> Sequence[str]:
    """List the clouds whose prices are kept up to date.

    These are the clouds that are set up for launches and those whose prices an update has fetched; if there are none,
    all that a plan compares. Imported prices are the user's own, so they are kept.
    """
    book = context.book
    sources = load_own_sources()
    sold = {cloud for each in sources.values() for cloud in each.clouds}
    imported = {cloud for cloud in book.clouds if book.get_facts(cloud).source.startswith("imported")}
    fetched = {cloud for cloud in book.clouds if book.get_facts(cloud).source in sources}
    kept = set(book.clouds) & sold - imported
    is_known = find_home().exists()  # a state folder is not created for this
    used = (fetched | (set(context.clouds) if is_known else set())) & kept
    return sorted(used or kept)


@frozen
class UpdateStatus:
    """One cloud's prices: source, dates (ISO), and the last and next update in seconds since the epoch.

    `attempted_s` is None if never tried, `next_s` is None if due; without `is_used`, it is not updated in the
    background.
    """

    cloud: str
    source: str
    ondemand_as_of: str
    spot_as_of: str
    is_used: bool
    attempted_s: float | None
    succeeded_s: float | None
    error: str | None
    next_s: float | None


def describe_updates(context: Context) -> Sequence[UpdateStatus]:
    """Describe every cloud of the book, in the book's order."""
    attempts, used, now_s = read_attempts(find_cache()), list_used_clouds(context), context.clock.now_s()
    found = []
    for cloud in context.book.clouds:
        facts, last = context.book.get_facts(cloud), attempts.get(cloud)
        found.append(
            UpdateStatus(
                cloud=cloud,
                source=facts.source,
                ondemand_as_of=facts.ondemand_as_of,
                spot_as_of=facts.spot_as_of,
                is_used=cloud in used,
                attempted_s=last.attempted_s if last else None,
                succeeded_s=last.succeeded_s if last else None,
                error=last.error if last else None,
                next_s=None if last is None or last.is_due(now_s) else last.find_next_s(),
            )
        )
    return found


def update_due_clouds(context: Context, *, on_result: Callable[[CloudRefresh], None]) -> None:
    """Update the clouds in use that are due, one after the other; record each attempt before and after it.

    Do nothing if another updater is running. Raises StateError if the prices cannot be written, and OSError if the
    record cannot.
    """
    import asyncio  # 40 ms that no command should pay

    from broker.catalog.attempts import forget_attempts, record_attempts, record_starts
    from broker.catalog.http_client import HttpGet
    from broker.catalog.refresh import refresh_book
    from broker.catalog.sources import IN_BACKGROUND, ON_REQUEST

    cache = find_cache()
    with try_lock(_locate_lock(cache)) as is_alone:
        if not is_alone:
            return
        clock, attempts = context.clock, read_attempts(cache)
        now_s = clock.now_s()
        used = list_used_clouds(context)
        due = [cloud for cloud in used if cloud not in attempts or attempts[cloud].is_due(now_s)]
        forget_attempts(cache, set(attempts) - set(used))
        get = HttpGet(lambda wait_s: asyncio.run(clock.sleep(wait_s)), bytes_max=BYTES_MAX)
        sources = load_own_sources(IN_BACKGROUND)
        for cloud in due:
            now_s = clock.now_s()
            record_starts(cache, [cloud], now_s=now_s)
            automatic = {name: each for name, each in sources.items() if (name, cloud) not in ON_REQUEST}
            (report,) = refresh_book(cache, context.book, [cloud], sources=automatic, get=get, now_s=now_s)
            record_attempts(cache, {cloud: report.error}, now_s=now_s)
            on_result(report)
