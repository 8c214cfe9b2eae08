"""`broker plan --what-if 'deadline=24h'`: compare the plan with plans for a changed task."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from broker.app.what_if import change_task
from broker.cli.plan_table import MODELS
from broker.cli.render import print_line, print_table, print_wrapped
from broker.errors import NoOfferError
from broker.formatting import format_hours, format_usd
from broker.optimizer.explain import show_chance
from broker.types import Plan, Task

Planner = Callable[[Task], Plan]


def show_what_ifs(plan: Plan, changes: Sequence[str], make_plan: Planner) -> None:
    """Print a row for the unchanged plan and one per change; below, reasons and hints if nothing fits."""
    rows = [_list_cells("(unchanged)", plan, plan)]
    failures: list[tuple[str, NoOfferError]] = []
    for text in changes:
        try:
            rows.append(_list_cells(text, make_plan(change_task(plan.task, text)), plan))
        except NoOfferError as error:
            rows.append([text, "nothing fits", "-", "-", "-", "-"])
            failures.append((text, error))
    print_line("\nWhat if:")
    columns = ["CHANGE", "LOCATION", "USD", "DIFF", "TIME", "CHANCE"]
    numbers = ("USD", "DIFF", "TIME", "CHANCE")
    print_table(columns, rows, right=numbers, firm=("LOCATION", *numbers))
    print_line("USD to finish, or per hour for a task without work; CHANCE to meet the deadline")
    for text, failure in failures:
        print_line()
        print_wrapped(f"{text}: {_find_cause(failure)}", indent=4)
        for hint in failure.hints[:1]:
            print_wrapped(f"  hint: {hint}", indent=8)


def _find_cause(error: NoOfferError) -> str:
    """Return the last line: the filter that removed the last offers, or the unknown name."""
    lines = error.details or error.message.splitlines()
    return re.sub(r"\s{2,}", ": ", lines[-1].strip(), count=1)


def describe_what_ifs(plan: Plan, changes: Sequence[str], make_plan: Planner) -> list[dict[str, object]]:
    """Return the plan under each change as JSON-ready data."""
    from broker.cli.plan_table import describe_estimate

    found = list[dict[str, object]]()
    for text in changes:
        try:
            changed = make_plan(change_task(plan.task, text))
            found.append({"change": text, "choice": describe_estimate(changed.choice), "reason": changed.reason})
        except NoOfferError as error:
            reason = "\n".join([error.message, *error.details])
            found.append({"change": text, "choice": None, "reason": reason, "hints": list(error.hints)})
    return found


def _list_cells(text: str, plan: Plan, base: Plan) -> list[str]:
    choice = plan.choice
    offer = choice.placement.offer
    own, other = choice.expected_usd, base.choice.expected_usd
    if own is None or other is None:  # if only one of them has work, only hourly prices are comparable
        own, other = choice.placement.usd_hour, base.choice.placement.usd_hour
    difference = own - other
    chance = choice.deadline_chance
    return [
        text, f"{offer.cloud} {MODELS[choice.strategy]}", format_usd(own),
        "" if plan is base else f"{'+' if difference >= 0 else '-'}{format_usd(abs(difference))}",
        format_hours(choice.expected_hours), "-" if chance is None else show_chance(chance),
    ]  # fmt: skip
