"""The `resources` section -> alternatives of Resources, in SkyPilot's dialect."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from broker.task.reading import Reader, describe
from broker.task.yaml_reader import Marked
from broker.types import Autostop, JobRecovery, Origin, Resources

FIELDS = [
    "accelerators",
    "cpus",
    "memory",
    "instance_type",
    "cloud",
    "region",
    "zone",
    "infra",
    "use_spot",
    "disk_size",
    "disk_tier",
    "network_tier",
    "ports",
    "image_id",
    "labels",
    "autostop",
    "job_recovery",
    "spot_recovery",
    "any_of",
    "ordered",
    "accelerator_args",
    "max_hourly_cost",
]
UNSUPPORTED = {
    "accelerator_args": "TPU runtime versions cannot be chosen yet; remove `accelerator_args`",
    "max_hourly_cost": "write `goal: {budget: USD}` to limit what the whole task may cost",
}
TIERS = ("low", "medium", "high", "ultra", "best")
STRATEGIES = ("failover", "eager_next_region", "cheapest")


def read_resources(reader: Reader, marked: Marked | None) -> tuple[tuple[Resources, ...], bool]:
    """All alternatives, and whether their order is a preference."""
    if marked is None or marked.value is None:
        return (Resources(),), False
    fields = reader.mapping(marked, "`resources`", FIELDS)
    for name, instead in UNSUPPORTED.items():
        if name in fields:
            reader.note(*marked.keys[name], f"`{name}` is not supported yet", instead)
    origin = Origin(file=reader.file, line=marked.line, column=marked.column)
    base = _read_common(reader, fields, Resources(origin=origin))
    if "any_of" in fields and "ordered" in fields:
        reader.note(*marked.keys["ordered"], "`ordered` and `any_of` exclude each other", "keep one of them")
    for name in ("any_of", "ordered"):
        if name in fields:
            return _read_alternatives(reader, fields[name], name, base), name == "ordered"
    return _read_accelerators(reader, fields.get("accelerators"), base)


def _read_alternatives(reader: Reader, marked: Marked, name: str, base: Resources) -> tuple[Resources, ...]:
    found: list[Resources] = []
    for item in reader.sequence(marked, f"`{name}`"):
        known = [each for each in FIELDS if each not in ("any_of", "ordered")]
        fields = reader.mapping(item, f"`{name}`", known)
        origin = Origin(file=reader.file, line=item.line, column=item.column)
        each = _read_common(reader, fields, replace(base, origin=origin))
        found.extend(_read_accelerators(reader, fields.get("accelerators"), each)[0])
    if not found and not reader.issues:
        reader.fault(marked, f"`{name}` has no alternative")
    return tuple(found) or (base,)


def _read_common(reader: Reader, fields: Mapping[str, Marked], base: Resources) -> Resources:
    """Every field but the accelerators, over what `base` says."""
    get = fields.get
    changes: dict[str, Any] = {
        "cpus": reader.quantity(get("cpus"), "cpus"),
        "memory_gib": reader.quantity(get("memory"), "memory", unit="G"),
        "instance_type": reader.text(get("instance_type"), "instance_type"),
        "cloud": _lower(reader.text(get("cloud"), "cloud")),
        "region": reader.text(get("region"), "region"),
        "zone": reader.text(get("zone"), "zone"),
        "use_spot": reader.boolean(get("use_spot"), "use_spot"),
        "disk_tier": _read_choice(reader, get("disk_tier"), "disk_tier", TIERS),
        "network_tier": _read_choice(reader, get("network_tier"), "network_tier", ("standard", "best")),
        "image_id": reader.text(get("image_id"), "image_id"),
    }
    disk = reader.size_gib(get("disk_size"), "disk_size")
    changes["disk_size_gib"] = None if disk is None else int(disk)
    if "infra" in fields:
        changes.update(_read_infra(reader, fields))
    if "ports" in fields:
        changes["ports"] = _read_ports(reader, fields["ports"])
    if "labels" in fields:
        labels = reader.mapping(fields["labels"], "`labels`")
        changes["labels"] = {key: reader.text(value, f"labels.{key}") or "" for key, value in labels.items()}
    if "autostop" in fields:
        changes["autostop"] = _read_autostop(reader, fields["autostop"])
    recovery = fields.get("job_recovery") or fields.get("spot_recovery")
    if recovery is not None:
        changes["job_recovery"] = _read_recovery(reader, recovery)
    return replace(base, **{name: value for name, value in changes.items() if value is not None})


def _lower(text: str | None) -> str | None:
    return text.lower() if text else None


def _read_choice(reader: Reader, marked: Marked | None, name: str, choices: tuple[str, ...]) -> str | None:
    text = reader.text(marked, name)
    if text is None or text in choices:
        return text
    assert marked is not None
    reader.fault(marked, f"`{name}` must be one of {', '.join(choices)}, not `{text}`")
    return None


def _read_infra(reader: Reader, fields: Mapping[str, Marked]) -> dict[str, str]:
    """`aws`, `aws/us-east-1`, `aws/*/us-east-1a`."""
    marked = fields["infra"]
    text = reader.text(marked, "infra") or ""
    if any(name in fields for name in ("cloud", "region", "zone")):
        reader.fault(marked, "`infra` and `cloud`, `region` or `zone` exclude each other", "keep `infra`")
    parts = text.strip("/").split("/")
    if len(parts) > 3 or any(re.search(r"\s", part) for part in parts):
        reader.fault(marked, f"`infra` must be like `aws/us-east-1/us-east-1a`, not `{text}`")
        return {}
    return {
        name: part.lower() if name == "cloud" else part
        for name, part in zip(("cloud", "region", "zone"), parts, strict=False)
        if part not in ("", "*")
    }


def _read_ports(reader: Reader, marked: Marked) -> tuple[str, ...]:
    items = marked.value if isinstance(marked.value, list) else [marked]
    ports = []
    for item in items:
        text = str(item.value)
        bounds = [int(part) for part in text.split("-")] if re.fullmatch(r"\d{1,5}(-\d{1,5})?", text) else []
        if bounds and bounds == sorted(bounds) and bounds[0] > 0 and bounds[-1] <= 65535:
            ports.append(text)
        else:
            reader.fault(item, f"`ports` must be like `8080` or `8000-8010`, not {describe(item.value)}")
    return tuple(ports)


def _read_autostop(reader: Reader, marked: Marked) -> Autostop | None:
    if marked.value is True:
        return Autostop(idle_minutes=5)
    if marked.value is False or marked.value is None:
        return None
    if isinstance(marked.value, dict):
        fields = reader.mapping(marked, "`autostop`", ("idle_minutes", "down"))
        minutes = reader.integer(fields.get("idle_minutes"), "idle_minutes")
        return Autostop(
            idle_minutes=5 if minutes is None else minutes, is_down=bool(reader.boolean(fields.get("down"), "down"))
        )
    idle_s = reader.duration_s(marked, "autostop", bare_unit="m")
    return None if idle_s is None else Autostop(idle_minutes=max(1, round(idle_s / 60)))


def _read_recovery(reader: Reader, marked: Marked) -> JobRecovery | None:
    if not isinstance(marked.value, dict):
        return JobRecovery(strategy=_read_strategy(reader, marked))
    known = ("strategy", "max_restarts_on_errors", "recover_on_exit_codes", "stall_timeout")
    fields = reader.mapping(marked, "`job_recovery`", known)
    codes: tuple[int, ...] = ()
    if listed := fields.get("recover_on_exit_codes"):
        items = listed.value if isinstance(listed.value, list) else [listed]
        codes = tuple(code for item in items if (code := reader.integer(item, "recover_on_exit_codes")) is not None)
    return JobRecovery(
        strategy=_read_strategy(reader, fields.get("strategy")),
        max_restarts_on_errors=reader.integer(fields.get("max_restarts_on_errors"), "max_restarts_on_errors") or 0,
        recover_on_exit_codes=codes,
        stall_timeout_s=reader.duration_s(fields.get("stall_timeout"), "stall_timeout", bare_unit="s"),
    )


def _read_strategy(reader: Reader, marked: Marked | None) -> str | None:
    text = _lower(reader.text(marked, "job_recovery"))
    if text is None or text == "none" or text in STRATEGIES:
        return None if text == "none" else text
    assert marked is not None
    reader.fault(marked, f"`job_recovery` knows {', '.join(STRATEGIES)}, not `{text}`")
    return None


def _read_accelerators(reader: Reader, marked: Marked | None, base: Resources) -> tuple[tuple[Resources, ...], bool]:
    """`H100:8`, `H100`, `{A100: 8, H100: 8}` (either), `[A100:8, H100:8]` (in this order)."""
    if marked is None or marked.value is None:
        return (base,), False
    pairs: list[tuple[str, float] | None]
    if isinstance(marked.value, dict):
        pairs = [_read_pair(reader, key, each) for key, each in marked.value.items()]
    elif isinstance(marked.value, list):
        pairs = [_read_named(reader, each) for each in marked.value]
    else:
        pairs = [_read_named(reader, marked)]
    found = tuple(replace(base, accelerator=pair[0], accelerator_count=pair[1]) for pair in pairs if pair)
    return found or (base,), isinstance(marked.value, list)


def _read_named(reader: Reader, marked: Marked) -> tuple[str, float] | None:
    text = reader.text(marked, "accelerators")
    name, _, count = (text or "").partition(":")
    if text and re.fullmatch(r"[A-Za-z][\w.-]*", name) and re.fullmatch(r"(\d+(\.\d+)?)?", count) and count != "0":
        return name, float(count or 1)
    if text is not None:
        reader.fault(marked, f"`accelerators` must be like `H100:8`, not `{text}`")
    return None


def _read_pair(reader: Reader, key: str, marked: Marked) -> tuple[str, float] | None:
    """`{A100: 8}`; in flow style without a space YAML reads `{A100:8}` as a key with no value."""
    if marked.value is None and ":" in key:
        return _read_named(reader, Marked(value=key, line=marked.line, column=marked.column))
    if marked.value is None:
        return key, 1.0
    count = reader.number(marked, f"accelerators.{key}")
    return None if count is None else (key, count)
