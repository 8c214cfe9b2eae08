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
            "the region immediately, `cheapest` plans again, `deadline` (the default if the `goal` has work and a "
            "deadline) weighs spot, waiting and on-demand against the remaining time. SkyPilot's "
            "`DYNAMIC_NODE_SET` means the default strategy with `min_nodes` (1 unless set).",
        ),
        "max_restarts_on_errors": Field(
            shape=Whole(),
            about="Maximum restarts of a failed program. By default, the program restarts as long as it reports new "
            "steps or checkpoints; three failures at the same step end the job. A failure before the first step ends "
            "it immediately, unless a signal ended a program that saves checkpoints.",
        ),
        "recover_on_exit_codes": Field(
            shape=Either(shapes=(Whole(maximum=255), ListOf(item=Whole(maximum=255)))),
            about="Exit codes that always restart the program and do not count as failures.",
        ),
        "stall_timeout": Field(
            shape=Duration(bare_unit="s"),
            about="Restart a program that reports no new step for this time (broker extension).",
        ),
        "min_nodes": Field(
            shape=Whole(minimum=1),
            about="Minimum number of nodes with which an elastic program continues while lost nodes are replaced. They "
            "must include the first node, unless the program follows `BROKER_GANG_FILE`, as the bundled trainers do "
            "(broker extension).",
        ),
        "health_check": Field(
            shape=Flag(),
            about="Check each node's GPUs, and the network between nodes, before the first step and replace faulty "
            "nodes (default: on cloud machines with GPUs).",
        ),
        "cache_setup": Field(
            shape=Flag(),
            about="Archive what `setup` wrote to the home folder, next to the checkpoints, once that pays off; later "
            "starts restore it instead of running `setup` (broker extension; docs/RECOVERY.md).",
        ),
    },
)
