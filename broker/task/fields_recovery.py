"""The fields of `resources: {job_recovery: ...}`."""

from __future__ import annotations

from broker.task.measures import Duration
from broker.task.shapes import Choice, Either, Flag, ListOf, Whole
from broker.task.tables import Field, Table

STRATEGIES = ("failover", "eager_next_region", "cheapest", "deadline")
ELASTIC = "dynamic_node_set"  # SkyPilot's name for a gang that continues with fewer nodes; broker's is `min_nodes`
STRATEGY_WORDS = (*STRATEGIES, ELASTIC, "none")

JOB_RECOVERY = Table(
    name="job_recovery",
    about="Recovery of managed jobs.",
    fields={
        "strategy": Field(
            shape=Choice(words=STRATEGY_WORDS),
            is_blank_none=True,
            about="Placement after a preemption: `failover` tries the same location first, `eager_next_region` leaves "
            "the region at once, `cheapest` plans again, `deadline` (the default if the `goal` has work and a "
            "deadline) weighs spot, waiting and on-demand against the remaining time. SkyPilot's "
            "`DYNAMIC_NODE_SET` is the default strategy with `min_nodes`, 1 by default.",
        ),
        "max_restarts_on_errors": Field(
            shape=Whole(),
            about="Maximum restarts of a failed program. By default, it restarts while it reports new steps or "
            "checkpoints: three failures at one step end the job, and so does a first one before any step, unless a "
            "signal ended a program that saves checkpoints.",
        ),
        "recover_on_exit_codes": Field(
            shape=Either(shapes=(Whole(maximum=255), ListOf(item=Whole(maximum=255)))),
            about="Exit codes that always restart the program and do not count as failures.",
        ),
        "stall_timeout": Field(
            shape=Duration(bare_unit="s"),
            about="Restart a program that reports no new step for this long (broker extension).",
        ),
        "min_nodes": Field(
            shape=Whole(minimum=1),
            about="An elastic program continues while the first node and this many nodes in total remain; lost nodes "
            "are replaced meanwhile (broker extension).",
        ),
        "health_check": Field(
            shape=Flag(),
            about="Check each node's GPUs before the first step and replace a faulty node; by default on GPU clouds.",
        ),
    },
)
