"""The fields of a task: those of SkyPilot 0.14, and broker's extensions (`goal`, `notify` and others).

The loader and `broker schema` read this table.
"""

from __future__ import annotations

from broker.config import CHECKPOINT_URL
from broker.task import allowed
from broker.task.environment import EnvValue
from broker.task.fields_config import CONFIG
from broker.task.fields_notify import NOTIFY
from broker.task.fields_resources import ACCELERATOR_NAME, RESOURCES
from broker.task.fields_schedule import SCHEDULE_SHAPE
from broker.task.fields_service import POOL, SERVICE
from broker.task.fields_storage import SOURCE, STORAGE
from broker.task.measures import NUM_NODES_MAX, Duration, Size
from broker.task.shapes import Anything, Choice, Either, Flag, ListOf, MapOf, Number, Text, Whole
from broker.task.tables import Field, Later, Table

_NAME = Text(rule=allowed.TASK_NAME, also_scalar=True)
SECRET_SCOPES = ("personal.", "workspace.", "global.")  # scopes of a server's secrets
_SCOPED = rf"(?:(?:personal|workspace|global)\.)?{allowed.ENV_NAME.pattern}"
_SECRET_NAME = rf"(?:secrets:)?{_SCOPED}"
WORKDIR_GIT = Table(
    name="workdir_git",
    about="A git repository as the working directory.",
    fields={
        "url": Field(shape=Text(rule=allowed.GIT_URL), about="Repository URL.", is_required=True),
        "ref": Field(shape=Text(rule=allowed.GIT_REF, also_scalar=True), about="Branch, tag or commit."),
    },
)
_MEASURED_ON = rf"{ACCELERATOR_NAME}(?::[0-9]{{1,5}}(?:\.[0-9]{{1,4}})?)?"

WORK = Table(
    name="work",
    about="Time that the task takes without failures.",
    fields={
        "hours": Field(
            shape=Duration(bare_unit="h"),
            about="Duration; a bare number is hours.",
            is_required=True,
            examples=("100h",),
        ),
        "on": Field(
            shape=Text(pattern=_MEASURED_ON, expected="like `A100:8`"),
            about="Total accelerators on which the time was measured; times on others are scaled.",
        ),
    },
)
GOAL = Table(
    name="goal",
    bare="work",
    about="Definition of done; with it, broker ranks placements by the expected cost to finish.",
    fields={
        "work": Field(
            shape=Either(shapes=(Duration(bare_unit="h"), WORK)), about="How long the task takes without failures.",
            examples=("100h",),
        ),
        "throughput": Field(
            shape=MapOf(
                value=Number(), key=_MEASURED_ON, key_expected="accelerators like `H100:8`"
            ),
            about="Measured tokens or samples per second, by total accelerators.",
            examples=({"H100:8": 31000, "A100:8": 12500},),
        ),
        "deadline": Field(shape=Duration(bare_unit="h"), about="Finish within this time.", examples=("48h", "6d")),
        "budget": Field(
            shape=Number(),
            about="Maximum total cost, in USD; plans respect it, and a managed job ends when it is used up.",
            examples=(5000,),
        ),
        "hour_value": Field(
            shape=Number(above=None),
            about="Value of finishing one hour earlier, in USD (default: 2 % of the gang's on-demand price per hour).",
            examples=(2.5,),
        ),
        "confidence": Field(
            shape=Number(at_most=0.9999),
            about="Required probability of meeting the deadline (default: 0.9).",
            examples=(0.9,),
        ),
    },
)  # fmt: skip
CHECKPOINT = Table(
    name="checkpoint",
    bare="to",
    about="Cost and location of checkpoints.",
    fields={
        "to": Field(
            shape=Text(
                pattern=rf"(?!.*[\x00-\x1f\x7f]){CHECKPOINT_URL}",
                expected="a bucket like `s3://BUCKET/FOLDER`, or an absolute folder",
            ),
            about="Bucket or shared folder that outlives the nodes; each job gets its own folder there.",
            examples=("s3://my-bucket/checkpoints",),
        ),
        "every": Field(
            shape=Duration(bare_unit="s"),
            about="Checkpoint interval (default: the one with the lowest cost).",
            examples=("10m",),
        ),
        "stall": Field(
            shape=Duration(bare_unit="s", is_zero_ok=True), about="How long a checkpoint stops training (default: 5s)."
        ),
        "restart": Field(
            shape=Duration(bare_unit="s", is_zero_ok=True),
            about="Time until training continues on new nodes (default: 5m).",
        ),
        "size": Field(shape=Size(), about="Size of a checkpoint.", examples=("120GB",)),
        "same_ranks": Field(
            shape=Flag(),
            about="The program only resumes on the number of accelerators that wrote the checkpoint (default: false).",
        ),
    },
)

