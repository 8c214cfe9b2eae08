"""Recognise files of other programs, so that they are refused with one message instead of one for each field."""

from __future__ import annotations

from collections.abc import Mapping

from broker.task.yaml_reader import Marked

_TASK = frozenset({"run", "setup", "resources"})
# Top-level keys of `~/.sky/config.yaml` that no task has.
_SETTINGS = frozenset({
    "jobs", "kubernetes", "serve", "api_server", "admin_policy", "allowed_clouds", "aws", "gcp", "azure", "oci",
    "nebius", "ssh", "slurm", "docker", "nvidia_gpus", "logs", "db", "auth", "workspaces", "active_workspace",
    "provision", "rbac", "daemons", "data", "vast", "do", "runpod",
})  # fmt: skip
_DSTACK = ("task", "dev-environment", "service", "fleet", "volume", "gateway")
_DSTACK_FIELDS = frozenset({"commands", "ide", "backend", "backends", "nodes", "ssh_config", "image", "port"})
_VOLUMES = ("k8s-pvc", "runpod-network-volume", "slurm-host-path", "k8s-hostpath")
_WRITE = "a task has `run:` with the program, and `resources:` with its requirements"


def recognise(fields: Mapping[str, Marked]) -> tuple[str, str] | None:
    """Return the kind of the document, and a hint; None if it may be a task."""
    keys = set(fields)
    if "type" in keys and fields["type"].value in _DSTACK and keys & _DSTACK_FIELDS:
        if "commands" not in keys:
            return f"a dstack {fields['type'].value}", _WRITE
        return "a dstack configuration", "write its `commands` as `run:`, and `gpu` as `accelerators: NAME:COUNT`"
    if keys & _TASK:
        return None
    if {"apiVersion", "kind"} <= keys:
        return "a Kubernetes manifest", _WRITE
    if isinstance(fields["services"].value if "services" in keys else None, dict):
        return "a Docker Compose file", _WRITE
    if {"on", "jobs"} <= keys:
        return "a GitHub Actions workflow", _WRITE
    if {"cluster_name", "provider"} <= keys:
        return "a Ray cluster configuration", _WRITE
    if "type" in keys and fields["type"].value in _VOLUMES:
        return "a volume description", "volumes are not supported; keep the data in a bucket with `file_mounts`"
    if keys and keys <= _SETTINGS:
        return (
            "a SkyPilot settings file",
            "keep it as `~/.sky/config.yaml`, and write the task to a separate file",
        )
    return None
