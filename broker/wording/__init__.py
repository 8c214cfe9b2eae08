"""Render outcomes and events as text for users. Only this package does, and no module parses the text."""

from __future__ import annotations

from broker.wording.events import describe_event
from broker.wording.outcomes import (
    describe_displacement,
    describe_lost_nodes,
    describe_lost_start,
    describe_notice,
    describe_outcome,
    describe_slow_node,
    explain_broken_gang,
    explain_budget,
    explain_cancelled_run,
    explain_dependency,
    explain_exit,
    explain_failed_launches,
    explain_group_failure,
    explain_lost_files,
    explain_max_duration,
    explain_setup_exit,
    explain_stall,
    explain_unhealthy,
)
from broker.wording.places import describe_place, make_place
from broker.wording.waits import describe_wait

__all__ = [
    "describe_displacement",
    "describe_event",
    "describe_lost_nodes",
    "describe_lost_start",
    "describe_notice",
    "describe_outcome",
    "describe_place",
    "describe_slow_node",
    "describe_wait",
    "explain_broken_gang",
    "explain_budget",
    "explain_cancelled_run",
    "explain_dependency",
    "explain_exit",
    "explain_failed_launches",
    "explain_group_failure",
    "explain_lost_files",
    "explain_max_duration",
    "explain_setup_exit",
    "explain_stall",
    "explain_unhealthy",
    "make_place",
]
