"""The fields of `resources`: those of SkyPilot 0.14, each with its shape and broker's support."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from broker.task import allowed
from broker.task.fields_places import CLOUDS, CloudName, Infra, PlaceName
from broker.task.fields_recovery import JOB_RECOVERY, STRATEGY_WORDS
from broker.task.measures import Count, Duration, MemorySize, Size
from broker.task.shapes import (
    Anything,
    Choice,
    Either,
    Flag,
    ListOf,
    MapOf,
    Number,
    Scalar,
    Schema,
    Shape,
    Text,
    Whole,
)
from broker.task.tables import Field, Later, Table
from broker.task.yaml_reader import Marked

_SPACED = r"(?:[rR][aA][dD][eE][oO][nN]|[gG][aA][uU][dD][iI])(?: [A-Za-z0-9-]{1,20}){1,2}"  # `Radeon Pro V520`
ACCELERATOR_NAME = rf"(?:{_SPACED}|[A-Za-z][A-Za-z0-9_.-]{{0,60}})"
_COUNT = r"(?=[0-9.]*[1-9])[0-9]{1,5}(?:\.[0-9]{1,4})?"
_MEMORY = r"(?:[A-Za-z]{2,20}:)?[0-9]{1,5}[gGmMtT][bB]\+?"  # `80GB+`, `nvidia:80GB`
ACCELERATOR = rf"\s*(?:{ACCELERATOR_NAME}|{_MEMORY})\s*(?::\s*{_COUNT}\s*)?"
_PRODUCT_WORDS = r"(?i)(?:\b(?:nvidia|amd|tesla|geforce|instinct) | (?:hbm|sxm|pcie)[0-9a-z]*(?![0-9a-z]))"
EXAMPLE_ACCELERATORS = ("H100:8", "H200:8", "A100:8", "A100-80GB:8", "L4:1", "T4:1", "B200:8", "80GB+:1")


class Port(Scalar):
    """`8080`, `8000-8010`, or several separated by commas, as text without spaces."""

    expected = "like `8080` or `8000-8010`"
    _port = "(?:[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"

    def parse(self, marked: Marked) -> str | None:
        value = marked.value
        text = str(value) if not isinstance(value, (bool, float)) else ""
        parts = [each.strip() for each in text.split(",")]
        for part in parts:
            if not re.fullmatch(rf"{self._port}(?:-{self._port})?", part):
                return None
            bounds = [int(each) for each in part.split("-")]
            if bounds != sorted(bounds):
                return None
        return ",".join(parts)

    def hint(self, marked: Marked) -> str | None:
        if ":" in str(marked.value):
            return "write the port of the node alone; ports are not mapped to others"
        first, _, last = str(marked.value).partition("-")
        is_turned = first.isdigit() and last.isdigit() and int(first) > int(last)
        return f"write the lower port first: `{last}-{first}`" if is_turned else "ports are 1 to 65535"

    def admits_kind(self, value: Any) -> bool:
        return isinstance(value, (str, int)) and not isinstance(value, bool)

    def describe(self) -> Schema:
        port = rf"\s*{self._port}(?:-{self._port})?\s*"
        return {
            "anyOf": [
                {"type": "integer", "minimum": 1, "maximum": 65535},
                {"type": "string", "pattern": f"^{port}(?:,{port})*$"},
            ]
        }


_OFF = Whole(minimum=-1_000_000, maximum=-1)  # minutes that disable `autostop`, as on SkyPilot's command line


class Named(Text):
    """`H100:8`."""

    def __init__(self) -> None:
        super().__init__(pattern=ACCELERATOR, expected="like `H100:8`")

    def hint(self, marked: Marked) -> str | None:
        if isinstance(marked.value, str) and marked.value.strip()[:1] in ("{", "["):
            return "remove the quotes around the alternatives"
        if isinstance(marked.value, str) and re.fullmatch(r"\s*|.*:\s*0+(?:\.0*)?", marked.value):
            return "for a machine without accelerators, remove `accelerators`"
        text = str(marked.value).strip()
        if found := re.fullmatch(rf"([1-9][0-9]{{0,3}})\s*[xX]\s*({ACCELERATOR_NAME})", text):
            return f"write the name first: `{found[2]}:{found[1]}`"
        if found := re.fullmatch(rf"({ACCELERATOR_NAME})\s+[xX]?\s*([1-9]|1[0-6])", text):
            return f"put a colon between name and count: `{found[1]}:{found[2]}`"
        if len(parts := [each.strip() for each in re.split(r"[,|/]| or ", text)]) > 1 and all(
            re.fullmatch(ACCELERATOR, each) for each in parts
        ):
            several = ", ".join(parts)
            return (
                f"in the task file, write `{{{several}}}` if any of them will do, or `[{several}]` to try them in order"
            )
        return self._suggest_joined(text) or super().hint(marked)

    def _suggest_joined(self, text: str) -> str | None:
        """Return a hint for a product's name: `NVIDIA A100 80GB` is `A100-80GB`, and `RTX 4090` is `RTX4090`."""
        joined = re.sub(_PRODUCT_WORDS, "", text).strip().replace(" :", ":")
        joined = re.sub(r" (?=[0-9]+(?![0-9gG]))", "", joined)
        joined = re.sub(r" (?=[0-9]+[gG][bB]|[aA][dD][aA]$)", "-", joined)
        return f"write `{joined}`" if joined != text and re.fullmatch(ACCELERATOR, joined) else None


