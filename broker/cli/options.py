"""Define the arguments and options that several commands share."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from broker.app.overrides import NO_OVERRIDES, Overrides, is_file, read_pairs, read_task, read_tasks
from broker.cli import interrupts
from broker.cli.completion import complete_clusters
from broker.errors import UsageError

__all__ = ["NO_OVERRIDES", "Overrides", "is_file", "read_pairs", "read_task", "read_tasks"]


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"


OVERRIDES = "overrides the task file"
Entrypoint = Annotated[
    list[str],
    typer.Argument(metavar="TASK.yaml | COMMAND...", help="Task file, or a command to run.", show_default=False),
]
ClusterOption = Annotated[
    str | None, typer.Option("--cluster", "-c", metavar="NAME", help="Cluster name.", autocompletion=complete_clusters)
]
Infra = Annotated[str | None, typer.Option("--infra", metavar="CLOUD[/REGION[/ZONE]]", help=f"Location ({OVERRIDES}).")]
Gpus = Annotated[
    str | None, typer.Option("--gpus", metavar="NAME[:COUNT]", help=f"Accelerators per node ({OVERRIDES}).")
]
Cpus = Annotated[
    str | None, typer.Option("--cpus", metavar="N[+]", help=f"vCPUs per node, e.g. 4 or 4+ ({OVERRIDES}).")
]
Memory = Annotated[
    str | None, typer.Option("--memory", metavar="GIB[+]", help=f"GiB of memory per node, e.g. 32+ ({OVERRIDES}).")
]
InstanceType = Annotated[
    str | None, typer.Option("--instance-type", "-t", metavar="TYPE", help=f"Instance type ({OVERRIDES}).")
]
NumNodes = Annotated[
    int | None, typer.Option("--num-nodes", metavar="N", min=1, help=f"Number of nodes ({OVERRIDES}).")
]
UseSpot = Annotated[
    bool | None, typer.Option("--use-spot/--no-use-spot", help=f"Use spot or on-demand instances ({OVERRIDES}).")
]
MaxDuration = Annotated[
    str | None, typer.Option("--max-duration", metavar="TIME", help=f"End the job after e.g. 6h, or off ({OVERRIDES}).")
]
Workdir = Annotated[
    Path | None, typer.Option("--workdir", metavar="FOLDER", help=f"Folder to upload to the nodes ({OVERRIDES}).")
]
Name = Annotated[str | None, typer.Option("--name", "-n", metavar="NAME", help=f"Task name ({OVERRIDES}).")]
Env = Annotated[
    list[str] | None,
    typer.Option(
        "--env", metavar="KEY[=VALUE]",
        help="Environment variable; KEY alone takes its value from this shell. Repeatable.",
    ),
]  # fmt: skip
EnvFile = Annotated[
    Path | None, typer.Option("--env-file", metavar="FILE", help="File of KEY=VALUE lines with environment variables.")
]
Secret = Annotated[
    list[str] | None,
    typer.Option("--secret", metavar="KEY[=VALUE]", help="Secret variable, never shown; same syntax as --env."),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation prompt.")]
Detach = Annotated[bool, typer.Option("--detach-run", "-d", help="Return without following the output.")]
Agreed = Annotated[bool, typer.Option("--yes", "-y", help="Accepted for SkyPilot compatibility; has no effect.")]
Dryrun = Annotated[bool, typer.Option("--dryrun", help="Show the plan without starting anything.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
AllUsers = Annotated[
    bool, typer.Option("--all-users", "-u", help="Include clusters and jobs of all users, and show their owners.")
]
Output = Annotated[Format, typer.Option("--output", "-o", help="Output format; `json` is the same as --json.")]
Hedge = Annotated[
    int,
    typer.Option("--hedge", metavar="N", min=1, help="Locations to try in parallel when one is slow (1 = sequential)."),
]
RequestId = Annotated[
    str | None,
    typer.Option("--request-id", metavar="ID", help="Idempotency key: submissions with the same ID create one job."),
]


RESOURCES = ("infra", "gpus", "cpus", "memory", "instance_type", "num_nodes", "use_spot")
ENVIRONMENT = ("env", "env_file", "secret")
TASK_OPTIONS: dict[str, Any] = {
    "name": Name, "workdir": Workdir, "infra": Infra, "gpus": Gpus, "cpus": Cpus, "memory": Memory,
    "instance_type": InstanceType, "num_nodes": NumNodes, "use_spot": UseSpot, "env": Env, "env_file": EnvFile,
    "secret": Secret, "max_duration": MaxDuration,
}  # fmt: skip


def task_options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's parameter `overrides` by these task options; `overrides` receives their values."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        parameters = list[inspect.Parameter]()
        for each in inspect.signature(command).parameters.values():
            if each.name == "overrides":
                kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
                parameters += [
                    inspect.Parameter(name, kind, default=None, annotation=TASK_OPTIONS[name]) for name in names
                ]
            else:
                parameters.append(each.replace(annotation=hints[each.name]))

        @functools.wraps(command)
        def run(**given: Any) -> None:
            values = {name: given.pop(name) for name in names}
            command(**given, overrides=Overrides(**{name: each for name, each in values.items() if each is not None}))

        changed: Any = run  # Typer reads both
        changed.__signature__ = inspect.Signature(parameters)
        changed.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


def confirm(question: str, *, yes: bool) -> None:
    """Ask for confirmation on a terminal and abort unless the user agrees. With `--yes` or in a pipe, do not ask."""
    if not yes and sys.stdin.isatty():
        ask(question)


def ask(question: str) -> None:
    """Ask for confirmation, and end the command with code 1 unless the user agrees, with 130 after Ctrl-C.

    Raises UsageError if the input of a script ends without an answer.
    """
    try:
        typer.confirm(question, abort=True, err=True)
    except typer.Abort as refusal:
        if isinstance(refusal.__context__, KeyboardInterrupt):
            sys.stderr.write(interrupts.NOTE)
            raise typer.Exit(interrupts.CODE) from None
        if isinstance(refusal.__context__, EOFError):
            sys.stderr.write("\n")
            if not sys.stdin.isatty():
                raise UsageError("standard input has no answer", hints=["confirm with `--yes`"]) from None
        raise
