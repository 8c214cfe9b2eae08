"""The Python API without asyncio: `broker.plan`, `broker.launch` and so on. `broker.aio` documents each function.

These functions also work in a running event loop (a notebook), which they block meanwhile.
"""

from __future__ import annotations

from broker import aio
from broker.aio.running import make_sync, make_sync_iterator

__all__ = ["advise", "cancel", "down", "exec", "launch", "logs", "plan", "queue", "simulate", "status"]

plan = make_sync(aio.plan)
launch = make_sync(aio.launch)
exec = make_sync(aio.exec)
status = make_sync(aio.status)
queue = make_sync(aio.queue)
cancel = make_sync(aio.cancel)
logs = make_sync_iterator(aio.logs)
down = make_sync(aio.down)
advise = make_sync(aio.advise)
simulate = make_sync(aio.simulate)
