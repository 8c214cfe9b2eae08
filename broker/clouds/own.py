"""`ssh`, `slurm` and `kubernetes` in the registry: native if this state folder has their file, else through SkyPilot.

`broker.sites.find_file` decides this.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

from broker.clock import Clock
from broker.clouds.findings import CheckResult
from broker.clouds.sky import makers
from broker.clouds.sky.check import SkyInspector
from broker.config import Config
from broker.sites import FILES, find_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from broker.clouds.base import Cloud
    from broker.clouds.findings import Inspector

PAGES = {"ssh": "docs/SSH_POOLS.md", "slurm": "docs/SLURM.md", "kubernetes": "docs/KUBERNETES.md"}


def make_ssh(config: Config, *, clock: Clock) -> Cloud | None:
    """Make the cloud of SSH pools: native with `ssh_pools.yaml`, otherwise SkyPilot's if it enabled it; else None."""
    if find_file("ssh", config.home) is None:
        return cast("Cloud | None", makers.make_ssh(config, clock=clock))
    from broker.clouds.ssh.cloud import make_cloud

    return make_cloud(config, clock=clock)


def make_slurm(config: Config, *, clock: Clock) -> Cloud | None:
    """Make the cloud of Slurm clusters: native with `slurm.yaml`, otherwise SkyPilot's if it enabled it; else None."""
    if find_file("slurm", config.home) is None:
        return cast("Cloud | None", makers.make_slurm(config, clock=clock))
    from broker.clouds.slurm.cloud import make_cloud

    return make_cloud(config, clock=clock)


def make_kubernetes(config: Config, *, clock: Clock) -> Cloud | None:
    """Make the cloud of Kubernetes: native with `kubernetes.yaml`, otherwise SkyPilot's if it enabled it; else None."""
    if find_file("kubernetes", config.home) is None:
        return cast("Cloud | None", makers.make_kubernetes(config, clock=clock))
    from broker.clouds.kubernetes.cloud import make_cloud

    return make_cloud(config, clock=clock)


def find_inspector(cloud: str) -> Inspector:
    """Return the inspector of one of them, which chooses between native and SkyPilot at every call."""
    return OwnInspector(cloud)


class OwnInspector:
    """`Inspector` and `CanInspectQuickly` of a cloud that is native or behind SkyPilot."""

    def __init__(self, cloud: str) -> None:
        self._cloud = cloud

    async def inspect_quickly(self, config: Config, *, clock: Clock) -> Sequence[CheckResult]:
        """Return the full findings of the native cloud; without its file, the result of SkyPilot's last check."""
        if find_file(self._cloud, config.home) is None:
            return await SkyInspector(self._cloud).inspect_quickly(config, clock=clock)
        return await self._find_native().inspect(config, clock=clock)

    async def inspect(self, config: Config, *, clock: Clock) -> Sequence[CheckResult]:
        """Inspect the native cloud; without its file SkyPilot's, and say how to make it native."""
        if find_file(self._cloud, config.home) is not None:
            return await self._find_native().inspect(config, clock=clock)
        path = config.home / FILES[self._cloud]
        note = f"through SkyPilot; native once {path} exists ({PAGES[self._cloud]})"
        native = CheckResult(name="native", is_ok=False, note=note, is_needed=False)
        return [*await SkyInspector(self._cloud).inspect(config, clock=clock), native]

    def write_policy(self, config: Config) -> str:
        """Return the native cloud's permissions: a Role for Kubernetes, a comment for the others."""
        return self._find_native().write_policy(config)

    def _find_native(self) -> Inspector:
        found: Inspector = importlib.import_module(f"broker.clouds.{self._cloud}.check")
        return found
