"""YAML -> Task. Every fault of a file is reported at once; what a field cannot do yet is said, never ignored."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from broker.errors import Issue, TaskError
from broker.task.reading import Reader
from broker.task.resources import read_resources
from broker.task.yaml_reader import Marked, read_documents
from broker.types import CheckpointSpec, Goal, Origin, Secret, Task

FIELDS = [
    "name",
    "resources",
    "num_nodes",
    "workdir",
    "file_mounts",
    "envs",
    "secrets",
    "setup",
    "run",
    "goal",
    "checkpoint",
    "service",
    "pool",
    "volumes",
    "config",
    "priority",
    "inputs",
    "outputs",
    "storage",
    "experimental",
]
UNSUPPORTED = {
    "service": "serving is not supported; put the server's command in `run`",
    "pool": "worker pools are not supported; launch one managed job a worker",
    "volumes": "volumes are not supported yet; use `file_mounts` with a local path",
    "config": "per-task `config` is not supported yet; set the value in `resources`",
    "priority": "priorities are not supported yet; remove `priority`",
    "inputs": "data sizes are not supported yet; remove `inputs`",
    "outputs": "data sizes are not supported yet; remove `outputs`",
    "storage": "named storage is not supported yet; use `file_mounts` with a local path",
    "experimental": "experimental overrides are not supported; remove `experimental`",
}
NAME = re.compile(r"[A-Za-z]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
BUCKET_SCHEMES = ("s3://", "gs://", "r2://", "https://", "az://", "cos://", "oci://", "nebius://")


def load_tasks(
    path: Path, *, envs: Mapping[str, str] | None = None, secrets: Mapping[str, str] | None = None
) -> tuple[Task, ...]:
    """The tasks of a file: several documents are a pipeline, run in order. Raises TaskError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise TaskError([Issue(file=str(path), line=0, column=0, message="the file is not UTF-8 text")]) from None
    except OSError as error:
        reason = (error.strerror or "unreadable").lower()
        raise TaskError(
            [Issue(file=str(path), line=0, column=0, message=f"cannot read the task file: {reason}")]
        ) from None
    return load_tasks_text(text, str(path), envs=envs, secrets=secrets)


def load_tasks_text(
    text: str, file: str, *, envs: Mapping[str, str] | None = None, secrets: Mapping[str, str] | None = None
) -> tuple[Task, ...]:
    """As `load_tasks`; `envs` and `secrets` override the file's. A first document of only a name is the pipeline's."""
    documents = read_documents(text, file)
    reader = Reader(text, file)
    pipeline_name = None
    if len(documents) > 1 and isinstance(documents[0].value, dict) and set(documents[0].value) <= {"name"}:
        pipeline_name = reader.text(documents[0].value.get("name"), "name")
        documents = documents[1:]
    if not documents or all(document.value is None for document in documents):
        reader.note(1, 1, "the file holds no task", "the smallest task is `run: echo hello`")
    tasks = tuple(_read_task(reader, document, envs or {}, secrets or {}) for document in documents)
    if reader.issues:
        raise TaskError(sorted(reader.issues, key=lambda issue: (issue.line, issue.column)))
    if pipeline_name and len(tasks) == 1:
        from dataclasses import replace

        tasks = (replace(tasks[0], name=tasks[0].name or pipeline_name),)
    return tasks


def _read_task(reader: Reader, marked: Marked, envs: Mapping[str, str], secrets: Mapping[str, str]) -> Task:
    fields = reader.mapping(marked, "the task", FIELDS)
    for name, instead in UNSUPPORTED.items():
        if name in fields:
            reader.note(*marked.keys[name], f"`{name}` is not supported yet", instead)
    resources, is_ordered = read_resources(reader, fields.get("resources"))
    secret_values = _read_envs(reader, fields.get("secrets"), "secrets", secrets)
    return Task(
        name=_read_name(reader, fields.get("name")),
        resources=resources,
        is_ordered=is_ordered,
        num_nodes=reader.integer(fields.get("num_nodes"), "num_nodes", minimum=1) or 1,
        workdir=_read_workdir(reader, fields.get("workdir")),
        file_mounts=_read_file_mounts(reader, fields.get("file_mounts")),
        envs=_read_envs(reader, fields.get("envs"), "envs", envs),
        secrets={name: Secret(value=value) for name, value in secret_values.items()},
        setup=reader.text(fields.get("setup"), "setup"),
        run=reader.text(fields.get("run"), "run"),
        goal=_read_goal(reader, fields.get("goal")),
        checkpoint=_read_checkpoint(reader, fields.get("checkpoint")),
        origin=Origin(file=reader.file, line=marked.line, column=marked.column),
    )


def _read_name(reader: Reader, marked: Marked | None) -> str | None:
    name = reader.text(marked, "name")
    if name is not None and not NAME.fullmatch(name):
        assert marked is not None
        reader.fault(
            marked,
            f"`name` must be letters, digits, `-`, `_` or `.`, begin with a letter and have at most 63, not `{name}`",
        )
    return name


