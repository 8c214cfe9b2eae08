"""Parse names of accelerators as users write them: `a100`, `H100-80GB:8`, `tpu-v5e-8`, `80GB+`, `nvidia:80GB+:8`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from broker.task.measures import read_gib
from broker.task.reading import suggest
from broker.types import AcceleratorFigures, Notice, Origin, Quantity, Resources, Task

_BY_MEMORY = r"(?:([A-Za-z]+):)?([0-9]+[gGmMtT][bB])(\+?)"
_TPU = r"[tT][pP][uU]-[vV]([0-9][a-zA-Z]*)-([0-9]+)"
# A TPU's name counts cores up to v4 and v5p, and chips in later ones:
# https://cloud.google.com/tpu/docs/system-architecture-tpu-vm
_CORES_PER_CHIP = {"2": 2, "3": 2, "4": 2, "5p": 2}
_TPU_NAMES = {"5litepod": "5e", "5lite": "5e"}
_MAKERS = (("MI", "amd"), ("Radeon", "amd"), ("TPU", "google"), ("Inferentia", "amazon"), ("Trainium", "amazon"),
           ("Gaudi", "intel"), ("AI100", "qualcomm"))  # fmt: skip
# Aliases in users' and SkyPilot's files for accelerators of the book; a family matches every generation with that
# number of devices (SkyPilot's `Inferentia:6` is an inf2.24xlarge).
ALIASES: dict[str, tuple[str, ...]] = {
    "mi300": ("MI300X",), "mi355": ("MI355X",), "a100-80": ("A100-80GB",), "a100-40": ("A100",),
    "a100-80gb-sxm": ("A100-80GB",), "h100-sxm": ("H100",), "h100-80gb-hbm3": ("H100",), "h200-sxm": ("H200",),
    "b200-sxm": ("B200",), "v100-16": ("V100",), "v100-32": ("V100-32GB",), "rtxa6000": ("A6000",),
    "rtx-a6000": ("A6000",), "rtx6000ada": ("RTX6000-Ada",), "rtx-pro-6000": ("RTXPRO6000",),
    "inferentia": ("Inferentia", "Inferentia2"), "inferentia1": ("Inferentia",), "inf1": ("Inferentia",),
    "inf2": ("Inferentia2",), "trainium1": ("Trainium",), "trn1": ("Trainium",), "trn2": ("Trainium2",),
    "tpu-v5litepod": ("TPU-v5e",), "tpu-v5lite": ("TPU-v5e",), "a100-80gb-sxm4": ("A100-80GB",),
    "h100-mega-80gb": ("H100",), "h100-nvl": ("H100",), "h100-nvlink": ("H100",), "h100-pcie": ("H100",),
    "a100-80gb-pcie": ("A100-80GB",), "a4000": ("RTXA4000",), "rtx-a4000": ("RTXA4000",), "a4500": ("RTXA4500",),
    "a5000": ("RTXA5000",), "rtx-a5000": ("RTXA5000",), "rtx-4090": ("RTX4090",), "rtx-5090": ("RTX5090",),
    "radeon mi25": ("MI25",), "gaudi hl-205": ("Gaudi",),
    "radeon pro v520": ("Radeon-Pro-V520",), "radeon pro v710": ("Radeon-Pro-V710",),
}  # fmt: skip
# Parts of the names of GKE (`nvidia-tesla-t4`) and of nvidia-smi (`A100-SXM4-80GB`).
_PRODUCT_PARTS = r"^(?:nvidia-|amd-)?(?:tesla-|geforce-|instinct-)?|-(?:sxm|pcie|hbm)[0-9a-z]*"
_MEMORY_SLACK = 0.02  # a "141 GB" device is sold as 141 or 144, a "180 GB" one as 180 or 183


def read_accelerator(text: str) -> tuple[str, float]:
    """Parse `H100:8` into H100 and 8; the default count is 1. The text matches `fields_resources.ACCELERATOR`."""
    name, _, count = (part.strip() for part in text.strip().rpartition(":"))
    if not name or not re.fullmatch(r"[0-9]+(\.[0-9]+)?", count):
        name, count = text.strip(), "1"
    if found := re.fullmatch(_TPU, name):
        version = _TPU_NAMES.get(found[1].lower(), found[1].lower())
        return f"TPU-v{version}", int(found[2]) / _CORES_PER_CHIP.get(version, 1) * float(count)
    return name, float(count)


def resolve_accelerators(
    task: Task,
    figures: Mapping[str, AcceleratorFigures],
    *,
    offered: Collection[str] = (),
    sellers: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Task:
    """Return the task with every accelerator named as in `figures` or `offered`.

    A request by memory becomes all accelerators that fit. The accelerators on which the goal's work was measured, and
    those of a service's targets, are renamed, too.

    `offered` are accelerators with offers, some without figures; `sellers` maps others to clouds that offer them. As in
    SkyPilot, an unknown name among alternatives is skipped with a notice; a single unknown name is kept, for the book
    to refuse.
    """
    by_lower = {name.lower(): name for name in (*sellers, *offered, *figures)}
    known = {*figures, *offered}
    task = _resolve_goal(task, by_lower, figures)
    found: list[Resources] = []
    plain: list[Resources] = []  # without their preferences
    unknown: dict[str, Resources] = {}
    for each in task.resources:
        if each.accelerator is None:
            names: list[str | None] = [None]
        elif asked := re.fullmatch(_BY_MEMORY, each.accelerator):
            memory = Quantity(value=read_gib(asked[2]), is_minimum=bool(asked[3]))
            names = [*_list_by_memory(figures, memory, asked[1])] or [each.accelerator]
        else:
            names = [*_list_names(each.accelerator, by_lower, figures)]
        for name in names:
            if name is not None and name not in known:
                unknown.setdefault(name, replace(each, accelerator=name))
            elif (alike := replace(each, accelerator=name, preference=None)) not in plain:
                plain.append(alike)
                found.append(replace(each, accelerator=name))
    if not found:
        return replace(task, resources=tuple(unknown.values()))
    notices = tuple(_note_unknown(name, each, known, sellers) for name, each in unknown.items())
    task = replace(task, resources=tuple(found), notices=(*task.notices, *notices))
    return _resolve_targets(task, by_lower, figures)


def _resolve_goal(task: Task, by_lower: Mapping[str, str], figures: Mapping[str, AcceleratorFigures]) -> Task:
    """Name the accelerators of `work: {on: ...}` and `throughput` as in `figures`; note those without figures.

    Such work takes the same time everywhere, and such a figure only applies to that accelerator.
    """
    goal = task.goal
    if goal is None or not (goal.work_on or goal.throughput):
        return task
    notices = []

    def resolve(text: str, field: str, effect: str, known: Collection[str] = ()) -> str:
        name, count = read_accelerator(text)
        found = _list_names(name, by_lower, figures)[0]
        if found not in figures and found not in known:
            message = f"`{field}`: the speed of `{found}` is unknown, so {effect}"
            origin = task.origin or Origin(file="command line", line=0, column=0)
            notices.append(Notice(origin=origin, field="goal", message=message, hint=suggest(found, figures)))
        return f"{found}:{count:g}"

    throughput = {
        resolve(key, "throughput", "this figure applies to no other accelerator"): value
        for key, value in goal.throughput.items()
    }
    on, measured = goal.work_on, {key.partition(":")[0] for key in throughput}
    if on is not None:
        on = resolve(on, "on", "the work takes the same time on all other accelerators", measured)
    kept = tuple(each for each in notices if each not in task.notices)
    return replace(task, goal=replace(goal, work_on=on, throughput=throughput), notices=(*task.notices, *kept))


def _resolve_targets(task: Task, by_lower: Mapping[str, str], figures: Mapping[str, AcceleratorFigures]) -> Task:
    """Name the accelerators of `target_qps_per_replica` as in `figures`. A key without a count is for every count.

    On an accelerator without a target, the lowest one applies (`serve.scaling.find_target_qps`), which is noted.
    """
    service = task.service
    if service is None or not any(service.policy.target_qps):  # "" is for any accelerator
        return task
    targets = {}
    for key, qps in service.policy.target_qps.items():
        name, separator, count = key.partition(":")
        found = _list_names(name.strip(), by_lower, figures)[0] if key else key
        targets[f"{found}{separator}{count.strip()}"] = qps
    task = replace(task, service=replace(service, policy=replace(service.policy, target_qps=targets)))
    for each in task.resources:
        name = f"{each.accelerator or 'CPU'}:{each.accelerator_count:g}"
        if "" not in targets and not {name, each.accelerator} & set(targets):
            notice = Notice(
                origin=each.origin or Origin(file="command line", line=0, column=0),
                field="target_qps_per_replica",
                message=f"`target_qps_per_replica` has no target for `{name}`; the lowest one applies",
            )
            if notice not in task.notices:
                task = replace(task, notices=(*task.notices, notice))
    return task


def _note_unknown(
    name: str, resources: Resources, known: Collection[str], sellers: Mapping[str, Sequence[str]]
) -> Notice:
    if clouds := sellers.get(name):
        cloud = resources.cloud if resources.cloud in clouds else clouds[0]
        reason = f"the catalog has no offers of `{name}`"
        hint: str | None = f"add prices with `broker catalog update --cloud {cloud}`"
    else:
        reason, hint = f"unknown accelerator `{name}`", suggest(name, known)
    return Notice(
        origin=resources.origin or Origin(file="command line", line=0, column=0),
        field="accelerators",
        message=f"`accelerators`: {reason}; ignoring it",
        hint=hint,
    )


def _list_by_memory(figures: Mapping[str, AcceleratorFigures], memory: Quantity, maker: str | None) -> list[str]:
    return [
        name
        for name, each in figures.items()
        if (maker is None or find_maker(name) == maker.lower())
        and (
            each.memory_gib >= memory.value * (1 - _MEMORY_SLACK)
            if memory.is_minimum
            else abs(each.memory_gib - memory.value) <= memory.value * _MEMORY_SLACK
        )
    ]


def find_maker(name: str) -> str:
    """Return the maker of an accelerator by its name, NVIDIA by default."""
    return next((maker for start, maker in _MAKERS if name.startswith(start)), "nvidia")


def _list_names(name: str, by_lower: Mapping[str, str], figures: Mapping[str, AcceleratorFigures]) -> list[str]:
    """List the book's names for a request: one, or several for a family of devices."""
    for each in (name, re.sub(_PRODUCT_PARTS, "", name.lower())):
        if found := [alias for alias in ALIASES.get(each.lower(), ()) if alias.lower() in by_lower]:
            return found
        if (spelling := _find_name(each, by_lower, figures)).lower() in by_lower:
            return [spelling]
    return [name]


def _find_name(name: str, by_lower: Mapping[str, str], figures: Mapping[str, AcceleratorFigures]) -> str:
    """Return the known spelling, dropping a redundant memory suffix (`A100-40GB` is `A100`)."""
    if spelling := by_lower.get(name.lower()):
        return spelling
    base, _, suffix = name.rpartition("-")
    if base.lower() in by_lower and re.fullmatch(r"[0-9]+[gG][bB]", suffix):
        spelling = by_lower[base.lower()]
        memory_gib = figures[spelling].memory_gib if spelling in figures else read_gib(suffix)
        if abs(memory_gib - read_gib(suffix)) <= read_gib(suffix) * _MEMORY_SLACK:
            return spelling
    return name
