"""`broker plan --what-if 'deadline=24h'`: the plan again with something changed, side by side."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from broker.cli.plan_table import MODELS
from broker.cli.render import print_line, print_table, print_wrapped, show_hours, show_usd
from broker.errors import NoOfferError, UsageError
from broker.optimizer.diagnosis import drop_fields
from broker.optimizer.explain import show_chance
from broker.task.loader import load_tasks_text
from broker.task.override import override_resources
from broker.types import Goal, Plan, Task

GOAL = {"work": "work_hours", "deadline": "deadline_hours", "budget": "budget_usd", "confidence": "confidence"}
CHECKPOINT = {"every": "every_s", "stall": "stall_s", "restart": "restart_s", "size": "size_gib"}
RESOURCES = ("infra", "cloud", "region", "zone", "instance_type", "accelerators", "cpus", "memory")
KEYS = (*GOAL, *(f"checkpoint.{name}" for name in CHECKPOINT), *RESOURCES, "use_spot", "max_hourly_cost", "num_nodes")

# What taking a thing back takes back: a broader place takes the finer ones with it.
DROPPED = {
    "infra": ("cloud", "region", "zone"),
    "cloud": ("cloud", "region", "zone"),
    "region": ("region", "zone"),
    "accelerators": ("accelerator",),
    "memory": ("memory_gib",),
}

Planner = Callable[[Task], Plan]


def change_task(task: Task, text: str) -> Task:
    """The task after `KEY=VALUE[, KEY=VALUE...]`, values as a task file writes them. Raises UsageError or TaskError."""
    for part in text.split(","):
        name, separator, value = (word.strip() for word in part.partition("="))
        if not separator or name not in KEYS:
            import difflib

            near = difflib.get_close_matches(name, KEYS, n=1)
            raise UsageError(
                f"`--what-if {text}`: `{name}` cannot be changed" if separator else f"`--what-if {text}` lacks a value",
                hints=[f"did you mean `{near[0]}`?" if near and near[0] != name else f"keys: {', '.join(KEYS)}"],
            )
        task = _change(task, name, value)
    return task


def _change(task: Task, name: str, value: str) -> Task:
    """One change. `none` takes a limit back."""
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
    """Every alternative at most so many USD per hour and node."""
    return replace(task, resources=tuple(replace(each, usd_hour_max=usd_hour_max) for each in task.resources))


def _read(text: str) -> Task:
    """Values are read by the loader, so that they mean what they mean in a file."""
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
    """One row for the plan as it is, and one a change; below, why nothing fits and what would."""
    rows = [_list_cells("(as it is)", plan, plan)]
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
    print_line("USD is to finish, or per hour where no work is given; CHANCE is of the deadline")
    for text, failure in failures:
        print_line()
        print_wrapped(f"{text}: {_find_cause(failure)}", indent=4)
        for hint in failure.hints[:1]:
            print_wrapped(f"  hint: {hint}", indent=8)


def _find_cause(error: NoOfferError) -> str:
    """The last line: the filter after which nothing was left, or the name that is not in the price book."""
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
        text, f"{offer.cloud} {MODELS[choice.strategy]}", show_usd(own),
        "" if plan is base else f"{'+' if difference >= 0 else '-'}{show_usd(abs(difference))}",
        show_hours(choice.expected_hours), "-" if chance is None else show_chance(chance),
    ]  # fmt: skip
