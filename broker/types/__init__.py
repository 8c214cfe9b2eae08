"""The nouns. Each room turns one of these into the next; all are frozen, and nothing mutates what it was handed.

task.yaml -> Task -> Offers -> Plan -> Cluster -> Run -> Job with its Attempts
Units stand last in a name: `_s`, `_hours`, `_usd`, `_gib`. Money is US dollars, memory is GiB, a point in time is
seconds since the epoch.
"""

from __future__ import annotations

from broker.types.jobs import Attempt, Job, JobStatus, Progress
from broker.types.machines import Cluster, ClusterStatus, Node, NodeRequest, NodeState, Run, RunStatus
from broker.types.market import AcceleratorFigures, EgressPrice, Estimate, Offer, Placement, Plan, Rejection
from broker.types.pipeline import Objective, PipelineEdge, PipelinePlan, PipelineStep, Transfer
from broker.types.task import (
    Autostop,
    CheckpointSpec,
    DataSet,
    Goal,
    JobRecovery,
    Notice,
    Origin,
    Quantity,
    Resources,
    Secret,
    StorageMount,
    Task,
)

__all__ = [
    "AcceleratorFigures",
    "Attempt",
    "Autostop",
    "CheckpointSpec",
    "Cluster",
    "ClusterStatus",
    "DataSet",
    "EgressPrice",
    "Estimate",
    "Goal",
    "Job",
    "JobRecovery",
    "JobStatus",
    "Node",
    "NodeRequest",
    "NodeState",
    "Notice",
    "Objective",
    "Offer",
    "Origin",
    "PipelineEdge",
    "PipelinePlan",
    "PipelineStep",
    "Placement",
    "Plan",
    "Progress",
    "Quantity",
    "Rejection",
    "Resources",
    "Run",
    "RunStatus",
    "Secret",
    "StorageMount",
    "Task",
    "Transfer",
]
