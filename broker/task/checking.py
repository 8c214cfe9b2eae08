"""Check whole tasks against the table of allowed texts: from a file, with positions, and from a `Task` in Python."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence

from broker.errors import Issue, TaskError, UsageError
from broker.task.allowed import (
    ARGUMENT_BYTES_MAX,
    BUCKET,
    BUCKETS,
    ENV_NAME,
    ENV_VALUE,
    ENVIRONMENT_BYTES_MAX,
    GIT_REF,
    GIT_URL,
    IMAGE,
    IMAGES,
    INSTANCE_TYPE,
    LABEL_KEY,
    LABEL_VALUE,
    LABELS,
    PLACE,
    SCRIPT,
    SKYPILOT,
    SOURCE,
    TARGET,
    TASK_NAME,
    Rule,
    suggest_image,
)
from broker.task.measures import NUM_NODES_MAX
from broker.task.reading import Reader, describe
from broker.task.tables import Section
from broker.types import Resources, Task
from broker.types.task import CONTAINER


def check_labels(reader: Reader, section: Section | None, resources: Sequence[Resources]) -> None:
    """Report a label that a cloud refuses: as an error if the task cannot run on another cloud, else as a notice."""
    for part in _list_parts(section):
        labels = part.get("labels", {})
        for key, value in labels.items():
            clouds = {each.cloud for each in resources if each.labels.get(key) == value}
            for cloud, message, hint in find_refusals(key, value, clouds):
                place = part.marks["labels"].keys[key]
                if clouds == {cloud}:
                    reader.note(*place, message, hint)
                else:
                    message = f"{message}; the task cannot start there"
                    reader.warn(place, "labels", message, hint, blocks_launch=False, cloud=cloud)


def check_images(reader: Reader, section: Section | None, resources: Sequence[Resources]) -> None:
    """Report a container without a name, and machine images that a cloud of the task cannot start."""
    for part in _list_parts(section):
        value = part.get("image_id", ())
        for image in dict.fromkeys([value] if isinstance(value, str) else dict(value).values()):
            if image == CONTAINER:
                reader.fault(part.marks["image_id"], "`image_id` names no container", "write `image_id: docker:IMAGE`")
            if image.startswith(f"{CONTAINER}//"):  # as Apptainer and containerd write it
                name = image.removeprefix(CONTAINER).lstrip("/")
                message = "`image_id` of a container has no `//`"
                reader.fault(part.marks["image_id"], message, f"write `image_id: {CONTAINER}{name}`")
            if image.startswith((CONTAINER, SKYPILOT)):
                continue
            clouds = {each.cloud for each in resources if each.image_id == image}
            for cloud, rule in IMAGES.items():
                if not rule.admits(image) and clouds & {cloud, None}:
                    message = f"`image_id` on {cloud} must be {rule.expected}, not {describe(image)}"
                    place, hint = part.find_key("image_id"), suggest_image(image, cloud)
                    reader.warn(place, "image_id", message, hint, blocks_launch=True, cloud=cloud)


def _list_parts(section: Section | None) -> Iterator[Section]:
    """Return the section and its alternatives."""
    if section is not None:
        yield section
        for name in ("any_of", "ordered"):
            yield from section.get(name, ())


def find_refusals(key: str, value: str, clouds: set[str | None]) -> Iterator[tuple[str, str, str | None]]:
    """Yield the clouds among these (None: any) that refuse a label, as (cloud, reason, hint)."""
    for cloud, (key_rule, value_rule) in LABELS.items():
        if cloud not in clouds and None not in clouds:
            continue
        if not key_rule.admits(key):
            yield cloud, f"a label on {cloud} must be {key_rule.expected}, not {describe(key)}", None
        elif not value_rule.admits(value):
            shown = f"the value of the label {describe(key)} on {cloud}"
            yield cloud, f"{shown} must be {value_rule.expected}, not {describe(value)}", None


def check_bucket(name: str, store: str | None) -> tuple[Rule, str | None] | None:
    """Return the rule that a bucket's name violates, with a hint; None if it is valid.

    A name with a variable whose value is still missing is accepted.
    """
    rule = BUCKETS.get(store or "", BUCKET)
    return None if not name or "$" in name or rule.admits(name) else (rule, rule.suggest(name))


def check_environment(reader: Reader, section: Section, name: str, values: Mapping[str, str]) -> None:
    """Check the kernel's limits for each variable and for all of them together; values are not shown."""
    marked = section.marks.get(name)
    for key, value in values.items():
        if (size := _measure(key, value)) > ARGUMENT_BYTES_MAX:
            place = marked.keys.get(key, (0, 0)) if marked else (0, 0)
            message = f"`{name}.{key}` is {size:,} bytes long; the limit is {ARGUMENT_BYTES_MAX:,}"
            reader.note(*place, message, "pass it in a file with `file_mounts`", shows_line=False)
    total = sum(_measure(key, value) for key, value in values.items())
    if total > ENVIRONMENT_BYTES_MAX:
        place = (marked.line, marked.column) if marked else (0, 0)
        message = f"`{name}` are {total:,} bytes in total; the limit is {ENVIRONMENT_BYTES_MAX:,}"
        reader.note(*place, message, "pass large values in files with `file_mounts`", shows_line=False)


def _measure(name: str, value: str) -> int:
    """Return the bytes of `NAME=VALUE` with its NUL."""
    return len(name) + 1 + len(value.encode("utf-8", "surrogatepass")) + 1


