"""The real daemon, killed (as by kill -9) at the CRASH_AT-th deed: a commit, or a call to the local cloud."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any

from broker.cli.main import main
from broker.clouds.local import LocalCloud
from broker.runtime.gang import Gang
from broker.state.database import Database

CRASH_AT = int(os.environ["CRASH_AT"])
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


def commit(self: Database) -> None:
    if self._epoch is not None:  # only what the leader writes: opening the store is not its deed
        pass_by()
    self._execute("COMMIT")
    if self._epoch is not None:
        pass_by()


Database._commit = commit  # type: ignore[method-assign]
for owner, names in ((LocalCloud, ("create_nodes", "terminate_nodes")), (Gang, ("prepare", "start"))):
    for name in names:
        setattr(owner, name, crashing(getattr(owner, name)))
main(["daemon", "--idle", "0"])
