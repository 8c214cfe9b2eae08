"""List every term of an estimate as text: the parts of E[T] and E[$], in the order of their sum."""

from __future__ import annotations

from broker.formatting import format_count, format_duration, format_hours, format_usd
from broker.optimizer.data_cost import measure_restore_s
from broker.optimizer.explain import show_chance
from broker.optimizer.rating import HOUR_VALUE_SHARE
from broker.types import Breakdown, Estimate, Plan, Task

HOURS_MIN = 0.05  # shorter shares on-demand are not shown


def list_terms(task: Task, estimate: Estimate) -> list[tuple[str, str]]:
    """List (name, value) of every term of E[T] and E[$], in the order of the sum."""
    placement, parts = estimate.placement, estimate.breakdown
    nodes = format_count(placement.node_count, "node")
    terms = [("price c", f"{format_usd(placement.usd_hour)} USD/h for {nodes}")]
    if placement.is_spot:
        terms.append(("hazard", _describe_hazard(estimate)))
    if parts is not None:
        terms += _list_hours(task, estimate, parts)
        terms += _list_dollars(estimate, parts)
    if estimate.deadline_chance is not None:
        terms.append(("deadline chance", show_chance(estimate.deadline_chance)))
    if estimate.budget_chance is not None:
        terms.append(("budget chance", show_chance(estimate.budget_chance)))
    return terms


def _describe_hazard(estimate: Estimate) -> str:
    band = estimate.placement.offer.interruption_band
    source = "" if band is None else f", interruption band {'over 20' if band > 20 else f'up to {band:g}'} % included"
    return f"{estimate.preemptions_per_hour:.3f} preemptions/h on spot for the gang (recorded markets{source})"


def _list_hours(task: Task, estimate: Estimate, parts: Breakdown) -> list[tuple[str, str]]:
    spec = task.checkpoint
    terms = [("work W", f"{format_hours(parts.work_hours)} without failures")]
    if estimate.checkpoint_every_s:
        origin = "from the task" if spec.every_s else "Young/Daly"
        terms.append(("interval tau", f"{format_duration(estimate.checkpoint_every_s)} ({origin})"))
        terms.append(("checkpoint stalls", f"{format_hours(parts.stall_hours)}, {format_duration(spec.stall_s)} each"))
    if estimate.placement.is_spot:
        terms.append(("expected preemptions", f"{estimate.expected_preemptions or 0:.2f}"))
        terms.append(("lost work", format_hours(parts.lost_hours)))
    restore_s = measure_restore_s(spec.size_gib)
    restore = f" + {format_duration(restore_s)} restore" if restore_s else ""
    billed = f"{format_duration(parts.recovery_billed_s)} billed"
    terms.append(("start R", f"{format_duration(spec.restart_s)} restart{restore}, {billed}"))
    terms.append(("time for starts", format_hours(parts.recovery_hours)))
    if estimate.placement.is_spot:
        terms.append(("waiting for spot", format_hours(parts.waiting_hours)))
    if estimate.switch_after_hours is not None:
        spare = f"after {format_hours(estimate.switch_after_hours)} of waiting, starts and lost work"
        terms.append(("switch to on-demand", spare))
    return [*terms, ("expected time", format_hours(estimate.expected_hours))]


def _list_dollars(estimate: Estimate, parts: Breakdown) -> list[tuple[str, str]]:
    billed = []
    if parts.spot_hours:
        billed.append(f"{format_hours(parts.spot_hours)} at {format_usd(parts.spot_usd_hour)}")
    if parts.ondemand_hours >= HOURS_MIN or not parts.spot_hours:
        model = " on-demand" if parts.spot_hours else ""
        billed.append(f"{format_hours(parts.ondemand_hours)} at {format_usd(parts.ondemand_usd_hour)}{model}")
    terms = [("machines", f"{format_usd(parts.compute_usd)} USD: {' + '.join(billed)}")]
    if parts.egress_usd:
        terms.append(("data transfer", f"{format_usd(parts.egress_usd)} USD"))
    if parts.storage_usd:
        terms.append(("checkpoint storage", f"{format_usd(parts.storage_usd)} USD"))
    return [*terms, ("expected cost", f"{format_usd(estimate.expected_usd)} USD")]


def describe_hour_value(plan: Plan) -> str:
    """Describe the value of an hour and its origin."""
    usd = format_usd(plan.hour_value_usd)
    if plan.task.goal and plan.task.goal.hour_value_usd is not None:
        return f"finishing an hour earlier is worth {usd} USD, as set in the task"
    share = f"{HOUR_VALUE_SHARE * 100:g} % of the gang's on-demand price"
    return f"finishing an hour earlier is worth {usd} USD ({share}); change it with `goal: {{hour_value: USD}}`"
