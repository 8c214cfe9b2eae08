"""Registry entries: one maker per cloud, all of the same kind. A cloud is usable if SkyPilot's last check said so."""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING

from broker.clock import Clock
from broker.clouds.sky.login import find_python
from broker.config import Config

if TYPE_CHECKING:
    from broker.clouds.sky.cloud import SkyCloud
    from broker.clouds.sky.engine import WorkerEngine

ENABLED = "enabled.json"  # below `sky` in the state folder; `broker check` writes it


def make_cloud(name: str, config: Config, *, clock: Clock) -> SkyCloud | None:
    """Make the cloud; None without a file that names it.

    Users without SkyPilot therefore pay for one file access only.
    """
    if not (config.home / "sky" / ENABLED).is_file():
        return None
    from broker.clouds.sky.state_file import SkyStateFile

    state_file = SkyStateFile(config.home / "sky")
    python = find_python() if name in state_file.read_enabled() else None
    if python is None:
        return None
    from broker.clouds.sky.cloud import SkyCloud

    return SkyCloud(name, engine=make_engine(python), state_file=state_file, clock=clock)


@cache
def make_engine(python: str) -> WorkerEngine:
    """Make the engine: one worker for all clouds of a process."""
    from broker.clouds.sky.engine import WorkerEngine

    return WorkerEngine(python)


make_azure = partial(make_cloud, "azure")
make_cudo = partial(make_cloud, "cudo")
make_do = partial(make_cloud, "do")
make_fluidstack = partial(make_cloud, "fluidstack")
make_hyperbolic = partial(make_cloud, "hyperbolic")
make_ibm = partial(make_cloud, "ibm")
make_kubernetes = partial(make_cloud, "kubernetes")
make_lambda = partial(make_cloud, "lambda")
make_mithril = partial(make_cloud, "mithril")
make_nebius = partial(make_cloud, "nebius")
make_oci = partial(make_cloud, "oci")
make_paperspace = partial(make_cloud, "paperspace")
make_primeintellect = partial(make_cloud, "primeintellect")
make_runpod = partial(make_cloud, "runpod")
make_scp = partial(make_cloud, "scp")
make_seeweb = partial(make_cloud, "seeweb")
make_shadeform = partial(make_cloud, "shadeform")
make_slurm = partial(make_cloud, "slurm")
make_ssh = partial(make_cloud, "ssh")
make_vast = partial(make_cloud, "vast")
make_verda = partial(make_cloud, "verda")
make_vsphere = partial(make_cloud, "vsphere")
make_yotta = partial(make_cloud, "yotta")
