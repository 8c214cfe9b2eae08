"""broker runs training jobs to completion at the lowest cost, on any cloud.

From Python, `broker.plan("train.yaml").choice` is what `broker plan train.yaml` prints, `broker.launch` starts a
cluster, `broker.jobs.launch` submits a managed job, and `broker.aio` has the same functions for asyncio.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from broker import aio as aio
    from broker import jobs as jobs
    from broker.aio import Launched as Launched
    from broker.api import advise as advise
    from broker.api import cancel as cancel
    from broker.api import down as down
    from broker.api import exec as exec
    from broker.api import launch as launch
    from broker.api import logs as logs
    from broker.api import plan as plan
    from broker.api import queue as queue
    from broker.api import simulate as simulate
    from broker.api import status as status
    from broker.app.admin_policy import PolicyRequest as PolicyRequest
    from broker.app.advising import Recommendation as Recommendation
    from broker.app.clusters import Status as Status
    from broker.app.jobs import Explanation as Explanation
    from broker.app.planning import read_task as read_task
    from broker.app.simulating import Simulation as Simulation
    from broker.errors import BrokerError as BrokerError
    from broker.errors import CloudError as CloudError
    from broker.errors import JobEndedError as JobEndedError
    from broker.errors import NoOfferError as NoOfferError
    from broker.errors import PolicyError as PolicyError
    from broker.errors import RunFailedError as RunFailedError
    from broker.errors import StateError as StateError
    from broker.errors import TaskError as TaskError
    from broker.errors import UsageError as UsageError
    from broker.errors import WaitTimeoutError as WaitTimeoutError
    from broker.types import Cluster as Cluster
    from broker.types import Estimate as Estimate
    from broker.types import Job as Job
    from broker.types import JobStatus as JobStatus
    from broker.types import Offer as Offer
    from broker.types import Placement as Placement
    from broker.types import Plan as Plan
    from broker.types import Run as Run
    from broker.types import Task as Task

__version__ = "0.1.0"

_MODULES = ("aio", "jobs")
# module -> its public names, imported on first use: `import broker` costs nothing.
_NAMES = {
    "broker.api": (
        "advise", "cancel", "down", "exec", "launch", "logs", "plan", "queue", "simulate", "status",
    ),
    "broker.aio": ("Launched",),
    "broker.app.admin_policy": ("PolicyRequest",),
    "broker.app.advising": ("Recommendation",),
    "broker.app.clusters": ("Status",),
    "broker.app.jobs": ("Explanation",),
    "broker.app.planning": ("read_task",),
    "broker.app.simulating": ("Simulation",),
    "broker.errors": (
        "BrokerError", "CloudError", "JobEndedError", "NoOfferError", "PolicyError", "RunFailedError", "StateError",
        "TaskError", "UsageError", "WaitTimeoutError",
    ),
    "broker.types": (
        "Cluster", "Estimate", "Job", "JobStatus", "Offer", "Placement", "Plan", "Run", "Task",
    ),
}  # fmt: skip
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = ["__version__", *_MODULES, *_HOMES]


def __getattr__(name: str) -> object:
    import importlib

    if name in _MODULES:
        return importlib.import_module(f"broker.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module `broker` has no `{name}`")
    found: object = getattr(importlib.import_module(home), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