def _read_workdir(reader: Reader, marked: Marked | None) -> str | None:
    if marked is not None and isinstance(marked.value, dict):
        reader.fault(marked, "a `workdir` from a git repository is not supported yet", "clone it in `setup`")
        return None
    workdir = reader.text(marked, "workdir")
    if marked is not None and workdir is not None and not _resolve(reader, workdir).is_dir():
        reader.fault(marked, f"`workdir` is not a folder: `{workdir}`", "paths count from the current folder")
    return workdir


def _resolve(reader: Reader, path: str) -> Path:
    return Path(path).expanduser()


def _read_file_mounts(reader: Reader, marked: Marked | None) -> dict[str, str]:
    mounts = {}
    for target, source in (reader.mapping(marked, "`file_mounts`") if marked else {}).items():
        if isinstance(source.value, dict):
            reader.fault(
                source, "storage mounts are not supported yet", "give a local path, or fetch the data in `setup`"
            )
        elif (path := reader.text(source, f"file_mounts.{target}")) is None:
            continue
        elif path.startswith(BUCKET_SCHEMES):
            reader.fault(
                source,
                "buckets in `file_mounts` are not supported yet",
                "give a local path, or fetch the data in `setup`",
            )
        elif not _resolve(reader, path).exists():
            reader.fault(
                source,
                f"`file_mounts` names a path that does not exist: `{path}`",
                "paths count from the current folder",
            )
        else:
            mounts[target] = path
    return mounts


def _read_envs(reader: Reader, marked: Marked | None, name: str, given: Mapping[str, str]) -> dict[str, str]:
    """Values by name; one left empty in the file must be given on the command line."""
    values = {}
    flag = "--env" if name == "envs" else "--secret"
    fields = reader.mapping(marked, f"`{name}`") if marked else {}
    for key, each in fields.items():
        assert marked is not None
        if not ENV_NAME.fullmatch(key):
            reader.note(*marked.keys[key], f"`{key}` is no name for an environment variable")
        elif key in given:
            values[key] = given[key]
        elif each.value is None:
            reader.note(*marked.keys[key], f"`{name}.{key}` has no value", f"give it one, or pass `{flag} {key}=...`")
        elif isinstance(each.value, bool):
            values[key] = "true" if each.value else "false"
        else:
            values[key] = reader.text(each, f"{name}.{key}") or ""
    return {**values, **given}


def _read_goal(reader: Reader, marked: Marked | None) -> Goal | None:
    if marked is None or marked.value is None:
        return None
    fields = reader.mapping(marked, "`goal`", ("work", "deadline", "budget", "confidence"))
    work, work_on = fields.get("work"), None
    if work is not None and isinstance(work.value, dict):
        parts = reader.mapping(work, "`work`", ("hours", "on"))
        if "hours" not in parts:
            reader.fault(work, "`work` needs `hours`", "for example `work: {hours: 100, on: A100:8}`")
        work, work_on = parts.get("hours"), reader.text(parts.get("on"), "on")
        if work_on is not None and not re.fullmatch(r"[A-Za-z][\w.-]*(:\d+(\.\d+)?)?", work_on):
            reader.fault(parts["on"], f"`on` must be like `A100:8`, not `{work_on}`")
    work_s = reader.duration_s(work, "work", bare_unit="h")
    deadline_s = reader.duration_s(fields.get("deadline"), "deadline", bare_unit="h")
    return Goal(
        work_hours=None if work_s is None else work_s / 3600,
        work_on=work_on,
        deadline_hours=None if deadline_s is None else deadline_s / 3600,
        budget_usd=reader.number(fields.get("budget"), "budget"),
        confidence=reader.number(fields.get("confidence"), "confidence", at_most=0.9999) or 0.9,
    )


def _read_checkpoint(reader: Reader, marked: Marked | None) -> CheckpointSpec:
    default = CheckpointSpec()
    if marked is None or marked.value is None:
        return default
    fields = reader.mapping(marked, "`checkpoint`", ("every", "stall", "restart", "size"))
    stall_s = _read_zero_or(reader, fields.get("stall"), "stall")
    restart_s = _read_zero_or(reader, fields.get("restart"), "restart")
    return CheckpointSpec(
        every_s=reader.duration_s(fields.get("every"), "every", bare_unit="s"),
        stall_s=default.stall_s if stall_s is None else stall_s,
        restart_s=default.restart_s if restart_s is None else restart_s,
        size_gib=reader.size_gib(fields.get("size"), "size") or default.size_gib,
    )


def _read_zero_or(reader: Reader, marked: Marked | None, name: str) -> float | None:
    if marked is not None and marked.value == 0 and not isinstance(marked.value, bool):
        return 0.0
    return reader.duration_s(marked, name, bare_unit="s")
