"""Define the arguments and options that several commands share, and read the task they describe."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from broker.app.planning import anchor
from broker.cli.completion import complete_clusters
from broker.errors import UsageError
from broker.nouns import noun
from broker.types import Task


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
    typer.Option("--secret", metavar="KEY[=VALUE]", help="Secret variable, never shown; as with --env."),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation prompt.")]
Detach = Annotated[bool, typer.Option("--detach-run", "-d", help="Return without following the output.")]
Agreed = Annotated[bool, typer.Option("--yes", "-y", help="Accepted for SkyPilot compatibility; has no effect.")]
Dryrun = Annotated[bool, typer.Option("--dryrun", help="Show the plan without starting anything.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Output = Annotated[Format, typer.Option("--output", "-o", help="Output format; `json` is the same as --json.")]
Hedge = Annotated[
    int,
    typer.Option("--hedge", metavar="N", min=1, help="Locations to try in parallel when one is slow (1 = sequential)."),
]
RequestId = Annotated[
    str | None,
    typer.Option("--request-id", metavar="ID", help="Idempotency key: submissions with the same ID create one job."),
]


@noun
class Overrides:
    """Values from the command line that override the task file; None keeps the file's value."""

    name: str | None = None
    workdir: Path | None = None
    infra: str | None = None
    gpus: str | None = None
    cpus: str | None = None
    memory: str | None = None
    instance_type: str | None = None
    num_nodes: int | None = None
    use_spot: bool | None = None
    max_price: float | None = None  # USD per hour and node
    env: Sequence[str] = ()
    env_file: Path | None = None
    secret: Sequence[str] = ()


NO_OVERRIDES = Overrides()
RESOURCES = ("infra", "gpus", "cpus", "memory", "instance_type", "num_nodes", "use_spot")
ENVIRONMENT = ("env", "env_file", "secret")
TASK_OPTIONS: dict[str, Any] = {
    "name": Name, "workdir": Workdir, "infra": Infra, "gpus": Gpus, "cpus": Cpus, "memory": Memory,
    "instance_type": InstanceType, "num_nodes": NumNodes, "use_spot": UseSpot, "env": Env, "env_file": EnvFile,
    "secret": Secret,
}  # fmt: skip


def task_options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command these options of a task in place of its parameter `overrides`, which receives their values."""

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


def read_tasks(entrypoint: Sequence[str], overrides: Overrides) -> tuple[Task, ...]:
    """Read the tasks of a file, or make one task from a command. Raises TaskError or UsageError."""
    from dataclasses import replace

    from broker.task.allowed import SCRIPT, TASK_NAME
    from broker.task.checking import check_flag
    from broker.task.loader import load_tasks, load_tasks_text
    from broker.task.override import override_resources

    check_flag("--name", overrides.name, TASK_NAME)
    envs = {**_read_env_file(overrides.env_file), **read_pairs(overrides.env, "--env")}
    secrets = read_pairs(overrides.secret, "--secret")
    if is_file(entrypoint):
        tasks = load_tasks(Path(entrypoint[0]), envs=envs, secrets=secrets)
    else:
        check_flag("COMMAND", write_command(entrypoint), SCRIPT)
        tasks = tuple(
            replace(each, run=write_command(entrypoint), envs=envs)
            for each in load_tasks_text("run: ''", "command line", secrets=secrets)
        )
    changed = []
    for task in tasks:
        each = override_resources(
            task, infra=overrides.infra, accelerators=overrides.gpus, cpus=overrides.cpus, memory=overrides.memory,
            instance_type=overrides.instance_type, num_nodes=overrides.num_nodes, use_spot=overrides.use_spot,
        )  # fmt: skip
        if overrides.max_price is not None:
            capped = tuple(replace(shape, usd_hour_max=overrides.max_price) for shape in each.resources)
            each = replace(each, resources=capped)
        each = replace(each, name=overrides.name or each.name)
        if overrides.workdir:
            kept = tuple(notice for notice in each.notices if notice.field != "workdir")
            each = replace(each, workdir=str(_find_folder(overrides.workdir)), notices=kept)
        changed.append(anchor(each))
    return tuple(changed)


def read_task(entrypoint: Sequence[str], overrides: Overrides) -> Task:
    """Read a single task. Raises UsageError for a pipeline."""
    tasks = read_tasks(entrypoint, overrides)
    if len(tasks) > 1:
        raise UsageError(
            f"{entrypoint[0]} is a pipeline of {len(tasks)} tasks; this command runs a single task",
            hints=[f"run the pipeline with `broker jobs launch {entrypoint[0]}`"],
        )
    return tasks[0]


def is_file(entrypoint: Sequence[str]) -> bool:
    """Tell a task file from a command as SkyPilot does: one word that is a file or ends like a YAML file."""
    return len(entrypoint) == 1 and (entrypoint[0].endswith((".yaml", ".yml")) or Path(entrypoint[0]).is_file())


def write_command(words: Sequence[str]) -> str:
    """Join words into a shell command: a single word is a shell line, several are quoted."""
    import shlex

    return words[0] if len(words) == 1 else shlex.join(words)


def read_pairs(texts: Sequence[str], flag: str) -> dict[str, str]:
    """Read `KEY=VALUE` flags; `KEY` alone takes its value from the environment. Errors never show values."""
    from broker.task.allowed import ENV_NAME, ENV_VALUE
    from broker.task.checking import check_flag

    pairs = {}
    for text in texts:
        key, separator, value = text.partition("=")
        check_flag(f"{flag} KEY", key, ENV_NAME)
        if not separator:
            found = os.getenv(key)
            if found is None:
                raise UsageError(
                    f"`{flag} {key}` has no value and `{key}` is not set in this shell",
                    hints=[f"pass `{flag} {key}=VALUE`, or export `{key}`"],
                )
            value = found
        check_flag(f"{flag} {key}", value, ENV_VALUE, is_hidden=True)
        pairs[key] = value
    return pairs


def _read_env_file(path: Path | None) -> dict[str, str]:
    """Read `KEY=VALUE` lines as in a `.env` file: `export`, quotes and comment lines are allowed."""
    if path is None:
        return {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read `--env-file {path}`: {error}") from None
    from broker.task.allowed import ENV_VALUE
    from broker.task.checking import check_flag

    pairs = {}
    for number, line in enumerate(lines, start=1):
        text = line.strip().removeprefix("export ").strip()
        if not text or text.startswith("#"):
            continue
        key, separator, value = text.partition("=")
        if not separator or not key.strip().isidentifier():
            raise UsageError(f"{path}:{number}: expected KEY=VALUE")
        value = value.strip()
        is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
        pairs[key.strip()] = value[1:-1] if is_quoted else value
        check_flag(f"{path}:{number}: {key.strip()[:40]}", pairs[key.strip()], ENV_VALUE, is_hidden=True)
    return pairs


def _find_folder(path: Path) -> Path:
    folder = path.expanduser().resolve()
    if not folder.is_dir():
        raise UsageError(f"`--workdir {path}` is not a folder")
    return folder
