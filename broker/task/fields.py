"""The fields of a task: SkyPilot 0.14's, and ours on top (`goal`, `checkpoint`, `unattended`, `needs`).

This table is what the loader reads by and what `broker schema` prints.
"""

from __future__ import annotations

from broker.config import CHECKPOINT_URL
from broker.task import allowed
from broker.task.fields_resources import ACCELERATOR_NAME, RESOURCES
from broker.task.fields_service import POOL, SERVICE
from broker.task.measures import Duration, Size
from broker.task.shapes import Anything, Choice, Either, Flag, ListOf, MapOf, Number, Text, Whole
from broker.task.tables import Field, Later, Table

_NAME = Text(rule=allowed.TASK_NAME)
_SOURCE = Text(rule=allowed.SOURCE)
_SECRET_NAME = rf"(?:secrets:)?{allowed.ENV_NAME.pattern}"
STORES = ("s3", "gcs", "azure", "r2", "ibm", "oci", "nebius", "coreweave", "vastdata", "hf", "volume")
BUCKET_SCHEMES = (
    "s3://", "gs://", "gcs://", "r2://", "https://", "http://", "az://", "cos://", "oci://", "nebius://", "cw://",
    "hf://", "vastdata://",
)  # fmt: skip

WORKDIR_GIT = Table(
    name="workdir_git",
    about="A git repository as the working folder.",
    fields={
        "url": Field(shape=Text(), about="The repository.", is_required=True),
        "ref": Field(shape=Text(also_scalar=True), about="A branch, tag or commit."),
    },
)
STORAGE_CONFIG = Table(
    name="storage_config",
    about="Options of a storage mount.",
    fields={
        "disk_size": Field(shape=Size(), about="A new volume's size."),
        "disk_tier": Field(shape=Text(), about="A new volume's tier."),
        "storage_type": Field(shape=Text(), about="`network` or `instance`."),
        "attach_mode": Field(shape=Text(), about="`read_write` or `read_only`."),
        "mount_cached": Field(shape=MapOf(value=Anything()), about="Options of the write-back cache."),
        "mount": Field(shape=MapOf(value=Anything()), about="Options of the mount."),
    },
)
STORAGE = Table(
    name="storage",
    about="A bucket that appears as a folder on every node.",
    fields={
        "name": Field(shape=Text(rule=allowed.BUCKET), about="The bucket's name; made when it does not exist."),
        "source": Field(
            shape=Either(shapes=(_SOURCE, ListOf(item=_SOURCE, count_min=1))),
            about="A bucket URL, or local paths to upload.",
            examples=("s3://bucket/folder",),
        ),
        "store": Field(shape=Choice(words=STORES), about="Where the bucket is."),
        "persistent": Field(shape=Flag(), about="Keep the bucket when the cluster goes down; true."),
        "mode": Field(
            shape=Choice(words=("MOUNT", "COPY", "MOUNT_CACHED")),
            about="Read and write in place, copy before the run, or write back in the background.",
        ),
        "type": Field(
            shape=Choice(words=("MODEL_CHECKPOINT_RO", "MODEL_CHECKPOINT_RW", "DATASET_RO", "DATASET_RW")),
            about="A preset for what the data is.",
        ),
        "config": Field(shape=STORAGE_CONFIG, about="Options."),
        "_is_sky_managed": Field(shape=Flag(), about="SkyPilot's own; it has no effect here."),
        "_bucket_sub_path": Field(shape=Text(), about="SkyPilot's own; it has no effect here."),
        "_force_delete": Field(shape=Flag(), about="SkyPilot's own; it has no effect here."),
    },
)

_MEASURED_ON = rf"{ACCELERATOR_NAME}(?::[0-9]{{1,5}}(?:\.[0-9]{{1,4}})?)?"