_NAMED = Named()
_COUNTED = MapOf(value=Number(at_most=10_000), key=ACCELERATOR, key_expected="like `H100` or `H100:8`", has_null=True)
_ACCELERATORS = Either(
    shapes=(
        _NAMED,
        _COUNTED,
        ListOf(item=Either(shapes=(_NAMED, _COUNTED)), count_min=1),
    )
)


def _has_none(clouds: Sequence[str], message: str, **more: Any) -> dict[str, Later]:
    """Return a value for `at`: clouds on which the field has no effect."""
    return {cloud: Later(message=message, blocks_launch=False, **more) for cloud in clouds}


_NOT_YET_DISK = "selecting local disks is not supported"

AUTOSTOP = Table(
    name="autostop",
    about="Stopping an idle cluster.",
    fields={
        "idle_minutes": Field(shape=Whole(maximum=1_000_000), about="Idle minutes before stopping (default: 5)."),
        "down": Field(shape=Flag(), about="Terminate the cluster instead of stopping it."),
        "wait_for": Field(
            shape=Choice(words=("jobs_and_ssh", "jobs", "none")),
            about="Activity that resets the idle timer.",
            later=Later(
                message="only runs count as activity, not SSH sessions", blocks_launch=False,
                applies=lambda value: value != "jobs",
            ),
        ),
        "hook": Field(
            shape=Text(), about="Command to run before stopping.",
            later=Later(message="autostop hooks are not supported", hint="move the command to the end of `run`"),
        ),
        "hook_timeout": Field(shape=Whole(minimum=1), about="Timeout of `hook` in seconds."),
    },
)  # fmt: skip

_TPU = {
    "runtime_version": Field(shape=Text(), about="TPU software version."),
    "tpu_name": Field(shape=Text(), about="TPU name."),
    "tpu_vm": Field(shape=Flag(), about="TPU VM (default) or TPU node."),
    "gcp_queued_resource": Field(shape=Flag(), about="Wait in GCP's queue for the TPU."),
}
ACCELERATOR_ARGS = Table(name="accelerator_args", about="TPU options.", fields=_TPU)


_CLOUD = CloudName(words=CLOUDS)
_PLACE = PlaceName()
_IMAGE = Text(rule=allowed.IMAGE)

