"""YAML -> Task. All errors of a file are reported in one run; unsupported fields are reported, never ignored."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from broker.errors import Issue, TaskError
from broker.task.allowed import is_credential_name
from broker.task.caching import check_cached_setup
from broker.task.checking import check_environment, check_images, check_labels
from broker.task.environment import SET_BY_AGENT, is_changed, list_texts, refers_to_variable, render_value
from broker.task.expansion import expand_variables
from broker.task.fields import SECRET_SCOPES, TASK
from broker.task.fields_schedule import read_schedule
from broker.task.foreign import recognise
from broker.task.measures import MAX_DURATION_S_MIN, UNATTENDED_S_MIN
from broker.task.mounts import read_file_mounts, read_workdir
from broker.task.pipeline import Document, join_tasks, split_header
from broker.task.pod_config import read_pod_config
from broker.task.reading import Reader, describe
from broker.task.resources import note_differences, read_autostop, read_priority, read_recovery, read_resources
from broker.task.service import read_service
from broker.task.tables import Section
from broker.task.yaml_errors import suggest_colon
from broker.task.yaml_reader import BYTES_MAX, Marked, read_documents
from broker.types import (
    CheckpointSpec,
    DataSet,
    Goal,
    NotificationKind,
    NotifySpec,
    Origin,
    Repository,
    Secret,
    Task,
)

_CONVERT = "convert a Slurm script with `broker jobs import SCRIPT.sbatch`"
_PROGRAMS = {".py": "python", ".sh": "bash"}
_SMALLEST = "for example, a minimal task: `run: echo hello`"


def load_tasks(
    path: Path, *, envs: Mapping[str, str] | None = None, secrets: Mapping[str, str] | None = None
) -> tuple[Task, ...]:
    """Load the tasks of a file: several documents are a pipeline or a DAG. Raises TaskError."""

    def fail(message: str, *, line: int = 0, column: int = 0, hint: str | None = None) -> TaskError:
        return TaskError([Issue(file=str(path), line=line, column=column, message=message, hint=hint)])

    try:
        with path.open("rb") as file:
            data = file.read(BYTES_MAX + 1)
    except OSError as error:
        hint = _suggest_file(path) if isinstance(error, FileNotFoundError) else None
        raise fail(f"cannot read the task file: {(error.strerror or 'unreadable').lower()}", hint=hint) from None
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise fail("the file is UTF-16, not UTF-8 text", hint="save it as UTF-8")
    if len(data) > BYTES_MAX:
        data = data[: BYTES_MAX + 1].decode("utf-8", "replace").encode()  # too large, regardless of its content
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        before = data[data.rfind(b"\n", 0, error.start) + 1 : error.start].decode("utf-8", "replace")
        column = len(before.removeprefix("\ufeff")) + 1
        raise fail("the file is not UTF-8 text", line=line, column=column, hint="save it as UTF-8") from None
    return load_tasks_text(text, str(path), envs=envs, secrets=secrets)


def _suggest_file(path: Path) -> str | None:
    """Return a task file in the same folder with a similar name, as a hint."""
    import difflib  # only after a fault, as in `suggest`

    try:
        names = {each.stem: each.name for each in sorted(path.parent.glob("*.y*ml"))}
    except OSError:
        return None
    near = difflib.get_close_matches(path.stem, names, n=1)
    return f"did you mean `{names[near[0]]}`?" if near else None


def load_tasks_text(
    text: str, file: str, *, envs: Mapping[str, str] | None = None, secrets: Mapping[str, str] | None = None
) -> tuple[Task, ...]:
    """Like `load_tasks`; `envs` and `secrets` override the file's. A first document may be the pipeline's header."""
    text = text.removeprefix("\ufeff")
    try:
        documents = read_documents(text, file)
    except TaskError as error:
        is_batch = text.startswith("#!") and "\n#SBATCH" in text
        hint = _CONVERT if is_batch else _suggest_command(file)
        raise TaskError([replace(each, hint=hint or each.hint) for each in error.issues]) from None
    reader = Reader(text, file)
    header, sections = split_header(reader, documents)
    if not sections:
        reader.note(1, 1, "the file contains no task", _SMALLEST)
    read = [each for marked in sections if (each := _read_document(reader, marked, envs or {}, secrets or {}))]
    if len(read) > 1:
        for section in (section for section, task in read if task.schedule is not None):
            hint = "move the task to a separate file"
            reader.fault(section.marks["schedule"], "a task with `schedule` must be the only one in its file", hint)
    tasks = join_tasks(reader, header, read) if read and len(read) == len(sections) else ()
    if reader.issues:
        raise TaskError(sorted(reader.issues, key=lambda issue: (issue.line, issue.column)))
    if header and len(tasks) == 1:
        return (replace(tasks[0], name=tasks[0].name or header.get("name")),)
    return tuple(replace(task, pipeline=header.get("name")) for task in tasks) if header else tasks


def _read_document(
    reader: Reader, marked: Marked, envs: Mapping[str, str], secrets: Mapping[str, str]
) -> Document | None:
    if not isinstance(marked.value, dict):
        is_text = isinstance(marked.value, str)
        colon = suggest_colon(marked.value) if is_text and ":" in marked.value else None
        hint = _CONVERT if reader.contains("#SBATCH") else _suggest_command(reader.file) or colon or _SMALLEST
        reader.fault(marked, f"a task must be a mapping, not {describe(marked)}", hint)
        return None
    if foreign := recognise(marked.value):
        kind, hint = foreign
        reader.fault(marked, f"this is {kind}, not a task", hint)
        return None
    secret_texts = _peek(marked, "secrets")
    written = {**_peek(marked, "envs"), **secret_texts}
    reader.hide(value for name, value in written.items() if name in secret_texts or is_credential_name(name))
    reader.hide(list_texts(marked.value["secrets"]) if secret_texts else ())
    variables = {**written, **envs, **secrets}
    section = TASK.read(reader, expand_variables(reader, marked, variables, {*_peek_secrets(marked), *secrets}), "")
    return (section, _read_task(reader, section, envs, secrets)) if section else None


def _suggest_command(file: str) -> str | None:
    """Return a hint for a program that was passed as a task file."""
    program = _PROGRAMS.get(Path(file).suffix)
    return f"to run a program, pass its command: `broker launch {program} {file}`" if program else None


def _peek(marked: Marked, name: str) -> dict[str, str]:
    """Read values of `envs` or `secrets` before they are checked, because paths may refer to them."""
    fields = marked.value[name].value if name in marked.value else None
    pairs = fields.items() if isinstance(fields, dict) else ()
    return {key: render_value(each) for key, each in pairs if each.value is not None}


def _peek_secrets(marked: Marked) -> list[str]:
    """Read the names of secrets, also of those without a value, before they are checked."""
    fields = marked.value["secrets"].value if "secrets" in marked.value else None
    names = [each.value for each in fields] if isinstance(fields, list) else list(fields or ())
    return [_strip_scope(name) for name in names if isinstance(name, str)]


def _read_task(reader: Reader, section: Section, envs: Mapping[str, str], secrets: Mapping[str, str]) -> Task:
    resources, is_ordered = read_resources(reader, section.get("resources"))
    note_differences(reader, section.get("resources"))
    check_labels(reader, section.get("resources"), resources)
    check_images(reader, section.get("resources"), resources)
    workdir = read_workdir(reader, section)
    file_mounts, storage_mounts = read_file_mounts(reader, section, resources)
    secret_values = _read_values(reader, section, "secrets", secrets)
    check_environment(reader, section, "secrets", secret_values)
    env_values = _read_values(reader, section, "envs", envs)
    check_environment(reader, section, "envs", env_values)
    recovery = read_recovery(section.get("resources"))
    if recovery.caches_setup:
        check_cached_setup(reader, section)
    _note_shell_files(reader, section)
    _note_conda(reader, section)
    return Task(
        name=section.get("name"),
        resources=resources,
        is_ordered=is_ordered,
        num_nodes=section.get("num_nodes", 1),
        workdir=workdir if isinstance(workdir, str) else None,
        repository=workdir if isinstance(workdir, Repository) else None,
        file_mounts=file_mounts,
        storage_mounts=storage_mounts,
        envs=env_values,
        secrets={name: Secret(value=value) for name, value in secret_values.items()},
        setup=section.get("setup"),
        run=section.get("run"),
        goal=_read_goal(reader, section.get("goal")),
        recovery=recovery,
        autostop=read_autostop(section.get("resources")),
        checkpoint=_read_checkpoint(section.get("checkpoint")),
        unattended_s=_read_unattended(reader, section),
        max_duration_s=_read_max_duration(reader, section),
        inputs=_read_data(section, "inputs"),
        outputs=_read_data(section, "outputs"),
        service=read_service(reader, section),
        priority=read_priority(section.get("resources")),
        notify=_read_notify(section.get("notify")),
        event_callback=section.get("event_callback"),
        schedule=read_schedule(reader, section),
        pod_config=read_pod_config(reader, section),
        notices=reader.take_notices(),
        origin=Origin(file=reader.file, line=section.marked.line, column=section.marked.column),
    )


def _read_values(reader: Reader, section: Section, name: str, given: Mapping[str, str]) -> dict[str, str]:
    """Return values by name. Empty values must be given on the command line before the task is launched."""
    value = section.get(name, {})
    fields: Mapping[str, str | None] = dict.fromkeys(value) if isinstance(value, list) else value
    flag = "--env" if name == "envs" else "--secret"
    values: dict[str, str] = {}
    for key, text in fields.items():
        bare = _strip_scope(key) if name == "secrets" else key
        if bare in SET_BY_AGENT:
            place = section.marks[name].keys.get(key, (section.marks[name].line, section.marks[name].column))
            message = f"`{name}.{bare}` has no effect: every node sets this variable itself"
            reader.warn(place, name, message, "remove it", blocks_launch=False)
        if bare in given:
            continue
        marked = section.marks[name]
        if text is not None:
            values[bare] = text
            if marked.keys and is_changed(marked.value[key], text):
                shown = f" is `{text}`, not `{marked.value[key].text}`" if name == "envs" else " is not as written"
                message = f"`{name}.{bare}`{shown}: SkyPilot reads it as a number or a word of YAML 1.1"
                reader.warn(marked.keys[key], name, message, "put it in quotes to keep it", blocks_launch=False)
            if marked.keys and refers_to_variable(text, bare):
                message = f"`{name}.{bare}` is passed as written: variables in it are not replaced, as in SkyPilot"
                hint = f"leave the value empty and pass `{flag} {bare}`, or set it in `run`"
                if name == "envs" and is_credential_name(bare):
                    hint = f"move it to `secrets`, without a value, and pass `--secret {bare}`"
                reader.warn(marked.keys[key], name, message, hint, blocks_launch=False)
            elif name == "envs" and text and is_credential_name(bare):
                message = f"`envs.{bare}` looks like a credential, but `envs` are stored and shown in clear text"
                hint = f"move it to `secrets`, and pass `--secret {bare}`"
                reader.warn(marked.keys[key], name, message, hint, blocks_launch=False)
            continue
        item = next((each for each in marked.value if each.value == key), marked) if not marked.keys else marked
        place = marked.keys.get(key, (item.line, item.column))
        reader.warn(place, name, f"`{name}.{bare}` has no value", f"pass `{flag} {bare}=...`", blocks_launch=True)
    return {**values, **given}


def _strip_scope(key: str) -> str:
    """Return the name of `secrets:HF_TOKEN` or `secrets:workspace.HF_TOKEN`."""
    bare = key.removeprefix("secrets:")
    return next((bare.removeprefix(scope) for scope in SECRET_SCOPES if bare.startswith(scope)), bare)


def _note_shell_files(reader: Reader, section: Section) -> None:
    """Note a `setup` that changes files which SkyPilot's shells read before `run`, and broker's do not."""
    found = re.search(r"\.bashrc|\.bash_profile|\.profile\b|\bconda init\b", section.get("setup") or "")
    if found and found[0] not in (section.get("run") or ""):
        message = f"`setup` changes shell settings (`{found[0]}`), but `run` starts without them"
        hint = "set the variables under `envs`, or write them to a file that `run` reads: `. ~/env.sh`"
        reader.warn(section.find_key("setup"), "setup", message, hint, blocks_launch=False)


# `conda activate x` and the like; not in a script that brings its own conda.
_CONDA = re.compile(
    r"(?:^|[;&|])[ \t]*(?P<command>(?:conda|mamba)[ \t]+(?:activate|create|install|env|run))\b", re.MULTILINE
)
_OWN_CONDA = re.compile(
    r"(?:mini|micro|ana)conda|miniforge|mamba(?:forge|\.sh)|micromamba|conda\.sh|\bhook\b", re.IGNORECASE
)


def _note_conda(reader: Reader, section: Section) -> None:
    """Note a program that relies on SkyPilot's conda, which it installs on each node and activates in each shell."""
    texts = {name: section.get(name) or "" for name in ("setup", "run")}
    if any(_OWN_CONDA.search(text) for text in texts.values()):
        return
    for name, text in texts.items():
        if found := _CONDA.search(text):
            message = f"`{name}` uses `{found['command']}`, but nodes may have no conda, and shells do not activate it"
            hint = (
                "use `python3 -m venv` or `uv venv`, or install Miniconda in `setup`, and run "
                "`. ~/miniconda3/etc/profile.d/conda.sh` first"
            )
            reader.warn(section.find_key(name), name, message, hint, blocks_launch=False)
            return


