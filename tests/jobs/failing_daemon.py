"""The real daemon, killed (as by kill -9) at the CRASH_AT-th effect: a commit, or a call to the local cloud.

Its wall clock is off by the seconds in the file CLOCK_OFFSET, which may change at any time; without a file, by none.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from broker.cli.main import main
from broker.clock import SystemClock
from broker.clouds.local import LocalCloud
from broker.runtime.gang import Gang
from broker.state.database import SqliteDatabase

CRASH_AT = int(os.environ.get("CRASH_AT", "0"))  # 0: never
CLOCK_OFFSET = os.environ.get("CLOCK_OFFSET", "")
passed = 0


def pass_by() -> None:
    global passed
    passed += 1
    if passed == CRASH_AT:
        os._exit(137)


def crashing(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def call(*arguments: Any, **named: Any) -> Any:
        pass_by()
        result = await method(*arguments, **named)
        pass_by()
        return result

    return call


def commit(self: SqliteDatabase) -> None:
    if self.epoch is not None:  # only the leader's writes: opening the store is not its effect
        pass_by()
    self.execute("COMMIT")
    if self.epoch is not None:
        pass_by()


SqliteDatabase._commit = commit  # type: ignore[method-assign]


def now_s(self: SystemClock) -> float:
    try:
        return time.time() + float(Path(CLOCK_OFFSET).read_text() or 0) if CLOCK_OFFSET else time.time()
    except FileNotFoundError:
        return time.time()


SystemClock.now_s = now_s  # type: ignore[method-assign]
for owner, names in ((LocalCloud, ("create_nodes", "terminate_nodes")), (Gang, ("prepare", "start"))):
    for name in names:
        setattr(owner, name, crashing(getattr(owner, name)))
main(["daemon", "--idle", "0"])
