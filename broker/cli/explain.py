"""`broker plan --explain`: every term of the two best estimates, and why cheaper hourly prices ranked lower."""

from __future__ import annotations

from broker.cli.plan_table import describe_choice, fold_zones, join_zones
from broker.cli.render import print_line, print_wrapped
from broker.formatting import format_count, format_duration, format_hours, format_usd
from broker.optimizer.data_cost import list_assumptions, measure_restore_s
from broker.optimizer.explain import Rejected, list_losers, show_chance
from broker.optimizer.rating import HOUR_VALUE_SHARE
from broker.types import Breakdown, Estimate, Plan, Task

LOSERS_MAX = 12
HOURS_MIN = 0.05  # shorter shares on-demand are not shown


def show_explanation(plan: Plan, unlimited: Plan) -> None:
    _show_terms(plan)
    losers = list_losers(plan, unlimited)
    if losers:
        print_line("\nCheaper per hour, but ranked lower:")
        for loser in losers[:LOSERS_MAX]:
            print_wrapped(_say_loser(loser), indent=4)
        if len(losers) > LOSERS_MAX:
            print_line(f"... and {len(losers) - LOSERS_MAX} more instance types")
    _show_assumptions(plan)


def _show_terms(plan: Plan) -> None:
    """Print the choice and the runner-up, which differs by more than its zone."""
    for number, group in enumerate(fold_zones(plan.estimates, 2), start=1):
        print_line(f"\n{number}. {describe_choice(group[0], zones=join_zones(group))}")
        terms = list_terms(plan.task, group[0])
        if number > 1 and terms == list_terms(plan.task, plan.choice):
            print_line("  same terms as above")
            continue
        for name, text in terms:
            print_wrapped(f"  {name:<24}{text}", indent=26)


def _say_loser(loser: Rejected) -> str:
    placement = loser.estimate.placement
    model = "spot" if placement.is_spot else "on-demand"
    more = f" (and {loser.others} more places)" if loser.others else ""
    where = f"{placement.offer.cloud} {placement.offer.instance_type} {model}"
    return f"  {where} at {format_usd(placement.usd_hour)} USD/h{more}: {loser.reason}"


def list_terms(task: Task, estimate: Estimate) -> list[tuple[str, str]]:
    """List (name, value) of every term of E[T] and E[$], in the order of the sum."""
    placement, parts = estimate.placement, estimate.breakdown
    nodes = format_count(placement.node_count, "node")
    terms = [("price c", f"{format_usd(placement.usd_hour)} USD/h for {nodes}")]
    if placement.is_spot:
        terms.append(("hazard", _say_hazard(estimate)))
    if parts is not None:
        terms += _list_hours(task, estimate, parts)
        terms += _list_dollars(estimate, parts)
    if estimate.deadline_chance is not None:
        terms.append(("deadline chance", show_chance(estimate.deadline_chance)))
    if estimate.budget_chance is not None:
        terms.append(("budget chance", show_chance(estimate.budget_chance)))
    return terms


def _say_hazard(estimate: Estimate) -> str:
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
        restore_s = measure_restore_s(spec.size_gib)
        restore = f" + {format_duration(restore_s)} restore" if restore_s else ""
        billed = f"{format_duration(parts.recovery_billed_s)} billed"
        terms += [
            ("expected preemptions", f"{estimate.expected_preemptions or 0:.2f}"),
            ("lost work", format_hours(parts.lost_hours)),
            ("start R", f"{format_duration(spec.restart_s)} restart{restore}, {billed}"),
            ("time for starts", format_hours(parts.recovery_hours)),
            ("waiting for spot", format_hours(parts.waiting_hours)),
        ]
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


def _show_assumptions(plan: Plan) -> None:
    if plan.choice.breakdown is None:
        return
    lines = [
        "time on spot counts from submission, on-demand from the first start; on-demand instances are not preempted",
        *list_assumptions(plan.task, plan.choice.placement.offer.cloud),
        describe_hour_value(plan),
    ]
    if plan.task.goal and plan.task.goal.budget_usd is not None:
        lines.append("the budget applies to the expected cost; a managed job ends when it has spent it")
    print_line("\nAssumptions:")
    for line in lines:
        print_wrapped(f"  - {line}", indent=4)


def describe_hour_value(plan: Plan) -> str:
    """Describe the value of an hour and its origin."""
    usd = format_usd(plan.hour_value_usd)
    if plan.task.goal and plan.task.goal.hour_value_usd is not None:
        return f"an hour earlier is worth {usd} USD, as the task says"
    share = f"{HOUR_VALUE_SHARE * 100:g} % of the on-demand price of the gang"
    return f"an hour earlier is worth {usd} USD: {share}; set another with `goal: {{hour_value: USD}}`"
