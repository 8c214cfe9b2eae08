"""Read the `resources` section into alternatives of Resources, as SkyPilot does."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from broker.task.accelerators import read_accelerator
from broker.task.allowed import SKYPILOT, find_image_cloud, suggest_image
from broker.task.fields_recovery import ELASTIC
from broker.task.fields_resources import PRIORITIES
from broker.task.measures import Ratio
from broker.task.reading import Reader
from broker.task.tables import Section
from broker.types import Autostop, JobRecovery, Quantity, Resources
from broker.types.task import CONTAINER

IDLE_MINUTES = 5  # SkyPilot's default for `autostop: true`
ALTERNATIVES_MAX = 1_000  # each is planned separately

_ANY_REGION = ("null", "Null", "NULL", "~")  # keys of `image_id` that YAML reads as null
_NO_ACCELERATOR = "none"
_CPU = "cpu"  # `CPU:4` loads in SkyPilot
HOSTS = ("local", "slurm", "ssh")  # machines that exist already, with their own system

# SkyPilot 0.14.1 `sky/resources.py`: the versions that it chooses, by the beginning of the TPU's name.
_RUNTIME = "tpu-vm-base"
_RUNTIMES = {"TPU-v5": "v2-alpha-tpuv5", "TPU-v6e": "v2-alpha-tpuv6e"}

_Pairs = list[tuple[str, float]]


def read_resources(reader: Reader, section: Section | None) -> tuple[tuple[Resources, ...], bool]:
    """Return all alternatives, and whether they are in order of preference.

    `ordered: [{infra: aws, accelerators: 80GB+}, {infra: gcp}]`: all of aws precedes all of gcp, and on aws the
    accelerators compete. `accelerators: [H100, A100]` next to `any_of`: H100 of any alternative precedes A100.
    """
    if section is None:
        return (Resources(),), False
    base = _apply(reader, section, Resources())
    accelerators, is_listed = _read_accelerators(section)
    if parts := [f"{name}:{count:g}" for name, count in accelerators if 0 < count < 1]:
        reader.warn(
            section.find_key("accelerators"), "accelerators",
            f"`accelerators`: {parts[0]} uses a node with a whole accelerator if fractions are not offered",
            "start other runs next to it with `broker exec CLUSTER TASK.yaml` while the fractions add up to at most 1; "
            "memory is not divided",
            blocks_launch=False,
        )  # fmt: skip
    _check_counts(reader, section, accelerators)
    _check_tpu_options(reader, section, accelerators)
    images = _read_images(reader, section)
    if not (section.get("any_of") or section.get("ordered")):
        _check_image_region(reader, section, base, images)
    count = (
        len(section.get("any_of") or section.get("ordered") or [1]) * max(1, len(accelerators)) * max(1, len(images))
    )
    if count > ALTERNATIVES_MAX:
        reader.fault(section.marked, f"`resources` has {count:,} alternatives; the limit is {ALTERNATIVES_MAX:,}")
        return (base,), False
    if items := section.get("ordered"):
        groups = _read_alternatives(reader, items, base, (accelerators, is_listed), images)
        return tuple(
            replace(each, preference=number * ALTERNATIVES_MAX + (each.preference or 0))
            for number, group in enumerate(groups)
            for each in group
        ), True
    if items := section.get("any_of"):
        is_listed = _keeps_order(reader, section, items, is_listed=is_listed)
        groups = _read_alternatives(reader, items, base, (accelerators, is_listed), images)
    else:
        groups = [_spread(base, (accelerators, is_listed), images)]
    found = [each for group in groups for each in group]
    if not is_listed:
        return tuple(replace(each, preference=None) for each in found), False
    return tuple(sorted(found, key=lambda each: each.preference or 0)), True


def read_autostop(section: Section | None) -> Autostop | None:
    """Read `autostop` of the task: a cluster has one rule, regardless of its alternative."""
    return _read_autostop(_read_first(section, "autostop"))


def read_recovery(section: Section | None) -> JobRecovery:
    """Read `job_recovery` of the task: that of the first alternative that has one."""
    return _read_recovery(_read_first(section, "job_recovery"))


def read_priority(section: Section | None) -> int:
    """Read `priority` of the task: that of the first alternative that has one."""
    return _read_priority(_read_first(section, "priority"))


def _read_priority(value: int | str | None) -> int:
    return PRIORITIES[value] if isinstance(value, str) else value or 0


def note_differences(reader: Reader, section: Section | None) -> None:
    """Note fields of a whole task that differ between its alternatives, because `_read_first` applies to all."""
    items: Sequence[Section] = (section.get("any_of") or section.get("ordered") or ()) if section else ()
    for field, read in _OF_TASK.items():
        found = [read(each.get(field, section.get(field) if section else None)) for each in items]
        if odd := next((item for item, value in zip(items, found, strict=True) if value != found[0]), None):
            place = odd.find_key(field) if field in odd.marks else (odd.marked.line, odd.marked.column)
            message = f"`{field}` differs between the alternatives: the first one that is set applies to all"
            reader.warn(place, field, message, f"write `{field}` once, next to `any_of`", blocks_launch=False)


def _read_first(section: Section | None, field: str) -> Any:
    """Return the field of the first alternative that has it; fields outside of the alternatives belong to each."""
    if section is None:
        return None
    items: Sequence[Section] = section.get("any_of") or section.get("ordered") or []
    values = [each.get(field) for each in (*items[:1], section, *items[1:])]
    return next((each for each in values if each is not None), None)


def _keeps_order(reader: Reader, section: Section, items: Sequence[Section], *, is_listed: bool) -> bool:
    """Return whether the list of accelerators next to `any_of` orders all alternatives; note a list that does not."""
    own = [item for item in items if item.get("accelerators") is not None]
    lists = [item for item in own if _read_accelerators(item)[1]]
    for each in [*([section] if is_listed and own else []), *lists]:
        if len(_read_accelerators(each)[0]) > 1:
            message = "`accelerators`: the order of the list has no effect in `any_of`"
            hint = "write `ordered`, with one alternative for each accelerator"
            reader.warn(each.find_key("accelerators"), "accelerators", message, hint, blocks_launch=False)
    return is_listed and not own


def _read_alternatives(
    reader: Reader, items: Sequence[Section], base: Resources, accelerators: tuple[_Pairs, bool], images: dict[str, str]
) -> list[list[Resources]]:
    """Return each alternative, which inherits the fields outside, as one or several Resources."""
    groups: list[list[Resources]] = []
    for item in items:
        each = _apply(reader, item, base)
        own = _read_accelerators(item)
        _check_counts(reader, item, own[0])
        _check_tpu_options(reader, item, own[0] or accelerators[0])
        own_images = _read_images(reader, item) if item.get("image_id") is not None else images
        _check_image_region(reader, item, each, own_images)
        groups.append(_spread(each, own if own[0] else accelerators, own_images))
        if sum(map(len, groups)) > ALTERNATIVES_MAX:
            reader.fault(item.marked, f"`resources` has more than {ALTERNATIVES_MAX:,} alternatives")
            break
    return groups


def _apply(reader: Reader, section: Section, base: Resources) -> Resources:
    """Apply every single-valued field to `base`."""
    get = section.get
    changes: dict[str, Any] = {
        "cpus": get("cpus"),
        "instance_type": get("instance_type"),
        "use_spot": get("use_spot"),
        "network_tier": get("network_tier"),
        "usd_hour_max": get("max_hourly_cost"),
        "disk_tier": get("disk_tier"),
        "disk_size_gib": None if get("disk_size") is None else max(1, int(get("disk_size"))),
        **_read_memory(get("memory")),
        "ports": _read_ports(get("ports")),
        "labels": {**base.labels, **get("labels", {})},
        "origin": reader.find_origin(section.marked),
    }
    changes = {name: value for name, value in changes.items() if value is not None or name.startswith("memory_gib")}
    if get("disk_tier") == "none":
        changes["disk_tier"] = None
    if "instance_type" in changes and _requests_tpu_node(section):
        del changes["instance_type"]
        message = "`instance_type`: TPU nodes with a separate host are not supported; planning a TPU VM instead"
        hint = "remove `instance_type` and `accelerator_args`"
        reader.warn(section.find_key("instance_type"), "instance_type", message, hint, blocks_launch=True)
    changes.update(_read_place(reader, section, base))
    return replace(base, **changes)


def _requests_tpu_node(section: Section) -> bool:
    """Return whether the instance type is a TPU node's host: a TPU VM is its own host."""
    options = section.get("accelerator_args")
    is_node = options is not None and options.get("tpu_vm") is False
    return is_node and any(name.startswith("TPU-") for name, _ in _read_accelerators(section)[0])