def check_flag(flag: str, text: str | None, rule: Rule, *, is_hidden: bool = False) -> None:
    """Check a flag's value. Raises UsageError, which does not show a hidden value."""
    if text is None or rule.admits(text):
        return
    shown = "" if is_hidden else f", not {describe(text)}"
    hint = rule.suggest(text)
    raise UsageError(f"`{flag}` must be {rule.expected}{shown}", hints=[hint] if hint else [])


def check_task(task: Task, file: str = "task") -> Task:
    """Return the task unchanged if everything in it is allowed.

    Raises TaskError with every error, without line numbers.
    """
    issues = [
        Issue(file=file, line=0, column=0, message=message, hint=hint)
        for message, hint in [
            *_check_texts(task),
            *_check_places(task),
            *_check_values(task),
            *_check_numbers(task),
            *_check_schedule(task),
            *_check_pod_config(task),
        ]
    ]
    if issues:
        raise TaskError(issues)
    return task


_Fault = tuple[str, str | None]


def _try(name: str, text: str | None, rule: Rule, *, is_hidden: bool = False) -> Iterator[_Fault]:
    if text is not None and not rule.admits(text):
        shown = "" if is_hidden else f", not {describe(text)}"
        yield f"`{name}` must be {rule.expected}{shown}", rule.suggest(text)


def _check_texts(task: Task) -> Iterator[_Fault]:
    yield from _try("name", task.name, TASK_NAME)
    yield from _try("setup", task.setup, SCRIPT)
    yield from _try("run", task.run, SCRIPT)
    yield from _try("workdir", task.workdir, SOURCE)
    if task.repository is not None:
        yield from _try("workdir.url", task.repository.url, GIT_URL, is_hidden=True)
        yield from _try("workdir.ref", task.repository.ref, GIT_REF)
    for target, source in task.file_mounts.items():
        yield from _try("file_mounts", target, TARGET)
        yield from _try("file_mounts", source, SOURCE)
    for mount in task.storage_mounts:
        yield from _try("file_mounts", mount.target, TARGET)
        for source in mount.source:
            yield from _try("file_mounts", source, SOURCE)
        if found := check_bucket(mount.name or "", mount.store):
            yield f"`name` must be {found[0].expected}, not {describe(mount.name)}", found[1]


def _check_numbers(task: Task) -> Iterator[_Fault]:
    """Check, for tasks made in Python, the constraints that types ensure in a file."""
    if not isinstance(task.num_nodes, int) or not 1 <= task.num_nodes <= NUM_NODES_MAX:
        yield f"`num_nodes` must be a whole number from 1 to {NUM_NODES_MAX:,}, not {task.num_nodes}", None
    if not task.resources:
        yield "`resources` must have at least one alternative", "write `resources=(Resources(),)`"
    positive: dict[str, float | None] = {}
    for each in task.resources:
        if not 0 <= each.accelerator_count < math.inf or (each.accelerator and not each.accelerator_count):
            yield f"`accelerators` must have a positive count, not {each.accelerator_count:g}", None
        positive |= {"disk_size": each.disk_size_gib, "max_hourly_cost": each.usd_hour_max}
    if (goal := task.goal) is not None:
        hours = {"work": goal.work_hours, "deadline": goal.deadline_hours, "budget": goal.budget_usd}
        positive |= {f"goal.{name}": value for name, value in hours.items()}
    positive["max_duration"] = task.max_duration_s
    for name, value in positive.items():
        if value is not None and not 0 < value < math.inf:
            yield f"`{name}` must be a positive number, not {value:g}", None


def _check_schedule(task: Task) -> Iterator[_Fault]:
    if task.schedule is not None:
        from broker.task.due_times import list_faults

        yield from ((f"`schedule.{field}`: {message}", hint) for field, message, hint in list_faults(task.schedule))


def _check_pod_config(task: Task) -> Iterator[_Fault]:
    try:
        is_valid = not task.pod_config or isinstance(json.loads(task.pod_config), dict)
    except ValueError:
        is_valid = False
    if not is_valid:
        yield "`pod_config` must be a JSON object", None


def _check_places(task: Task) -> Iterator[_Fault]:
    for each in task.resources:
        yield from _try("region", each.region, PLACE)
        yield from _try("zone", each.zone, PLACE)
        yield from _try("instance_type", each.instance_type, INSTANCE_TYPE)
        yield from _try("image_id", each.image_id, IMAGE)
        for key, value in each.labels.items():
            yield from _try("labels", key, LABEL_KEY)
            yield from _try(f"labels.{key}", value, LABEL_VALUE)
            clouds = {one.cloud for one in task.resources if one.labels.get(key) == value}
            for cloud, message, hint in find_refusals(key, value, clouds):
                if clouds == {cloud}:
                    yield message, hint


def _check_values(task: Task) -> Iterator[_Fault]:
    secrets = {key: secret.value for key, secret in task.secrets.items()}
    for name, values in (("envs", task.envs), ("secrets", secrets)):
        for key, value in values.items():
            yield from _try(name, key, ENV_NAME)
            yield from _try(f"{name}.{key}", value, ENV_VALUE, is_hidden=True)
    total = sum(_measure(key, value) for key, value in [*task.envs.items(), *secrets.items()])
    if total > ENVIRONMENT_BYTES_MAX:
        yield f"`envs` and `secrets` are {total:,} bytes in total; the limit is {ENVIRONMENT_BYTES_MAX:,}", None