NEEDS = Field(
    shape=Either(shapes=(Text(), ListOf(item=Text()), MapOf(value=Size(), has_null=True))),
    about="Tasks of this file that must finish first: names, or a mapping from name to the size of data passed on.",
    examples=("prepare", ["prepare"], {"prepare": "120GB"}),
)
JOB = Table(
    name="job",
    about="SkyPilot's limits of a managed job.",
    fields={
        "wait_for_scheduling_timeout": Field(
            shape=Duration(bare_unit="s"),
            about="Maximum time until the job runs.",
            later=Later(
                message="a job waits for machines without a time limit",
                hint="cancel it with `broker jobs cancel`; `max_duration` limits the time after its first machines",
                blocks_launch=False,
            ),
        ),
    },
)
_SIZES = MapOf(value=Size(), key=allowed.DATA_URL)

TASK = Table(
    name="task",
    about="A task: what to run, and the resources it requires.",
    fields={
        "name": Field(shape=_NAME, is_blank_none=True, about="Task name."),
        "resources": Field(shape=RESOURCES, about="Resources per node."),
        "num_nodes": Field(
            shape=Whole(minimum=1, maximum=NUM_NODES_MAX),
            examples=(2,),
            about="Number of identical nodes (default: 1).",
        ),
        "workdir": Field(
            shape=Either(shapes=(SOURCE, WORKDIR_GIT)), examples=(".",),
            about="Local folder to upload as the working directory of every node, or a git repository, which is cloned "
            "on this machine at one commit and uploaded with its `.git`.",
        ),
        "setup": Field(shape=Text(rule=allowed.SCRIPT), about="Commands to run before `run`, on every node."),
        "run": Field(shape=Text(rule=allowed.SCRIPT), about="Program to run on every node."),
        "envs": Field(
            shape=MapOf(
                value=EnvValue(), key=allowed.ENV_NAME, has_null=True,
            ),
            about="Environment variables; pass those without a value with `--env`. As in SkyPilot, `true` becomes "
            "`True` and `1.10` becomes `1.1`; put a value in quotes to keep it as written.",
        ),
        "secrets": Field(
            shape=Either(
                shapes=(
                    MapOf(
                        value=EnvValue(), key=_SECRET_NAME,
                        key_expected=allowed.ENV_NAME.expected, has_null=True,
                    ),
                    ListOf(
                        item=Text(
                            pattern=f"secrets:{_SCOPED}",
                            expected="like `secrets:HF_TOKEN`, or a mapping from names to values",
                        )
                    ),
                )
            ),
            about="Like `envs`, but never shown; pass those without a value with `--secret`.",
        ),
        "file_mounts": Field(
            shape=MapOf(value=Either(shapes=(SOURCE, STORAGE)), key=allowed.TARGET),
            about="Path on the node -> local path, bucket URL, or storage mount.",
        ),
        "inputs": Field(shape=_SIZES, about="URL -> size of data to read; plans include the transfer cost."),
        "outputs": Field(shape=_SIZES, about="URL -> size of data to write; plans include the transfer cost."),
        "goal": Field(shape=GOAL, about="Definition of done (broker extension)."),
        "checkpoint": Field(shape=CHECKPOINT, about="Cost and location of checkpoints (broker extension)."),
        "unattended": Field(
            shape=Duration(bare_unit="h"),
            about="How long a managed job continues without the machine that launched it, limited by budget and "
            "deadline; at least 15m (default: 12h; broker extension).",
            examples=("12h",),
        ),
        "max_duration": Field(
            shape=Either(shapes=(Duration(bare_unit="s"), Choice(words=("off",)))),
            about="Maximum time of a managed job from its first machines to its end, including recoveries; at least "
            "1m; a bare number is seconds, as in dstack (default: off; broker extension).",
            examples=("6h",),
        ),
        "needs": NEEDS,
        "on_loss": Field(
            shape=Choice(words=("keep-going", "restart-group")),
            about="In a job group, whether the other tasks restart when this one is lost (broker extension). Default: "
            "`restart-group` if another task reads this task's addresses from variables, otherwise `keep-going`.",
        ),
        "service": Field(
            shape=SERVICE, about="Serve the task behind a load balancer (`broker serve up`).",
            later=Later(
                message="a service is neither a cluster nor a managed job; the plan is for one replica",
                hint="serve it with `broker serve up`, or remove `service` to run one replica as a cluster",
                applies=lambda value: True,
            ),
        ),
        "pool": Field(
            shape=POOL, about="A pool of workers for managed jobs.",
            later=Later(
                message="worker pools are not supported; the plan is for one worker",
                hint="remove `pool`, and launch one managed job per worker", applies=lambda value: True,
            ),
        ),
        "job": Field(shape=JOB, about="SkyPilot's limits of a managed job."),
        "config": Field(shape=CONFIG, about="SkyPilot's settings for this task."),
        "volumes": Field(
            shape=MapOf(
                value=Either(shapes=(Text(rule=allowed.VOLUME_NAME), MapOf(value=Anything()))), key=allowed.TARGET,
            ),
            about="Path on the node -> volume.",
            later=Later(message="volumes are not supported", hint="copy the data with `file_mounts`"),
        ),
        "volume_mounts": Field(
            shape=ListOf(item=MapOf(value=Anything())), about="SkyPilot's internal form of `volumes`.",
            later=Later(message="volumes are not supported", hint="copy the data with `file_mounts`"),
        ),
        "managed_secrets": Field(
            shape=ListOf(item=Either(shapes=(Text(), MapOf(value=MapOf(value=Text()))))),
            about="Secrets stored on the SkyPilot server.",
            later=Later(message="server secrets are not supported", hint="use `secrets:` and `--secret NAME=...`"),
        ),
        "event_callback": Field(
            shape=Text(rule=allowed.SCRIPT),
            about="Command that the daemon runs on its own machine whenever the status of a managed job changes.",
        ),
        "notify": Field(shape=NOTIFY, about="Notifications about a managed job (broker extension)."),
        "schedule": Field(
            shape=SCHEDULE_SHAPE, examples=("0 2 * * *",),
            about="Schedule on which `broker jobs launch` starts the task repeatedly: cron fields, or a mapping "
            "(broker extension).",
        ),
        "api_server_access": Field(
            shape=Flag(), about="Access of the task to the SkyPilot server.",
            later=Later(message="tasks have no access to the broker server", blocks_launch=False),
        ),
        "experimental": Field(
            shape=MapOf(value=Anything()), about="Deprecated name of `config`.",
            later=Later(message="`experimental` is not supported", hint="move its `config_overrides` to `config`"),
        ),
        "file_mounts_mapping": Field(shape=MapOf(value=Anything()), about="Internal to SkyPilot; no effect."),
        "_metadata": Field(shape=MapOf(value=Anything()), about="Internal to SkyPilot; no effect."),
    },
    exclusive=(("service", "pool", "keep only one of them"),),
    retired={
        "env": "use `envs`",
        "environment": "use `envs`",
        "command": "use `run`",
        "cmd": "use `run`",
        "commands": "use `run`, one text with a command on each line",
        "entrypoint": "use `run`",
        "image": "use `image_id: docker:IMAGE` in `resources`",
        "working_dir": "use `workdir`",
        "script": "use `run`",
        "tasks": "write each task as a document of its own, with `---` between them",
        **dict.fromkeys(
            ("max_retries", "retries", "retry", "restart"),
            "use `job_recovery: {max_restarts_on_errors: N}` in `resources`",
        ),
        **dict.fromkeys(("timeout", "run_timeout", "time", "time_limit", "walltime"), "use `max_duration`"),
        **dict.fromkeys(("gpu", "num_gpus", "gres"), "use `accelerators: NAME:COUNT` in `resources`"),
        **dict.fromkeys(("nodes", "nnodes", "node_count"), "use `num_nodes`"),
        **dict.fromkeys(
            ("nproc_per_node", "gpus_per_node"),
            "use `accelerators: NAME:COUNT` in `resources`; a program reads the count from "
            "`$SKYPILOT_NUM_GPUS_PER_NODE`",
        ),
        **dict.fromkeys(("mounts", "files"), "use `file_mounts`"),
        "cron": "use `schedule`",
        "args": "write them in `run`",
        "shm_size": "remove it: a container has the node's shared memory",
        "partition": "write `infra: slurm/CLUSTER/PARTITION` in `resources`",
        "priority": "move it to `resources`",
        "storage": "move storage mounts to `file_mounts`",
        "storage_mounts": "move storage mounts to `file_mounts`",
        "depends_on": "use `needs`",
    },
    elsewhere={
        **{key: "move it to `resources`" for key in RESOURCES.fields if key[0] != "_"},
        **dict.fromkeys(("replicas", "replica_policy", "readiness_probe"), "move it to `service`"),
        **dict.fromkeys(("hooks", "docker", "kubernetes"), "move it to `config`"),
        **dict.fromkeys(
            ("execution", "primary_tasks", "termination_delay", "inter_connection"),
            "move it to a header: a first document, with `---` between it and the tasks",
        ),
    },
)  # fmt: skip

_DELAY = Duration(bare_unit="s", is_zero_ok=True)
HEADER = Table(
    name="header",
    about="The first document of a pipeline or job group.",
    fields={
        "name": Field(shape=_NAME, about="Name of the pipeline or job group."),
        "execution": Field(
            shape=Choice(words=("serial", "parallel")), about="Run tasks in sequence (default) or in parallel."
        ),
        "primary_tasks": Field(shape=ListOf(item=Text()), about="The group ends when these tasks end (default: all)."),
        "termination_delay": Field(
            shape=Either(shapes=(_DELAY, MapOf(value=_DELAY))),
            about="How long the other tasks continue after that: a duration, or a mapping by task name (default: 0s).",
        ),
        "inter_connection": Field(
            shape=Flag(),
            about="Whether the tasks of a group exchange data; if so, they run in one region (default: true).",
        ),
        "placement": Field(
            shape=Text(),
            about="Where tasks of a group run (older SkyPilot).",
            later=Later(message="tasks of a group run in one region", blocks_launch=False),
        ),
    },
)
