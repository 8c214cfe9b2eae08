"""Use your own machines: SSH pools, Slurm and Kubernetes clusters, described by files in the state folder.

Such a cloud is native if its file exists (`ssh_pools.yaml`, `slurm.yaml`, `kubernetes.yaml`); without the file,
`infra: ssh/...`, `slurm/...` and `kubernetes/...` go through SkyPilot. Only `find_file` decides this.
"""

from __future__ import annotations

from pathlib import Path

FILES = {"ssh": "ssh_pools.yaml", "slurm": "slurm.yaml", "kubernetes": "kubernetes.yaml"}


def find_file(cloud: str, home: Path) -> Path | None:
    """Return the file that makes a cloud native; None if the cloud goes through SkyPilot."""
    name = FILES.get(cloud)
    path = home / name if name else None
    return path if path is not None and path.is_file() else None


def list_native(home: Path) -> tuple[str, ...]:
    """Return the clouds that are native in this state folder."""
    return tuple(cloud for cloud in FILES if find_file(cloud, home))
