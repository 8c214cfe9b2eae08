"""`broker plan`, and the plan table that every launch shows first."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from broker.cli.context import Context
from broker.cli.pipeline import describe_pipeline, show_pipeline
from broker.cli.render import plain, print_json, print_line, print_table, show_duration, show_hours, show_usd
from broker.types import Estimate, Objective, Plan, Task


def plan(
    task: Annotated[Path, typer.Argument(help="The task file.", show_default=False)],
    infra: Annotated[str | None, typer.Option("--infra", help="CLOUD[/REGION[/ZONE]] over the file's.")] = None,
    gpus: Annotated[str | None, typer.Option("--gpus", help="NAME[:COUNT] over the file's.")] = None,
    cpus: Annotated[str | None, typer.Option("--cpus", help="vCPUs of a node, such as 4 or 4+.")] = None,
    memory: Annotated[str | None, typer.Option("--memory", help="GiB of a node, such as 32 or 32+.")] = None,
    instance_type: Annotated[str | None, typer.Option("--instance-type", "-t")] = None,
    num_nodes: Annotated[int | None, typer.Option("--num-nodes", min=1)] = None,
    use_spot: Annotated[bool | None, typer.Option("--use-spot/--no-use-spot")] = None,
    env: Annotated[list[str] | None, typer.Option("--env", help="KEY=VALUE for `envs`.")] = None,
    minimize: Annotated[Objective, typer.Option("--minimize", help="What the tasks together take least of.")] = "cost",
    deadline_hours: Annotated[float | None, typer.Option("--deadline-hours", help="For all tasks together.")] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="How many rows to show.")] = 10,
    explain: Annotated[bool, typer.Option("--explain", help="Show every term of the first two.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The whole ranking as data.")] = False,
) -> None:
    """Rank where a task could run, with costs; starts nothing."""
    from broker.task.loader import load_tasks
    from broker.task.override import override_resources

    context = Context()
    tasks = load_tasks(task, envs=read_pairs(env or [], "--env"))
    plans = [
        context.plan(
            override_resources(
                each, infra=infra, accelerators=gpus, cpus=cpus, memory=memory, instance_type=instance_type,
                num_nodes=num_nodes, use_spot=use_spot,
            )
        )
        for each in tasks
    ]  # fmt: skip
    if len(plans) > 1 or minimize != "cost" or deadline_hours is not None:
        pipeline = context.plan_pipeline(plans, objective=minimize, deadline_hours=deadline_hours)
        if as_json:
            print_json({**describe_pipeline(pipeline), "tasks": [describe_plan(each, top) for each in plans]})
            return
        show_pipeline(pipeline)
        if not explain:
            return
    if as_json:
        print_json([describe_plan(each, top) for each in plans])
        return
    for each in plans:
        show_plan(each, top=top)
        if explain:
            for estimate in each.estimates[:2]:
                show_terms(each.task, estimate)


def read_pairs(texts: list[str], flag: str) -> dict[str, str]:
    """`KEY=VALUE` flags; `KEY` alone takes the value from this shell's environment."""
    import os

    from broker.errors import UsageError

    pairs = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator:
            found = os.getenv(key)
            if found is None:
                raise UsageError(
                    f"`{flag} {key}` has no value, and `{key}` is not set here", hints=[f"{flag} {key}=VALUE"]
                )
            value = found
        pairs[key] = value
    return pairs


def show_plan(plan: Plan, *, top: int = 5) -> None:
    """The ranked table, the date of its prices, the choice and why."""
    task = plan.task
    print_line(f"Task {task.name or '(no name)'}: {task.num_nodes} node{'s' if task.num_nodes > 1 else ''}")
    has_work = plan.choice.expected_usd is not None
    columns = ["#", "CLOUD", "REGION/ZONE", "INSTANCE", "ACC", "vCPU/GiB", "MODEL", "USD/h"]
    columns += ["USD", "TIME"] if has_work else []
    rows = []
    for number, each in enumerate(plan.estimates[:top], start=1):
        offer = each.placement.offer
        is_estimated = offer.is_estimated and not each.placement.is_spot
        row = [
            str(number), offer.cloud, offer.zone or offer.region, offer.instance_type,
            f"{offer.accelerator}:{offer.accelerator_count:g}" if offer.accelerator else "-",
            f"{offer.vcpus:g}/{offer.memory_gib:g}", "spot" if each.placement.is_spot else "od",
            show_usd(each.placement.usd_hour, is_estimated=is_estimated),
        ]  # fmt: skip
        row += (
            [show_usd(each.expected_usd, is_estimated=is_estimated), show_hours(each.expected_hours)]
            if has_work
            else []
        )
        rows.append(row)
    print_table(columns, rows, right=("#", "vCPU/GiB", "USD/h", "USD", "TIME"))
    if len(plan.estimates) > top:
        print_line(f"... and {len(plan.estimates) - top} more")
    choice = plan.choice.placement
    as_of = choice.offer.as_of or plan.prices_as_of
    model = "spot" if choice.is_spot else "on-demand"
    place = f"{choice.offer.cloud} {choice.offer.zone or choice.offer.region}"
    print_line(f"Choice: {choice.node_count} x {choice.offer.instance_type} {model} in {place}")
    print_line(f"Why: {plan.reason}")
    has_estimate = any(each.placement.offer.is_estimated for each in plan.estimates[:top])
    print_line(f"Prices of {as_of}{', ~ is an estimate' if has_estimate else ''}")


def show_terms(task: Task, estimate: Estimate) -> None:
    """Every term of E[T] and E[$]."""
    placement, spec = estimate.placement, task.checkpoint
    print_line(f"\n{placement.offer.cloud} {placement.offer.region} {placement.offer.instance_type}")
    terms = [
        ("price c", f"{show_usd(placement.usd_hour)} USD/h for {placement.node_count} nodes"),
        ("hazard H", f"{estimate.preemptions_per_hour:.5f} preemptions/h of the gang"),
        ("checkpoint stall", show_duration(spec.stall_s)),
        ("restart R", show_duration(spec.restart_s)),
    ]
    if estimate.checkpoint_every_s:
        origin = "as the task says" if spec.every_s else "Young/Daly"
        terms.append(("interval tau", f"{show_duration(estimate.checkpoint_every_s)} ({origin})"))
    if estimate.expected_hours is not None:
        terms.append(("expected time", f"{show_hours(estimate.expected_hours)}"))
        terms.append(("expected preemptions", f"{estimate.expected_preemptions or 0:.2f}"))
        terms.append(("expected cost", f"{show_usd(estimate.expected_usd)} USD"))
    if estimate.deadline_chance is not None:
        terms.append(("chance of the deadline", f"{estimate.deadline_chance:.3f}"))
    for name, text in terms:
        print_line(f"  {name:<24}{text}")


def describe_plan(plan: Plan, top: int) -> dict[str, object]:
    return {
        "task": plan.task.name,
        "num_nodes": plan.task.num_nodes,
        "reason": plan.reason,
        "prices_as_of": plan.prices_as_of,
        "candidates": len(plan.estimates),
        "choice": _describe(plan.choice),
        "estimates": [_describe(each) for each in plan.estimates[:top]],
        "rejections": plain(plan.rejections),
    }


def _describe(estimate: Estimate) -> dict[str, object]:
    data: dict[str, object] = plain(estimate)
    return {**data, "usd_hour": estimate.placement.usd_hour}
