"""`broker plan`: rank placements for a task, explain the ranking and compare changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from broker.app.container import Context
from broker.app.planning import apply_checkpoint_default, check_notices, check_plans
from broker.cli import options
from broker.cli.context import make_context
from broker.cli.plan_table import describe_plan, has_spot_work, show_plan
from broker.cli.render import print_json, print_note
from broker.config import find_home
from broker.errors import UsageError
from broker.types import Objective, PipelinePlan, Plan, Task

TaskArgument = Annotated[
    str | None,  # not a Path, for which an empty name is the current folder
    typer.Argument(metavar="[TASK.yaml]", help="Task file. Omit it to plan from options alone.", show_default=False),
]
MaxPriceOption = Annotated[
    float | None, typer.Option("--max-price", metavar="USD", min=0, help="Maximum price per node, in USD per hour.")
]
MinimizeOption = Annotated[
    Objective, typer.Option("--minimize", help="Objective for the whole pipeline: cost or time.")
]
DeadlineHoursOption = Annotated[
    float | None,
    typer.Option("--deadline-hours", metavar="HOURS", help="Deadline for the whole pipeline, in hours."),
]
TopOption = Annotated[int, typer.Option("--top", metavar="N", min=1, help="Number of rows to show.")]
ExplainOption = Annotated[
    bool,
    typer.Option("--explain", help="Break down the estimate and explain why cheaper instances ranked lower."),
]
WhatIfOption = Annotated[
    list[str] | None,
    typer.Option("--what-if", metavar="KEY=VALUE[,...]", help="Compare with a changed task. Repeatable."),
]
ParetoOption = Annotated[bool, typer.Option("--pareto", help="Plot cost against time.")]
PlotOption = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Write the --pareto plot to a .svg file.")
]
AsJsonOption = Annotated[bool, typer.Option("--json", help="Print the ranking as JSON.")]


@options.task_options(*options.RESOURCES, *options.ENVIRONMENT)
def plan(
    task: TaskArgument = None,
    overrides: options.Overrides = options.NO_OVERRIDES,
    max_price: MaxPriceOption = None,
    minimize: MinimizeOption = "cost",
    deadline_hours: DeadlineHoursOption = None,
    top: TopOption = 10,
    explain: ExplainOption = False,
    what_if: WhatIfOption = None,
    pareto: ParetoOption = False,
    plot: PlotOption = None,
    as_json: AsJsonOption = False,
) -> None:
    """Rank placements for a task by cost, without starting anything."""
    context = make_context()
    overrides = replace(overrides, max_price=max_price)
    tasks = apply_checkpoint_default(find_home(), [context.resolve(each) for each in _read(task, overrides)])
    check_notices(tasks, is_launch=False, note=print_note)
    if plot is not None and len(tasks) > 1:
        hint = "omit `--plot`: `--pareto` prints the trade-off of each task"
        raise UsageError(f"`--plot` draws a single task, and the file has {len(tasks)}", hints=[hint])
    plans, missing = _plan_all(context, tasks)
    whole = None
    if not missing and (len(plans) > 1 or minimize != "cost" or deadline_hours is not None):
        plans, whole = _plan_whole(context, plans, minimize, deadline_hours)
    check_plans(plans, home=context.market.home, is_launch=False, note=print_note)
    if as_json:
        found = _describe(context, plans, what_if or (), top, whole)
        print_json([*found, *missing] if isinstance(found, list) else found)
        return
    if whole is not None:
        from broker.cli.pipeline import show_pipeline

        show_pipeline(whole, name=tasks[0].pipeline, role=tasks[0].group)
        if not (explain or what_if or pareto or plot):
            return
    for each in plans:
        _show(context, each, what_if or (), plot, top=top, explain=explain, pareto=pareto)


def _read(file: str | None, overrides: options.Overrides) -> Sequence[Task]:
    """Read the tasks of a file, or of options alone; a mistyped file name is an error, not a command."""
    if file is not None and not file.strip():
        raise UsageError("the name of the task file is empty", hints=["is a variable of the shell unset?"])
    if file is None:
        if overrides == options.NO_OVERRIDES:
            raise UsageError(
                "no task file and no resource options were given",
                hints=["name a task file, or describe the node: `broker plan --gpus H100:8`"],
            )
        return options.read_tasks([], overrides)
    if not options.is_file([file]):
        from broker.task.loader import load_tasks

        return load_tasks(Path(file))  # raises an error with the reason why the file cannot be read
    return options.read_tasks([file], overrides)


def _plan_all(context: Context, tasks: Sequence[Task]) -> tuple[list[Plan], list[dict[str, object]]]:
    """Plan each task; return the plans, and the tasks whose cloud has no imported offers yet (noted on stderr)."""
    from broker.errors import NotImportedError

    plans, missing = list[Plan](), list[dict[str, object]]()
    for each in tasks:
        try:
            plans.append(context.plan(each))
        except NotImportedError as error:
            print_note(f"Task {each.name or '(no name)'}: {error.message}")
            for hint in error.hints:
                print_note(f"hint: {hint}")
            missing.append({"task": each.name, "choice": None, "estimates": [], "missing_offers": error.message})
    return plans, missing


def _plan_whole(
    context: Context, plans: list[Plan], minimize: Objective, deadline_hours: float | None
) -> tuple[list[Plan], PipelinePlan]:
    """Plan all tasks together: those of a job group in one region, as they are launched."""
    from broker.pipelines.groups import keep_together

    together = keep_together(plans)
    whole = context.plan_pipeline(together, objective=minimize, deadline_hours=deadline_hours)
    if together != tuple(plans):
        apart = context.plan_pipeline(plans, objective=minimize, deadline_hours=deadline_hours)
        whole = replace(whole, greedy_usd=apart.usd, greedy_hours=apart.hours)
    return list(together), whole


def _show(
    context: Context, plan: Plan, what_if: Sequence[str], plot: Path | None, *, top: int, explain: bool, pareto: bool
) -> None:
    lines = list[str]()
    if has_spot_work(plan):
        from broker.cli.forecast import list_forecast_lines

        lines = list_forecast_lines(plan)
    show_plan(plan, top=top, now_s=context.clock.now_s(), forecast=lines)
    if explain and lines:
        from broker.cli.forecast import show_influences

        show_influences(plan)
    if explain:
        from broker.cli.explain import show_explanation
        from broker.optimizer.explain import lift_limits

        show_explanation(plan, context.plan(lift_limits(plan.task)))
    if what_if:
        from broker.cli.what_if import show_what_ifs

        show_what_ifs(plan, what_if, lambda changed: context.plan(context.resolve(changed)))
    if pareto or plot:
        from broker.cli.pareto import show_pareto

        show_pareto(plan, plot)


def _describe(
    context: Context,
    plans: Sequence[Plan],
    what_if: Sequence[str],
    top: int,
    whole: PipelinePlan | None,
) -> object:
    found = [describe_plan(each, top) for each in plans]
    if any(has_spot_work(each) for each in plans):
        from broker.cli.forecast import describe_forecast

        for data, each in zip(found, plans, strict=True):
            data["forecast"] = describe_forecast(each)
    if what_if:
        from broker.cli.what_if import describe_what_ifs

        for data, each in zip(found, plans, strict=True):
            data["what_if"] = describe_what_ifs(each, what_if, lambda changed: context.plan(context.resolve(changed)))
    if whole is not None:
        from broker.cli.pipeline import describe_pipeline

        return {**describe_pipeline(whole), "tasks": found}
    return found
