"""`broker plan --explain`: every term of the two best estimates, and why cheaper hourly prices ranked lower."""

from __future__ import annotations

from broker.cli.plan_table import describe_choice, fold_zones, join_zones
from broker.cli.render import print_line, print_wrapped
from broker.formatting import format_usd
from broker.optimizer.data_cost import list_assumptions
from broker.optimizer.explain import Rejected, list_losers
from broker.optimizer.terms import describe_hour_value, list_terms
from broker.types import Plan

LOSERS_MAX = 12


def show_explanation(plan: Plan, unlimited: Plan) -> None:
    """Print every term of the best placements, and cheaper ones per hour that ranked lower."""
    _show_terms(plan)
    losers = list_losers(plan, unlimited)
    if losers:
        print_line("\nCheaper per hour, but ranked lower:")
        for loser in losers[:LOSERS_MAX]:
            print_wrapped(_describe_loser(loser), indent=4)
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


def _describe_loser(loser: Rejected) -> str:
    placement = loser.estimate.placement
    model = "spot" if placement.is_spot else "on-demand"
    more = f" (and {loser.others} more like it)" if loser.others else ""
    where = f"{placement.offer.cloud} {placement.offer.instance_type} {model}"
    return f"  {where} at {format_usd(placement.usd_hour)} USD/h{more}: {loser.reason}"


def _show_assumptions(plan: Plan) -> None:
    if plan.choice.breakdown is None:
        return
    lines = [
        "time counts from submission, the first start included; on-demand instances are not preempted",
        *list_assumptions(plan.task, plan.choice.placement.offer.cloud),
        describe_hour_value(plan),
    ]
    if plan.task.goal and plan.task.goal.budget_usd is not None:
        lines.append("the budget applies to the expected cost; a managed job ends when it has spent the budget")
    print_line("\nAssumptions:")
    for line in lines:
        print_wrapped(f"  - {line}", indent=4)
