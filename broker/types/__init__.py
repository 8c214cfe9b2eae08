"""The domain types. Each package turns one into the next; all are frozen, and no function mutates its input.

task.yaml -> Task -> Offers -> Plan -> Cluster -> Run -> Job with its Attempts
Names end with their unit: `_s`, `_hours`, `_usd`, `_gib`. Money is in US dollars, memory in GiB, a point in time in
seconds since the epoch.

Each type is imported on first use: creating a dataclass takes half a millisecond, and `broker plan` needs few of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from broker.types.groups import *  # noqa: F403
    from broker.types.jobs import *  # noqa: F403
    from broker.types.machines import *  # noqa: F403
    from broker.types.market import *  # noqa: F403
    from broker.types.notify import *  # noqa: F403
    from broker.types.outcomes import *  # noqa: F403
    from broker.types.pipeline import *  # noqa: F403
    from broker.types.schedules import *  # noqa: F403
    from broker.types.service import *  # noqa: F403
    from broker.types.task import *  # noqa: F403
    from broker.types.usage import *  # noqa: F403

_TYPES = {
    "groups": ("GroupRole", "OnLoss"),
    "jobs": ("Attempt", "GangHead", "Job", "JobStatus", "JobWait", "ObservedCheckpoints", "Progress", "WaitReason"),
    "machines": (
        "Cluster",
        "ClusterStatus",
        "Node",
        "NodeEnd",
        "NodeList",
        "MachineSpec",
        "NodeRequest",
        "NodeState",
        "Run",
        "RunStatus",
    ),
    "market": (
        "AcceleratorFigures",
        "Breakdown",
        "EgressPrice",
        "Estimate",
        "Objective",
        "Offer",
        "Placement",
        "Plan",
        "Rejection",
        "Strategy",
    ),
    "notify": ("NotificationKind", "NotifySpec"),
    "outcomes": ("Event", "EventData", "EventKind", "IntentEnd", "Outcome", "OutcomeKind", "make_event"),
    "pipeline": ("PipelineEdge", "PipelinePlan", "PipelineStep", "Transfer"),
    "schedules": ("DueOutcome", "DueTime", "JobSchedule", "Overlap", "Payee", "ScheduleSpec"),
    "service": (
        "BalancerType",
        "GATEWAYS_MAX",
        "GatewayPlace",
        "GatewaySpec",
        "ReadinessProbe",
        "Replica",
        "ReplicaPolicy",
        "Service",
        "ServiceEventKind",
        "ServiceProtocol",
        "ServiceSpec",
        "TlsFiles",
        "UpdateMode",
    ),
    "task": (
        "Autostop",
        "CheckpointSpec",
        "DataSet",
        "Goal",
        "JobRecovery",
        "Notice",
        "ORDINARY_GIB",
        "Origin",
        "Quantity",
        "Repository",
        "Resources",
        "Secret",
        "StorageMount",
        "Task",
    ),
    "usage": (
        "GpuSample",
        "JobUsage",
        "NodeFault",
        "NodeHistory",
        "NodeSample",
        "OwnTime",
        "SetupResult",
        "SlowNetwork",
    ),
}
_HOMES = {name: module for module, names in _TYPES.items() for name in names}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module `broker.types` has no `{name}`")
    found: object = getattr(importlib.import_module(f"broker.types.{home}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(_HOMES)