def _read_data(section: Section, name: str) -> tuple[DataSet, ...]:
    return tuple(DataSet(url=url, size_gib=size) for url, size in section.get(name, {}).items())


_WITHOUT_WORK = {
    "deadline": "plans and recovery do not take it into account",
    "budget": "plans do not take it into account; a managed job ends when it is used up",
    "hour_value": "plans and moves do not take it into account",
}
_ADD_WORK = "add `work: 100h`, the time that the task takes without failures"


def _read_goal(reader: Reader, section: Section | None) -> Goal | None:
    if section is None:
        return None
    work, work_on = section.get("work"), None
    if isinstance(work, Section):
        work, work_on = work.get("hours"), work.get("on")
    if "throughput" in section.marks and work_on is None:
        hint = "write `work: {hours: 100h, on: A100:8}`"
        reader.fault(
            section.marks["throughput"], "`throughput` requires the accelerators on which `work` was measured", hint
        )
    deadline_s = section.get("deadline")
    for field, effect in _WITHOUT_WORK.items():
        if work is None and field in section.marks:
            message = f"`{field}` without `work`: {effect}"
            reader.warn(section.find_key(field), field, message, _ADD_WORK, blocks_launch=False)
    return Goal(
        work_hours=None if work is None else work / 3600,
        work_on=work_on,
        throughput=section.get("throughput", {}),
        deadline_hours=None if deadline_s is None else deadline_s / 3600,
        budget_usd=section.get("budget"),
        confidence=section.get("confidence", Goal.confidence),
        hour_value_usd=section.get("hour_value"),
    )