PRIORITIES = {"low": -100, "normal": 0, "high": 100}
ONE: dict[str, Field] = {
    "infra": Field(
        shape=Infra(), examples=("aws", "gcp/us-central1", "aws/us-east-1/us-east-1a", "*/*/us-east-1a"),
        about="Location, CLOUD[/REGION[/ZONE]]; `*` matches any.",
    ),
    "cloud": Field(shape=_CLOUD, about="Cloud; prefer `infra`."),
    "region": Field(shape=_PLACE, is_blank_none=True, about="Region; prefer `infra`."),
    "zone": Field(shape=_PLACE, is_blank_none=True, about="Zone; prefer `infra`."),
    "accelerators": Field(
        shape=_ACCELERATORS,
        examples=EXAMPLE_ACCELERATORS,
        about="NAME[:COUNT] per node; `{A100:8, H100:8}` allows either, `[H100:8, A100:8]` is tried in this order, "
        "`80GB+:8` matches any accelerator with at least that much memory. `T4:0.5` is a fraction of an accelerator, "
        "which several runs on a cluster share.",
    ),
    "gpus": Field(shape=_ACCELERATORS, alias_of="accelerators", about="Alias of `accelerators`."),
    "accelerator_args": Field(
        shape=ACCELERATOR_ARGS,
        about="TPU options. **Not launched,** unless they are SkyPilot's defaults: `tpu_vm: true`, and the "
        "`runtime_version` of the TPU's generation.",
    ),
    "cpus": Field(
        shape=Count(),
        examples=("4", "4+", "16+"),
        about="vCPUs per node: `4` exactly (on own machines: at least), `4+` at least.",
    ),
    "memory": Field(
        shape=MemorySize(),
        examples=("32+", "64GB+", "128"),
        about="Memory per node in GiB: `32` exactly (on own machines: at least), `32+` at least, `4x` at least 4 GiB "
        "per vCPU. Default without accelerators: at least 4 GiB.",
    ),
    "instance_type": Field(
        shape=Text(rule=allowed.INSTANCE_TYPE), is_blank_none=True, about="Instance type of the cloud."
    ),
    "use_spot": Field(
        shape=Flag(), examples=(True,),
        about="Use spot or on-demand instances (default: both if the task has a `goal`).",
    ),
    "disk_size": Field(
        shape=Size(), about="Size of the root disk in GiB (default: 256).", examples=("256GB", "1TB"),
        at={
            **_has_none(("local", "slurm", "ssh"), "the existing disk is used"),
            **_has_none(("kubernetes",), "the node's disk is used, and a pod requests at most its share of it"),
        },
    ),
    "ephemeral_storage": Field(shape=Size(), alias_of="disk_size", about="Deprecated name of `disk_size`."),
    "disk_tier": Field(
        shape=Choice(words=("low", "medium", "high", "ultra", "best", "none")), about="Performance of the root disk.",
        at=_has_none(("local",), "the existing disk is used", applies=lambda value: value != "none"),
    ),
    "network_tier": Field(
        shape=Choice(words=("standard", "best")),
        about="Network performance between nodes; `best` is EFA on AWS and Tier_1 on GCP, where supported.",
        at=_has_none(("local",), "nodes share this machine", applies=lambda value: value == "best"),
    ),
    "local_disk": Field(
        shape=Either(
            shapes=(
                Text(
                    pattern=r"(?:[nN][vV][mM][eE]|[sS][sS][dD])(?::[0-9]{1,9}\+?)?|[0-9]{1,9}\+?",
                    expected="like `nvme:1000+`",
                ),
                Whole(minimum=1),
            )
        ),
        about="Local disks of the machine, in GB.", examples=("nvme:1000+", "ssd"),
        later=Later(message=_NOT_YET_DISK, hint="choose an `instance_type` with local disks, and remove `local_disk`"),
    ),
    "max_hourly_cost": Field(shape=Number(), about="Maximum price per node, in USD per hour."),
    "ports": Field(
        shape=Either(shapes=(Port(), ListOf(item=Port()))), examples=(8080, "8000-8010"), is_blank_none=True,
        about="Ports to open to the internet.",
        at=_has_none(("local",), "programs listen on this machine"),
    ),
    "image_id": Field(
        shape=Either(shapes=(_IMAGE, MapOf(value=_IMAGE, key=allowed.PLACE))), is_blank_none=True,
        about="Machine image, `docker:IMAGE`, or a mapping from region to image (only those regions are used).",
    ),
    "labels": Field(
        shape=MapOf(value=Text(rule=allowed.LABEL_VALUE, also_scalar=True), key=allowed.LABEL_KEY),
        about="Tags for all created resources.",
        at=_has_none(("local",), "local nodes have no tags"),
    ),
    "autostop": Field(
        shape=Either(
            shapes=(Flag(), Duration(bare_unit="m", is_zero_ok=True, off="false"), _OFF, AUTOSTOP)
        ),
        about="Stop an idle cluster: `true` (5 minutes), minutes, `10m`, or a mapping.", examples=(True, "10m"),
    ),
    "job_recovery": Field(
        shape=Either(shapes=(Choice(words=STRATEGY_WORDS), JOB_RECOVERY)), is_blank_none=True,
        about="Recovery of managed jobs: a strategy, or a mapping.",
    ),
    "spot_recovery": Field(
        shape=Choice(words=STRATEGY_WORDS), alias_of="job_recovery", about="Deprecated name of `job_recovery`."
    ),
    "volumes": Field(
        shape=ListOf(item=Anything()), about="Disks to attach (older SkyPilot).",
        later=Later(message="attaching disks is not supported", hint="use `disk_size`, or store the data in a bucket"),
    ),
    "priority": Field(
        shape=Either(shapes=(Whole(minimum=-1000, maximum=1000), Choice(words=tuple(PRIORITIES)))),
        about="Priority of a managed job: -1000 to 1000, or `low`, `normal`, `high`; requires `max_live_jobs`.",
    ),
    "priority_class": Field(
        shape=Text(), about="Kueue priority class.",
        later=Later(message="set `priority` instead", blocks_launch=False),
    ),
    "_no_missing_accel_warnings": Field(shape=Flag(), about="Internal to SkyPilot; no effect."),
    "_docker_login_config": Field(shape=MapOf(value=Text()), about="Internal to SkyPilot; no effect."),
    "_is_image_managed": Field(shape=Flag(), about="Internal to SkyPilot; no effect."),
    "_requires_fuse": Field(shape=Flag(), about="Internal to SkyPilot; no effect."),
    "_cluster_config_overrides": Field(shape=MapOf(value=Anything()), about="Internal to SkyPilot; no effect."),
}  # fmt: skip
_PLACES = tuple(("infra", name, "keep `infra`") for name in ("cloud", "region", "zone"))