def _read_place(reader: Reader, section: Section, base: Resources) -> dict[str, str | None]:
    """Read cloud, region and zone; a new one drops the finer parts of `base`."""
    if (infra := section.get("infra")) is not None:
        cloud, region, zone = infra
        place = {"cloud": cloud, "region": region, "zone": zone}
    else:
        place = {name: section.get(name) for name in ("cloud", "region", "zone")}
        if place["cloud"]:
            place["cloud"] = place["cloud"].lower()
        elif not place["region"]:
            place["cloud"], place["region"] = base.cloud, base.region
            place["zone"] = place["zone"] or base.zone
        else:
            place["cloud"] = base.cloud
    if place["cloud"] == "k8s":
        place["cloud"] = "kubernetes"
    return place


def _read_memory(memory: Quantity | Ratio | None) -> dict[str, Quantity | float | None]:
    """Return the fields set by a size or a ratio; the other one of `base` no longer applies."""
    if memory is None:
        return {}
    if isinstance(memory, Ratio):
        return {"memory_gib": None, "memory_gib_per_vcpu": float(memory)}
    return {"memory_gib": memory, "memory_gib_per_vcpu": None}


def _read_ports(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    found = [port for each in ([value] if isinstance(value, str) else value) for port in each.split(",")]
    return tuple(dict.fromkeys(found))


def _read_autostop(value: Any) -> Autostop | None:
    if value is None or value is False:
        return None
    if isinstance(value, Section):
        return Autostop(idle_minutes=value.get("idle_minutes", IDLE_MINUTES), is_down=value.get("down", False))
    if value is True:
        return Autostop(idle_minutes=IDLE_MINUTES)
    if value < 0:
        return None
    return Autostop(idle_minutes=-int(-value // 60))  # seconds, rounded up


def _read_recovery(value: Any) -> JobRecovery:
    if value is None:
        return JobRecovery()
    strategy = value.get("strategy") if isinstance(value, Section) else value
    nodes_min = 1 if strategy == ELASTIC else None
    strategy = None if strategy in ("none", ELASTIC) else strategy
    if not isinstance(value, Section):
        return JobRecovery(strategy=strategy, nodes_min=nodes_min)
    codes = value.get("recover_on_exit_codes", ())
    return JobRecovery(
        strategy=strategy,
        max_restarts_on_errors=value.get("max_restarts_on_errors"),
        recover_on_exit_codes=(codes,) if isinstance(codes, int) else tuple(codes),
        stall_timeout_s=value.get("stall_timeout"),
        nodes_min=value.get("min_nodes", nodes_min),
        checks_health=value.get("health_check"),
        caches_setup=value.get("cache_setup", False),
    )


# Fields of the whole task, although they are written in `resources`.
_OF_TASK: Mapping[str, Callable[[Any], object]] = {
    "autostop": _read_autostop,
    "job_recovery": _read_recovery,
    "priority": _read_priority,
}


def _read_accelerators(section: Section) -> tuple[_Pairs, bool]:
    """Read `H100:8`, `{A100: 8, H100: 8}` (either), `[A100:8, H100:8]` (in this order) as names with counts."""
    value = section.get("accelerators")
    if value is None:
        return [], False
    pairs: _Pairs = []
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, str):
            pairs.append(read_accelerator(each))
            continue
        for key, count in each.items():  # in flow style without a space, YAML reads `{A100:8}` as a key without a value
            name, own = read_accelerator(key)
            pairs.append((name, own if count is None else own * count))
    return list(dict.fromkeys(pairs)), isinstance(value, list)


def _check_counts(reader: Reader, section: Section, pairs: _Pairs) -> None:
    """Check counts: a fraction of one accelerator, or whole ones (as in SkyPilot)."""
    for name, count in pairs:
        place = section.find_key("accelerators")
        if name.lower() == _NO_ACCELERATOR:
            hint = "for a machine without accelerators, remove `accelerators`"
            reader.note(*place, f"`accelerators`: unknown accelerator `{name}`", hint)
        if name.lower() == _CPU:
            message = f"`accelerators`: `{name}:{count:g}` is read as `cpus: {count:g}+`"
            reader.warn(
                place, "accelerators", message, "a CPU is not an accelerator: write `cpus`", blocks_launch=False
            )
        if count > 1 and not count.is_integer():
            reader.note(
                *place, f"more than one accelerator must be a whole number, not `{name}:{count:g}`",
                f"use `{name}:{math.floor(count)}` or `{name}:{math.ceil(count)}`, or a fraction: `{name}:0.5`",
            )  # fmt: skip


def _check_tpu_options(reader: Reader, section: Section, pairs: _Pairs) -> None:
    """Refuse to launch with options that differ from those that SkyPilot, which starts TPUs, chooses itself."""
    options: Section | None = section.get("accelerator_args")
    defaults = {_find_runtime(name) for name, _ in pairs} or {_RUNTIME}
    for key, value in options.values.items() if options else ():
        if not (value is True if key == "tpu_vm" else key == "runtime_version" and {value} == defaults):
            hint = "remove `accelerator_args` to use the cloud's defaults"
            message = "`accelerator_args`: TPU options are not supported"
            reader.warn(section.find_key("accelerator_args"), "accelerator_args", message, hint, blocks_launch=True)
            return


def _find_runtime(accelerator: str) -> str:
    return next((version for name, version in _RUNTIMES.items() if accelerator.startswith(name)), _RUNTIME)


def _read_images(reader: Reader, section: Section) -> dict[str, str]:
    """Return image by region; the key "" is for every region. Unsupported images are reported."""
    value = section.get("image_id")
    if value is None:
        return {}
    pairs = {"": value} if isinstance(value, str) else value
    images = {"" if region in _ANY_REGION else region: image for region, image in pairs.items()}
    place = section.find_key("image_id")
    if (container := images.pop("docker", None)) is not None:  # SkyPilot: a container inside a machine image
        if images:
            hint = "use `image_id: docker:IMAGE`, which runs on broker's own image"
            reader.warn(place, "image_id", "`image_id`: this machine image is not supported", hint, blocks_launch=True)
        return {"": CONTAINER + container.removeprefix(CONTAINER)}
    if any(each.startswith(SKYPILOT) for each in images.values()):
        hint = "remove `image_id`: broker chooses an image for the machine"
        reader.warn(place, "image_id", "`image_id`: SkyPilot's own images are not supported", hint, blocks_launch=True)
    elif found := [each for each in images.values() if not each.startswith(CONTAINER)]:
        is_known = all(find_image_cloud(each) for each in found)
        hint = "remove `image_id`, and install what you need in `setup`"
        for cloud in HOSTS:
            message = f"`image_id` on {cloud}: machine images are not supported"
            shown = hint if is_known else suggest_image(found[0], cloud)
            reader.warn(place, "image_id", message, shown, blocks_launch=True, cloud=cloud)
    return images


def _check_image_region(reader: Reader, section: Section, base: Resources, images: Mapping[str, str]) -> None:
    """Report a mapping from region to image that lacks the requested region, in which SkyPilot finds no placement."""
    if images and base.region is not None and not {base.region, ""} & set(images):
        is_own = "image_id" in section.marks
        place = section.find_key("image_id") if is_own else (section.marked.line, section.marked.column)
        message = f"`image_id` has no image for the region `{base.region}`"
        reader.note(*place, message, f"add `{base.region}: IMAGE`, or remove the region")


def _spread(base: Resources, accelerators: tuple[_Pairs, bool], images: dict[str, str]) -> list[Resources]:
    """Return one Resources for every accelerator, in the preference of a list, and every region that has an image."""
    pairs, is_listed = accelerators
    spread = [
        replace(_set_accelerator(base, name, count), preference=index if is_listed else 0)
        for index, (name, count) in enumerate(pairs)
    ] or [replace(base, preference=0)]
    if not images:
        return spread
    fitting = {region: image for region, image in images.items() if not region or base.region in (None, region)}
    return [
        replace(
            each,
            image_id=_complete_image(image, each.cloud),
            region=region or each.region,
            cloud=each.cloud or find_image_cloud(image),
        )
        for each in spread
        for region, image in fitting.items()
    ]


def _set_accelerator(base: Resources, name: str, count: float) -> Resources:
    if name.lower() == _CPU:
        return replace(base, cpus=base.cpus or Quantity(value=count, is_minimum=True))
    return replace(base, accelerator=name, accelerator_count=count)


def _complete_image(image: str, cloud: str | None) -> str:
    """Return the image with SkyPilot's `docker:`, which may be omitted for pods: they have no machine images."""
    is_pod = cloud == "kubernetes" and not image.startswith((CONTAINER, SKYPILOT))
    return CONTAINER + image if is_pod else image