def _read_unattended(reader: Reader, section: Section) -> float | None:
    value: float | None = section.get("unattended")
    if value is not None and value < UNATTENDED_S_MIN:
        hint = "a shorter time would terminate nodes during network problems; the default is `unattended: 12h`"
        reader.fault(section.marks["unattended"], "`unattended` must be at least 15m", hint)
    return value


def _read_max_duration(reader: Reader, section: Section) -> float | None:
    value: float | str | None = section.get("max_duration")
    if value is None or isinstance(value, str):
        return None
    if value < MAX_DURATION_S_MIN:
        hint = "the program needs time to start and to save; without a limit, write `max_duration: off`"
        reader.fault(section.marks["max_duration"], "`max_duration` must be at least 1m", hint)
    return value


def _read_notify(section: Section | None) -> NotifySpec | None:
    if section is None:
        return None
    on, mail = section.get("on"), section.get("mail")
    words = None if on is None else [on] if isinstance(on, str) else on
    return NotifySpec(
        on=None if words is None else tuple(NotificationKind(each) for each in words),
        webhook=section.get("webhook"),
        slack=section.get("slack"),
        mail=() if mail is None else (mail,) if isinstance(mail, str) else tuple(mail),
    )


def _read_checkpoint(section: Section | None) -> CheckpointSpec:
    if section is None:
        return CheckpointSpec()
    return CheckpointSpec(
        every_s=section.get("every"),
        stall_s=section.get("stall", CheckpointSpec.stall_s),
        restart_s=section.get("restart", CheckpointSpec.restart_s),
        size_gib=section.get("size", CheckpointSpec.size_gib),
        to=section.get("to"),
        is_for_same_ranks=section.get("same_ranks", False),
    )
