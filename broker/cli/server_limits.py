"""`broker server limits`: monthly budgets and concurrent GPUs of users and projects."""

from __future__ import annotations

from typing import Annotated

import typer

from broker.cli import options
from broker.cli.context import make_context
from broker.cli.render import print_json, print_line, print_table
from broker.errors import UsageError
from broker.formatting import format_usd, to_plain
from broker.state.limits import Limit, LimitScope

app = typer.Typer(
    help="Set monthly budgets and GPU limits of users and projects.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
UserOption = Annotated[
    str | None, typer.Option("--user", metavar="NAME", help="User (`*`: every user without limits of their own).")
]
ProjectOption = Annotated[
    str | None,
    typer.Option("--project", metavar="NAME", help="Project (`*`: every project without limits of its own)."),
]


@app.command(name="set")
def set_limit(
    user: UserOption = None,
    project: ProjectOption = None,
    usd_month: Annotated[
        float | None, typer.Option("--usd-per-month", metavar="USD", min=0, help="Budget per calendar month.")
    ] = None,
    gpus: Annotated[
        float | None, typer.Option("--gpus", metavar="COUNT", min=0, help="Maximum number of GPUs in use at a time.")
    ] = None,
) -> None:
    """Set the limits of a user or project, replacing earlier ones.

    Launches that would exceed them are refused. Running work is not stopped.
    """
    scope, name = _read_subject(user, project)
    if usd_month is None and gpus is None:
        raise UsageError("no limit was specified", hints=["pass `--usd-per-month USD`, `--gpus COUNT`, or both"])
    make_context().store.limits.put(Limit(scope=scope, name=name, usd_month=usd_month, gpus=gpus))
    print_line(f"Limited {scope.value} {name}: {_describe(usd_month, gpus)}")


@app.command(name="list")
def list_limits(as_json: options.AsJson = False) -> None:
    """List limits and this month's usage."""
    from broker.app.limits import list_uses

    found = list_uses(make_context().store)
    if as_json:
        print_json([
            {**to_plain(each.limit), "usd_used": each.used.usd, "gpus_used": each.used.gpus} for each in found
        ])  # fmt: skip
        return
    if not found:
        print_line("No limits; set one with `broker server limits set --user NAME --usd-per-month USD`")
        return
    rows = [[each.limit.scope.value, each.limit.name, *each.format()] for each in found]
    heads = ["", "NAME", "USD USED", "USD/MONTH", "GPUS USED", "GPUS"]
    print_table(heads, rows, right=("USD USED", "USD/MONTH", "GPUS USED", "GPUS"))


@app.command(name="unset")
def unset_limit(user: UserOption = None, project: ProjectOption = None) -> None:
    """Remove the limits of a user or project."""
    scope, name = _read_subject(user, project)
    if not make_context().store.limits.delete(scope, name):
        raise UsageError(f"{scope.value} {name} has no limits", hints=["list them with `broker server limits list`"])
    print_line(f"Removed the limits of {scope.value} {name}")


def _read_subject(user: str | None, project: str | None) -> tuple[LimitScope, str]:
    if (user is None) == (project is None):
        raise UsageError("one user or one project is required", hints=["pass `--user NAME` or `--project NAME`"])
    return (LimitScope.USER, user) if user is not None else (LimitScope.PROJECT, project or "")


def _describe(usd_month: float | None, gpus: float | None) -> str:
    parts = [] if usd_month is None else [f"{format_usd(usd_month)} USD per month"]
    return ", ".join(parts if gpus is None else [*parts, f"{gpus:g} GPUs at a time"])
