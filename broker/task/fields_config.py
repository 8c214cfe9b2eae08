"""The fields of `config`: SkyPilot's settings for one task, most of which broker does not support."""

from __future__ import annotations

from broker.task.shapes import Anything, Choice, ListOf, MapOf, Text, Whole
from broker.task.tables import Field, Later, Table

HOOK = Table(
    name="hook",
    about="A command that runs when a cluster ends.",
    fields={
        "run": Field(shape=Text(), about="Command.", is_required=True),
        "events": Field(
            shape=ListOf(item=Choice(words=("stop", "preemption", "down"))), about="Events that run the command."
        ),
        "timeout": Field(shape=Whole(minimum=1), about="Timeout in seconds."),
    },
)
_SECTION = MapOf(value=Anything())


_POD_CONFIG = "pod_config"


def _ignored(cloud: str, file: str) -> Later:
    """Describe a cloud's settings that do not change the task; the pod's own settings are refused on Kubernetes."""
    return Later(
        message=f"{cloud} settings have no effect in a task",
        hint=f"write them to {file}; if SkyPilot starts the machines, to `~/.sky/config.yaml`",
        blocks_launch=False,
        applies=lambda value: bool(value.keys() - {_POD_CONFIG}),
    )


CONFIG = Table(
    name="config",
    about="SkyPilot's settings for this task.",
    fields={
        "docker": Field(
            shape=_SECTION, about="`run_options` of the container.",
            later=Later(
                message="container options are not supported",
                hint="remove it: containers have `--network host`, `--ipc host`, all GPUs and no limit of `memlock`",
            ),
        ),
        "nvidia_gpus": Field(
            shape=_SECTION, about="`disable_ecc`.", later=Later(message="ECC is not changed", blocks_launch=False)
        ),
        "gcp": Field(
            shape=_SECTION, about="Networks, instance groups and placement.",
            later=Later(message="GCP settings are not supported", hint="remove `gcp` to use the defaults"),
        ),
        "azure": Field(
            shape=_SECTION, about="Networks and identity.",
            later=Later(message="Azure settings are not supported", hint="remove `azure` to use the defaults"),
        ),
        "kubernetes": Field(
            shape=_SECTION, about="Pod settings; `pod_config` is merged into pods (docs/KUBERNETES.md).",
            later=_ignored("Kubernetes", "`kubernetes.yaml` (docs/KUBERNETES.md)"),
        ),
        "ssh": Field(
            shape=_SECTION, about="Settings of your own machines.",
            later=_ignored("SSH machine", "`ssh_pools.yaml` (docs/SSH_POOLS.md)"),
        ),
        "slurm": Field(
            shape=_SECTION, about="Slurm settings.", later=_ignored("Slurm", "`slurm.yaml` (docs/SLURM.md)")
        ),
        "vast": Field(
            shape=_SECTION, about="Vast settings.",
            later=Later(
                message="Vast settings have no effect in a task", hint="write them to `~/.sky/config.yaml`",
                blocks_launch=False,
            ),
        ),
        "active_workspace": Field(
            shape=Text(), about="Workspace of the SkyPilot server.",
            later=Later(message="workspaces are not supported", blocks_launch=False),
        ),
        "hooks": Field(
            shape=ListOf(item=HOOK), about="Commands that run when a cluster ends.",
            later=Later(message="hooks are not supported", hint="save state in `run`, on SIGTERM"),
        ),
    },
    elsewhere=dict.fromkeys(
        ("aws", "oci", "nebius", "jobs", "serve", "api_server", "admin_policy", "allowed_clouds", "logs", "workspaces"),
        "SkyPilot reads it from `~/.sky/config.yaml` only",
    ),
    others=Later(message="it has no effect", blocks_launch=False),
)  # fmt: skip
