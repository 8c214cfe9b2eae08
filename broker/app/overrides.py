"""Tasks from a command line: a file or a command, and values that override it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from broker.app.planning import anchor
from broker.errors import UsageError
from broker.frozen import frozen
from broker.types import Task


@frozen
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
    max_duration: str | None = None  # of a managed job: `6h`, or `off`
    max_price: float | None = None  # USD per hour and node
    env: Sequence[str] = ()
    env_file: Path | None = None
    secret: Sequence[str] = ()


NO_OVERRIDES = Overrides()


def read_tasks(entrypoint: Sequence[str], overrides: Overrides) -> tuple[Task, ...]:
    """Read the tasks of a file, or make one task from a command. Raises TaskError or UsageError."""
    from dataclasses import replace

    from broker.app.env_file import read_env_file
    from broker.task.allowed import SCRIPT, TASK_NAME
    from broker.task.checking import check_flag
    from broker.task.loader import load_tasks, load_tasks_text
    from broker.task.override import override_resources

    check_flag("--name", overrides.name, TASK_NAME)
    file_envs = {} if overrides.env_file is None else read_env_file(overrides.env_file)
    envs = {**file_envs, **read_pairs(overrides.env, "--env")}
    secrets = read_pairs(overrides.secret, "--secret")
    if is_file(entrypoint):
        tasks = load_tasks(Path(entrypoint[0]), envs=envs, secrets=secrets)
    else:
        if entrypoint and not any(word.strip() for word in entrypoint):
            raise UsageError(
                "the task file or command is empty",
                hints=[
                    "is a variable of the shell unset?",
                    "to start a cluster without a program, pass a task file without `run:` to `broker launch`",
                ],
            )
        check_flag("COMMAND", write_command(entrypoint), SCRIPT)
        tasks = tuple(
            replace(each, run=write_command(entrypoint), envs=envs)
            for each in load_tasks_text("run: ''", "command line", secrets=secrets)
        )
    max_duration_s = _read_max_duration(overrides.max_duration)
    changed = []
    for task in tasks:
        each = override_resources(
            task, infra=overrides.infra, accelerators=overrides.gpus, cpus=overrides.cpus, memory=overrides.memory,
            instance_type=overrides.instance_type, num_nodes=overrides.num_nodes, use_spot=overrides.use_spot,
        )  # fmt: skip
        if overrides.max_price is not None:
            capped = tuple(replace(shape, usd_hour_max=overrides.max_price) for shape in each.resources)
            each = replace(each, resources=capped)
        if overrides.max_duration is not None:
            each = replace(each, max_duration_s=max_duration_s)
        each = replace(each, name=overrides.name or each.name)
        if overrides.workdir:
            kept = tuple(notice for notice in each.notices if notice.field != "workdir")
            each = replace(each, workdir=str(_find_folder(overrides.workdir)), repository=None, notices=kept)
        changed.append(anchor(each))
    return tuple(changed)


def read_task(entrypoint: Sequence[str], overrides: Overrides) -> Task:
    """Read a single task. Raises UsageError for a pipeline."""
    tasks = read_tasks(entrypoint, overrides)
    if len(tasks) > 1:
        kind = "pipeline" if tasks[0].group is None else "job group"
        raise UsageError(
            f"{entrypoint[0]} is a {kind} of {len(tasks)} tasks; this command runs a single task",
            hints=[f"run the {kind} with `broker jobs launch {entrypoint[0]}`"],
        )
    return tasks[0]


def is_file(entrypoint: Sequence[str]) -> bool:
    """Return whether this is a task file, by SkyPilot's rule: one word that is a file or ends in `.yaml` or `.yml`.

    A pipe is one, too: `/dev/stdin`, or `<(envsubst < task.yaml)`. Raises UsageError for `-`.
    """
    if list(entrypoint) == ["-"]:
        raise UsageError("`-` is not a task file", hints=["read a task from standard input with `/dev/stdin`"])
    if len(entrypoint) != 1 or entrypoint[0].endswith((".yaml", ".yml")):
        return len(entrypoint) == 1
    try:
        return Path(entrypoint[0]).is_file() or Path(entrypoint[0]).is_fifo()
    except OSError:  # a command that is too long for the name of a file
        return False


def write_command(words: Sequence[str]) -> str:
    """Join words into a shell command: a single word is used as a shell line, several words are quoted."""
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


def _read_max_duration(text: str | None) -> float | None:
    from broker.task.measures import MAX_DURATION_S_MIN, Duration

    if text is None or text == "off":
        return None
    found_s: float | None = Duration(bare_unit="s").read_value(float(text) if text.isdigit() else text)
    if found_s is None or found_s < MAX_DURATION_S_MIN:
        raise UsageError(
            f"`--max-duration {text}` is not a duration of at least 1m",
            hints=["pass e.g. `--max-duration 6h`, or `off`"],
        )
    return found_s


def _find_folder(path: Path) -> Path:
    folder = path.expanduser().resolve()
    if not folder.is_dir():
        raise UsageError(f"`--workdir {path}` is not a folder")
    return folder
