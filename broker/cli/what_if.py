"""`broker plan --what-if 'deadline=24h'`: compare the plan with plans for a changed task."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from broker.cli.plan_table import MODELS
from broker.cli.render import print_line, print_table, print_wrapped
from broker.errors import NoOfferError, UsageError
from broker.formatting import format_hours, format_usd
from broker.optimizer.explain import show_chance
from broker.optimizer.infeasible import drop_fields
from broker.task.loader import load_tasks_text
from broker.task.override import override_resources
from broker.types import Goal, Plan, Task

GOAL = {"work": "work_hours", "deadline": "deadline_hours", "budget": "budget_usd", "confidence": "confidence"}
CHECKPOINT = {"every": "every_s", "stall": "stall_s", "restart": "restart_s", "size": "size_gib"}
RESOURCES = ("infra", "cloud", "region", "zone", "instance_type", "accelerators", "cpus", "memory")
KEYS = (*GOAL, *(f"checkpoint.{name}" for name in CHECKPOINT), *RESOURCES, "use_spot", "max_hourly_cost", "num_nodes")

# Fields that `KEY=none` removes: a broader location also removes the narrower ones.
DROPPED = {
    "infra": ("cloud", "region", "zone"),
    "cloud": ("cloud", "region", "zone"),
    "region": ("region", "zone"),
    "accelerators": ("accelerator",),
    "memory": ("memory_gib",),
}

Planner = Callable[[Task], Plan]


def change_task(task: Task, text: str) -> Task:
    """Apply `KEY=VALUE[, KEY=VALUE...]` with values as in a task file. Raises UsageError or TaskError."""
    for part in text.split(","):
        name, separator, value = (word.strip() for word in part.partition("="))
        if not separator or name not in KEYS:
            import difflib

            near = difflib.get_close_matches(name, KEYS, n=1)
            raise UsageError(
                f"`--what-if {text}`: unknown key `{name}`" if separator else f"`--what-if {text}` has no value",
                hints=[f"did you mean `{near[0]}`?" if near and near[0] != name else f"known keys: {', '.join(KEYS)}"],
            )
        task = _change(task, name, value)
    return task


def _change(task: Task, name: str, value: str) -> Task:
    """Apply one change; `none` removes a limit."""
    is_none = value.lower() in ("none", "null")
    if name in GOAL:
        goal = Goal() if is_none else _read(f"goal:\n  {name}: {value}").goal or Goal()
        changes = {GOAL[name]: getattr(goal, GOAL[name])}
        if name == "work":
            changes["work_on"] = goal.work_on or (task.goal.work_on if task.goal else None)
        return replace(task, goal=replace(task.goal or Goal(), **changes))
    if name.startswith("checkpoint."):
        field = name.removeprefix("checkpoint.")
        spec = _read("run: ''" if is_none else f"checkpoint:\n  {field}: {value}").checkpoint
        changed = {CHECKPOINT[field]: getattr(spec, CHECKPOINT[field])}
        return replace(task, checkpoint=replace(task.checkpoint, **changed))
    if name == "max_hourly_cost":
        return limit_price(task, None if is_none else _read_number(name, value))
    if name == "num_nodes":
        return replace(task, num_nodes=_read(f"num_nodes: {value}").num_nodes)
    if name == "use_spot":
        asked = None if is_none else _read(f"resources:\n  use_spot: {value}").resources[0].use_spot
        return replace(task, resources=tuple(replace(each, use_spot=asked) for each in task.resources))
    if is_none:
        return drop_fields(task, *DROPPED.get(name, (name,)))
    return override_resources(task, **{name: value})  # type: ignore[arg-type]


def limit_price(task: Task, usd_hour_max: float | None) -> Task:
    """Limit every alternative to a price per node, in USD per hour."""
    return replace(task, resources=tuple(replace(each, usd_hour_max=usd_hour_max) for each in task.resources))


def _read(text: str) -> Task:
    """Read values with the loader, so that they mean the same as in a file."""
    return load_tasks_text(f"{text}\nrun: ''" if "run" not in text else text, "--what-if")[0]


def _read_number(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 < number < 1e9:
        raise UsageError(f"`{name}` must be a number above 0, not `{value}`")
    return number


def show_what_ifs(plan: Plan, changes: Sequence[str], make_plan: Planner) -> None:
    """Print a row for the unchanged plan and one a change; below, reasons and hints where nothing fits."""
    rows = [_list_cells("(unchanged)", plan, plan)]
    failures: list[tuple[str, NoOfferError]] = []
    for text in changes:
        try:
            rows.append(_list_cells(text, make_plan(change_task(plan.task, text)), plan))
        except NoOfferError as error:
            rows.append([text, "nothing fits", "-", "-", "-", "-"])
            failures.append((text, error))
    print_line("\nWhat if:")
    columns = ["CHANGE", "WHERE", "USD", "DIFF", "TIME", "CHANCE"]
    numbers = ("USD", "DIFF", "TIME", "CHANCE")
    print_table(columns, rows, right=numbers, firm=("WHERE", *numbers))
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
    if own is None or other is None:  # with work in one and none in the other only the price per hour compares
        own, other = choice.placement.usd_hour, base.choice.placement.usd_hour
    difference = own - other
    chance = choice.deadline_chance
    return [
        text, f"{offer.cloud} {MODELS[choice.strategy]}", format_usd(own),
        "" if plan is base else f"{'+' if difference >= 0 else '-'}{format_usd(abs(difference))}",
        format_hours(choice.expected_hours), "-" if chance is None else show_chance(chance),
    ]  # fmt: skip
