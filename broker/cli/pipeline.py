"""Render the plan of a pipeline: the placement of each task, data transfers, and the cost of choosing greedily."""

from __future__ import annotations

from broker.cli.render import print_line, print_table
from broker.formatting import format_count, format_hours, format_usd, to_plain
from broker.types import GroupRole, PipelineEdge, PipelinePlan, PipelineStep


def show_pipeline(plan: PipelinePlan, *, name: str | None = None, role: GroupRole | None = None) -> None:
    """Print steps in a possible order of execution, transfers that are not free, the total, and the greedy total."""
    aim = "lowest cost" if plan.objective == "cost" else "shortest time"
    timed = ", the value of time included" if plan.time_usd else ""
    limit = f" within {format_hours(plan.deadline_hours)}" if plan.deadline_hours else ""
    count = len(plan.steps)
    named = f" {name}" if name else ""
    what = "Pipeline" if role is None else "Job group"
    where = " in one region" if role is not None and role.is_connected else ""
    print_line(f"{what}{named} of {format_count(count, 'task')}{where}: {aim} overall{limit}{timed}")
    print_table(
        ["TASK", "CLOUD", "REGION/ZONE", "INSTANCE", "MODEL", "USD", "TIME"],
        [_list_cells(step) for step in plan.steps],
        right=("USD", "TIME"),
    )
    moving = [edge for edge in plan.edges if edge.gib]
    if moving:
        print_line()
        print_table(
            ["DATA FROM", "TO", "GiB", "USD", "TIME"],
            [
                [
                    edge.source, edge.target, f"{edge.gib:,.4g}",
                    format_usd(edge.transfer.usd, is_estimated=edge.transfer.is_assumed),
                    format_hours(edge.transfer.hours),
                ]
                for edge in moving
            ],
            right=("GiB", "USD", "TIME"),
        )  # fmt: skip
    _show_totals(plan, moving)


def _list_cells(step: PipelineStep) -> list[str]:
    placement = step.estimate.placement
    offer = placement.offer
    instances = f"{placement.node_count} x {offer.instance_type}" if placement.node_count > 1 else offer.instance_type
    return [
        step.name, offer.cloud, offer.zone or offer.region, instances, "spot" if placement.is_spot else "od",
        format_usd(step.usd, is_estimated=step.is_assumed or (offer.is_estimated and not placement.is_spot)),
        f"{'~' if step.is_assumed else ''}{format_hours(step.hours)}",
    ]  # fmt: skip


def _show_totals(plan: PipelinePlan, moving: list[PipelineEdge]) -> None:
    egress = f", of which {format_usd(plan.egress_usd)} for data transfer" if moving else ""
    print_line(f"Total: {format_usd(plan.usd)} USD{egress}; {format_hours(plan.hours)} on the critical path")
    greedy = f"{format_usd(plan.greedy_usd)} USD and {format_hours(plan.greedy_hours)}"
    is_same = abs(plan.greedy_usd - plan.usd) < 0.005 and abs(plan.greedy_hours - plan.hours) < 1 / 60
    print_line(
        "Choosing each task separately costs the same"
        if is_same
        else f"Choosing each task separately would cost {greedy}"
    )
    if not plan.is_optimal:
        print_line(f"Not proven optimal: {_describe_gap(plan)}")
    as_of = min(step.estimate.placement.as_of for step in plan.steps)
    if as_of:
        print_line(f"Prices as of {as_of}")
    if any(step.is_assumed for step in plan.steps):
        print_line("~ marks a task without `goal: work`, counted as one hour")
    if any(edge.transfer.is_assumed for edge in plan.edges):
        print_line("~ marks a transfer without a known egress price; a high one is assumed")


def _describe_gap(plan: PipelinePlan) -> str:
    if plan.objective == "cost":
        timed = ", the value of time included" if plan.time_usd else ""
        bound, cost = format_usd(plan.lower_bound), format_usd(plan.usd + plan.time_usd)
        return f"the lower bound is {bound} USD, this plan costs {cost}{timed}"
    if plan.lower_bound < plan.hours:
        return f"the lower bound is {format_hours(plan.lower_bound)}, this plan takes {format_hours(plan.hours)}"
    return "no plan is faster, but an equally fast one may be cheaper"


def describe_pipeline(plan: PipelinePlan) -> dict[str, object]:
    """Return the whole plan, JSON-ready."""
    data: dict[str, object] = to_plain(plan)
    return {**data, "egress_usd": plan.egress_usd}
