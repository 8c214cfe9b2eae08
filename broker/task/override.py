"""Override a task's resources by command-line flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from broker.errors import Issue, TaskError
from broker.task.allowed import find_image_cloud
from broker.task.fields_resources import RESOURCES
from broker.task.reading import Reader
from broker.task.resources import HOSTS, read_resources
from broker.task.yaml_reader import Marked
from broker.types import Resources, Task


def override_resources(
    task: Task,
    *,
    infra: str | None = None,
    cloud: str | None = None,
    region: str | None = None,
    zone: str | None = None,
    instance_type: str | None = None,
    accelerators: str | None = None,
    cpus: str | None = None,
    memory: str | None = None,
    use_spot: bool | None = None,
    num_nodes: int | None = None,
) -> Task:
    """Apply the flags to every alternative of a task; None leaves a field unchanged. Raises TaskError.

    The accelerator `none` removes those of the task, as in SkyPilot.
    """
    if accelerators is not None and accelerators.strip().lower() == "none":
        accelerators = None
        task = replace(task, resources=_remove_accelerators(task.resources))
    given: dict[str, Any] = {
        "infra": infra, "cloud": cloud, "region": region, "zone": zone, "instance_type": instance_type,
        "accelerators": accelerators, "cpus": cpus, "memory": memory, "use_spot": use_spot,
    }  # fmt: skip
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return replace(task, num_nodes=num_nodes) if num_nodes else task
    reader = Reader("", "command line")
    fields = {name: Marked(value=value, line=0, column=0, text=str(value)) for name, value in given.items()}
    section = RESOURCES.read(
        reader, Marked(value=fields, line=0, column=0, keys=dict.fromkeys(fields, (0, 0))), "resources"
    )
    flags, _ = read_resources(reader, section)
    if reader.issues:
        raise TaskError(reader.issues)
    resources = _merge(task.resources, flags, given)
    if not resources:
        place = "/".join(str(given[name]) for name in ("infra", "cloud", "region", "zone") if name in given)
        hint = "add an image of that place to `image_id`, or remove `image_id`"
        raise TaskError(
            [Issue(file="command line", line=0, column=0, message=f"`image_id` has no image for `{place}`", hint=hint)]
        )
    replaced = {*given, "cloud"} if "infra" in given else {*given, "infra"} if "cloud" in given else set(given)
    kept = tuple(notice for notice in task.notices if notice.field not in replaced)
    return replace(
        task,
        resources=tuple(resources),
        num_nodes=num_nodes or task.num_nodes,
        notices=(*kept, *reader.take_notices()),
    )


def _merge(alternatives: Sequence[Resources], flags: Sequence[Resources], given: Mapping[str, Any]) -> list[Resources]:
    """Return each alternative with the values of each flag; of equal results the first, whatever their preference."""
    changed = _list_changes(given)
    is_moved = bool({"infra", "cloud", "region", "zone"} & set(given))
    merged: list[Resources] = []
    known: list[Resources] = []  # without their preferences
    for alternative in alternatives:
        for flag in flags:
            changes = {name: getattr(flag, name) for name in changed}
            if "accelerators" in given and flag.accelerator is None:  # `CPU:4`
                changes["cpus"] = flag.cpus
            each = replace(alternative, **changes)
            if is_moved:
                placed = _place_image(alternative, each, alternatives)
                if placed is None:
                    continue
                each = placed
            if (plain := replace(each, preference=None)) not in known:
                known.append(plain)
                merged.append(each)
    return merged


def _remove_accelerators(resources: Sequence[Resources]) -> tuple[Resources, ...]:
    """Return the alternatives without accelerators; of those that this makes equal, the first is kept."""
    kept: list[Resources] = []
    made: list[Resources] = []
    for each in resources:
        bare = replace(each, accelerator=None, accelerator_count=0)
        if (plain := replace(bare, preference=None)) not in made:
            made.append(plain)
            kept.append(bare)
    return tuple(kept)


def _place_image(each: Resources, moved: Resources, others: Sequence[Resources]) -> Resources | None:
    """Return the alternative at the flags' place; None if its image is for another place.

    A machine image of EC2 exists in one region. Of several images, as in a mapping from region to image, each is for
    its own region; a container is for every region unless another alternative has one for this region.
    """
    if each.image_id is None or moved.cloud in HOSTS:
        return moved
    cloud = find_image_cloud(each.image_id)
    if cloud is not None and moved.cloud not in (None, cloud):
        return None
    is_bound = each.image_id.startswith("ami-") or len({other.image_id for other in others}) > 1
    if each.container is not None:
        is_bound = is_bound and moved.region in {other.region for other in others if other.region is not None}
    if each.region is None or not is_bound:
        return moved
    if moved.region not in (None, each.region):
        return None
    return replace(moved, cloud=moved.cloud or each.cloud, region=each.region)


def _list_changes(given: Mapping[str, Any]) -> list[str]:
    """List the fields of Resources that the flags set; a place drops the file's more specific parts."""
    names = {"accelerators": ["accelerator", "accelerator_count"], "memory": ["memory_gib", "memory_gib_per_vcpu"]}
    names |= {"infra": ["cloud", "region", "zone"], "cloud": ["cloud", "region", "zone"], "region": ["region", "zone"]}
    return list(dict.fromkeys(field for flag in given for field in names.get(flag, [flag])))
