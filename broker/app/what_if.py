"""Change a task by `KEY=VALUE` text, to compare plans."""

from __future__ import annotations

from dataclasses import replace

from broker.errors import UsageError
from broker.optimizer.infeasible import drop_fields
from broker.task.loader import load_tasks_text
from broker.task.override import override_resources
from broker.types import Goal, Task

GOAL = {
    "work": "work_hours", "deadline": "deadline_hours", "budget": "budget_usd", "confidence": "confidence",
    "hour_value": "hour_value_usd",
}  # fmt: skip
CHECKPOINT = {"every": "every_s", "stall": "stall_s", "restart": "restart_s", "size": "size_gib"}
RESOURCES = ("infra", "cloud", "region", "zone", "instance_type", "accelerators", "cpus", "memory")
KEYS = (*GOAL, *(f"checkpoint.{name}" for name in CHECKPOINT), *RESOURCES, "use_spot", "max_hourly_cost", "num_nodes")

# Fields that `KEY=none` removes: a broader location also removes the narrower ones.
DROPPED = {
    "infra": ("cloud", "region", "zone"),
    "cloud": ("cloud", "region", "zone"),
    "region": ("region", "zone"),
    "accelerators": ("accelerator",),
    "memory": ("memory_gib", "memory_gib_per_vcpu"),
}


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
        use_spot = None if is_none else _read(f"resources:\n  use_spot: {value}").resources[0].use_spot
        return replace(task, resources=tuple(replace(each, use_spot=use_spot) for each in task.resources))
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