WORK = Table(
    name="work",
    about="The time that the task needs without faults.",
    fields={
        "hours": Field(
            shape=Duration(bare_unit="h"), about="A bare number is hours.", is_required=True, examples=("100h",)
        ),
        "on": Field(
            shape=Text(pattern=_MEASURED_ON, expected="like `A100:8`"),
            about="Measured on so many of this accelerator in all; other ones are scaled.",
        ),
    },
)
GOAL = Table(
    name="goal",
    about="What finishing means; with it broker ranks by the expected cost to finish.",
    fields={
        "work": Field(
            shape=Either(shapes=(Duration(bare_unit="h"), WORK)), about="How long the task runs without faults.",
            examples=("100h",),
        ),
        "throughput": Field(
            shape=MapOf(
                value=Number(), key=_MEASURED_ON, key_expected="accelerators like `H100:8`"
            ),
            about="Tokens or samples a second that you measured, by accelerators in all.",
            examples=({"H100:8": 31000, "A100:8": 12500},),
        ),
        "deadline": Field(shape=Duration(bare_unit="h"), about="Finish within.", examples=("48h", "6d")),
        "budget": Field(shape=Number(), about="Spend at most so much, USD."),
        "confidence": Field(shape=Number(at_most=0.9999), about="The chance to meet the deadline; 0.9."),
    },
)  # fmt: skip
CHECKPOINT = Table(
    name="checkpoint",
    about="What a checkpoint costs, and where it goes.",
    fields={
        "to": Field(
            shape=Text(
                pattern=rf"(?!.*[\x00-\x1f\x7f]){CHECKPOINT_URL}",
                expected="a bucket like `s3://BUCKET/FOLDER`, or an absolute folder",
            ),
            about="Bucket, or shared folder, that outlives the nodes; each job has a folder of its own there.",
            examples=("s3://my-bucket/checkpoints",),
        ),
        "every": Field(shape=Duration(bare_unit="s"), about="Not said: the interval that costs least."),
        "stall": Field(shape=Duration(bare_unit="s", is_zero_ok=True), about="How long one stops the training; 5s."),
        "restart": Field(shape=Duration(bare_unit="s", is_zero_ok=True), about="From new nodes to training; 5m."),
        "size": Field(shape=Size(), about="Size of one.", examples=("120GB",)),
    },
)

HOOK = Table(
    name="hook",
    about="A command at the end of a cluster's life.",
    fields={
        "run": Field(shape=Text(), about="The command.", is_required=True),
        "events": Field(shape=ListOf(item=Choice(words=("stop", "preemption", "down"))), about="When to run it."),
        "timeout": Field(shape=Whole(minimum=1), about="Seconds that it may take."),
    },
)
_SECTION = MapOf(value=Anything())


def _ignored(cloud: str) -> Later:
    """What SkyPilot runs takes its settings from SkyPilot's own file."""
    return Later(
        message=f"settings of {cloud} have no effect here",
        hint="write them to `~/.sky/config.yaml`",
        blocks_launch=False,
    )


CONFIG = Table(
    name="config",
    about="SkyPilot's settings for this task.",
    fields={
        "docker": Field(
            shape=_SECTION, about="`run_options` of the container.",
            later=Later(message="containers are not started", hint="install what you need in `setup`"),
        ),
        "nvidia_gpus": Field(
            shape=_SECTION, about="`disable_ecc`.", later=Later(message="ECC is left as it is", blocks_launch=False)
        ),
        "gcp": Field(
            shape=_SECTION, about="Networks, instance groups and placement.",
            later=Later(message="GCP settings are not passed on", hint="remove `gcp` to use the defaults"),
        ),
        "azure": Field(
            shape=_SECTION, about="Networks and identity.",
            later=Later(message="Azure settings are not passed on", hint="remove `azure` to use the defaults"),
        ),
        "kubernetes": Field(shape=_SECTION, about="Pods.", later=_ignored("Kubernetes")),
        "ssh": Field(shape=_SECTION, about="Machines of your own.", later=_ignored("machines of your own")),
        "slurm": Field(shape=_SECTION, about="Slurm.", later=_ignored("Slurm")),
        "vast": Field(shape=_SECTION, about="Vast.", later=_ignored("Vast")),
        "active_workspace": Field(
            shape=Text(), about="A workspace of SkyPilot's server.",
            later=Later(message="there are no workspaces", blocks_launch=False),
        ),
        "hooks": Field(
            shape=ListOf(item=HOOK), about="Commands at the end of a cluster's life.",
            later=Later(message="hooks are not run", hint="save what matters in `run`, on SIGTERM"),
        ),
    },
)  # fmt: skip

NEEDS = Field(
    shape=Either(shapes=(Text(), ListOf(item=Text()), MapOf(value=Size(), has_null=True))),
    about="Tasks of this file that must finish first: names, or a mapping from name to the data taken over.",
    examples=("prepare", ["prepare"], {"prepare": "120GB"}),
)
_SIZES = MapOf(value=Size(), key=allowed.DATA_URL)