_RETIRED = {
    "hooks": "move them to `config: hooks:` of the task",
    "termination_hook": "move it to `config: hooks:` of the task",
    "preemption": "move its hook to `config: hooks:` of the task",
    "auto_restart": "use `job_recovery: {max_restarts_on_errors: N}`",
    "disk": "use `disk_size`",
    "spot": "use `use_spot: true`",
    **dict.fromkeys(("gpu", "num_gpus", "gres"), "use `accelerators: NAME:COUNT`"),
    **dict.fromkeys(("cpu", "vcpus", "num_cpus", "cpus_per_task"), "use `cpus`"),
    **dict.fromkeys(("mem", "ram", "memory_gb"), "use `memory`"),
    **dict.fromkeys(("disk_gb", "storage"), "use `disk_size`"),
    **dict.fromkeys(("preemptible", "spot_policy"), "use `use_spot: true`"),
    **dict.fromkeys(
        ("regions", "backends", "clouds"), "write each one as an alternative: `any_of: [{infra: ...}, ...]`"
    ),
    "max_price": "use `max_hourly_cost`",
    "shm_size": "remove it: a container has the node's shared memory",
    "partition": "write `infra: slurm/CLUSTER/PARTITION`",
    "container_image": "use `image_id: docker:IMAGE`",
}
_ELSEWHERE = {
    **dict.fromkeys(
        ("name", "num_nodes", "workdir", "setup", "run", "envs", "secrets", "file_mounts", "service", "pool", "config"),
        "move it out of `resources`, to the task itself",
    ),
    **dict.fromkeys(JOB_RECOVERY.fields, "move it to `job_recovery`"),
    **dict.fromkeys(("idle_minutes", "down", "wait_for"), "move it to `autostop`"),
}


class Requirements(Table):
    """Resources; a cloud in place of the mapping was meant as its `infra`."""

    def _hint(self, marked: Marked) -> str | None:
        is_place = isinstance(marked.value, str) and Infra().parse(marked)
        return f"write `infra: {marked.value}`" if is_place else super()._hint(marked)


ALTERNATIVE = Requirements(
    name="alternative",
    about="An alternative set of resources.",
    fields=ONE,
    bare="accelerators",
    exclusive=_PLACES,
    retired=_RETIRED,
    elsewhere=_ELSEWHERE,
)


def _list_all() -> dict[str, Field]:
    several: Shape = ListOf(item=ALTERNATIVE)
    return {
        **ONE,
        "any_of": Field(shape=several, about="Alternatives: the cheapest wins. Each inherits the fields outside."),
        "ordered": Field(shape=several, about="Alternatives in order of preference."),
    }


RESOURCES = Requirements(
    name="resources",
    about="Resources per node.",
    fields=_list_all(),
    bare="accelerators",
    exclusive=(*_PLACES, ("any_of", "ordered", "keep only one of them")),
    retired=_RETIRED,
    elsewhere=_ELSEWHERE,
)