TASK = Table(
    name="task",
    about="A task: what to run, and what it needs.",
    fields={
        "name": Field(shape=_NAME, about="The task's name."),
        "resources": Field(shape=RESOURCES, about="What one node needs."),
        "num_nodes": Field(shape=Whole(minimum=1, maximum=100_000), about="How many equal nodes; 1."),
        "workdir": Field(
            shape=Either(shapes=(_SOURCE, WORKDIR_GIT)), examples=(".",),
            about="A local folder that every node gets as its working folder, or a git repository.",
        ),
        "setup": Field(shape=Text(rule=allowed.SCRIPT), about="Commands before `run`, on every node."),
        "run": Field(shape=Text(rule=allowed.SCRIPT), about="The program, on every node."),
        "envs": Field(
            shape=MapOf(
                value=Text(rule=allowed.ENV_VALUE, also_scalar=True, is_hidden=True), key=allowed.ENV_NAME,
                has_null=True,
            ),
            about="Environment variables; one without a value must be given with `--env`.",
        ),
        "secrets": Field(
            shape=Either(
                shapes=(
                    MapOf(
                        value=Text(rule=allowed.ENV_VALUE, also_scalar=True, is_hidden=True), key=_SECRET_NAME,
                        key_expected=allowed.ENV_NAME.expected, has_null=True,
                    ),
                    ListOf(
                        item=Text(pattern=f"secrets:{allowed.ENV_NAME.pattern}", expected="like `secrets:HF_TOKEN`")
                    ),
                )
            ),
            about="As `envs`, and never shown; one without a value must be given with `--secret`.",
        ),
        "file_mounts": Field(
            shape=MapOf(value=Either(shapes=(_SOURCE, STORAGE)), key=allowed.TARGET),
            about="Path on the node -> local path, bucket URL, or a storage mount.",
        ),
        "inputs": Field(shape=_SIZES, about="URL -> size of data that is read; moving it counts in the plan."),
        "outputs": Field(shape=_SIZES, about="URL -> size of data that is written; moving it counts in the plan."),
        "goal": Field(shape=GOAL, about="What finishing means (broker only)."),
        "checkpoint": Field(shape=CHECKPOINT, about="What a checkpoint costs, and where it goes (broker only)."),
        "unattended": Field(
            shape=Duration(bare_unit="h"),
            about="How long a managed job continues while the machine that launched it is away, at most what budget "
            "and deadline leave; at least 15m; 12h (broker only).",
            examples=("12h",),
        ),
        "needs": NEEDS,
        "service": Field(
            shape=SERVICE, about="Serve the task behind a load balancer.",
            later=Later(
                message="serving is not supported; the plan is for one replica",
                hint="remove `service` to run one replica as a cluster", applies=lambda value: True,
            ),
        ),
        "pool": Field(
            shape=POOL, about="A pool of workers for managed jobs.",
            later=Later(
                message="worker pools are not supported; the plan is for one worker",
                hint="remove `pool`, and launch one managed job a worker", applies=lambda value: True,
            ),
        ),
        "config": Field(shape=CONFIG, about="SkyPilot's settings for this task."),
        "volumes": Field(
            shape=MapOf(
                value=Either(shapes=(Text(rule=allowed.VOLUME_NAME), MapOf(value=Anything()))), key=allowed.TARGET,
            ),
            about="Path -> volume.",
            later=Later(message="volumes are not mounted", hint="copy the data with `file_mounts`"),
        ),
        "volume_mounts": Field(
            shape=ListOf(item=MapOf(value=Anything())), about="SkyPilot's own form of `volumes`.",
            later=Later(message="volumes are not mounted", hint="copy the data with `file_mounts`"),
        ),
        "managed_secrets": Field(
            shape=ListOf(item=Either(shapes=(Text(), MapOf(value=MapOf(value=Text()))))),
            about="Secrets kept by SkyPilot's server.",
            later=Later(message="no server keeps secrets", hint="write `secrets:` and pass `--secret NAME=...`"),
        ),
        "event_callback": Field(
            shape=Text(), about="A command on every change of a managed job.",
            later=Later(
                message="no command is run on a job's changes", hint="`broker jobs events` lists them",
                blocks_launch=False,
            ),
        ),
        "api_server_access": Field(
            shape=Flag(), about="Whether the task may use SkyPilot's server.",
            later=Later(message="there is no server to reach", blocks_launch=False),
        ),
        "experimental": Field(
            shape=MapOf(value=Anything()), about="An old name of `config`.",
            later=Later(message="`experimental` is not read", hint="write its `config_overrides` as `config`"),
        ),
        "file_mounts_mapping": Field(shape=MapOf(value=Anything()), about="SkyPilot's own; it has no effect here."),
        "_metadata": Field(shape=MapOf(value=Anything()), about="SkyPilot's own; it has no effect here."),
    },
    exclusive=(("service", "pool", "keep one of them"),),
    retired={
        "env": "write `envs`",
        "environment": "write `envs`",
        "command": "write `run`",
        "priority": "write it under `resources`",
        "storage": "write storage mounts under `file_mounts`",
        "depends_on": "write `needs`",
    },
)  # fmt: skip

HEADER = Table(
    name="header",
    about="The first document of a pipeline or job group.",
    fields={
        "name": Field(shape=_NAME, about="The whole's name."),
        "execution": Field(
            shape=Choice(words=("serial", "parallel")), about="One after the other (the default), or all at once."
        ),
        "primary_tasks": Field(shape=ListOf(item=Text()), about="The group ends when these do."),
        "termination_delay": Field(
            shape=Either(shapes=(Duration(bare_unit="s", is_zero_ok=True), MapOf(value=Duration(bare_unit="s")))),
            about="How long the others may go on.",
        ),
        "inter_connection": Field(shape=Anything(), about="How tasks of a group reach each other."),
    },
)
