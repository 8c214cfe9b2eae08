"""The task of one replica, and the folder of one service."""

from __future__ import annotations

import contextlib
import hashlib
import random
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace

from broker.config import Config
from broker.errors import UsageError
from broker.frozen import frozen
from broker.serve.files import ServiceFolder, encode
from broker.serve.reconciling import Slot
from broker.state.store import Store
from broker.types import Secret, Service, ServiceSpec, Task

LOCAL = "local"
LOOPBACK = "127.0.0.1"
SERVICE_VARIABLE = "BROKER_SERVICE"
OWN_VARIABLES = (
    *(SERVICE_VARIABLE, "BROKER_REPLICA_HOST", "BROKER_REPLICA_PORT", "BROKER_ENTRANCE_PORT"),
    "SKYPILOT_SERVE_REPLICA_ID",
)
# Below those of services, and below those that the kernel gives to outgoing connections (Linux: from 32768), as any
# program may take one of these a moment later, or while a replica is being replaced.
FREE_PORTS = range(20000, 30000)
ENTRANCE_PORT = 19443  # outside the ports from which nodes and their systems choose


@frozen
class ReplicaPorts:
    """The ports of a replica: its program's, on the node's loopback, and the one that its balancer connects to."""

    program: int
    entrance: int


def find_folder(config: Config, service: Service) -> ServiceFolder:
    """Return the folder of a service. Its uid distinguishes it from an earlier service of the same name."""
    return ServiceFolder(path=config.home / "serve" / f"{service.name}-{service.uid}")


def remove_folder(folder: ServiceFolder) -> None:
    """Remove the files of a service that is down."""
    shutil.rmtree(folder.path, ignore_errors=True)


def find_port(task: Task) -> int:
    """Return the port that replicas listen on. Raises UsageError if the task names none, or several."""
    assert task.service is not None
    if task.service.port is not None:
        return task.service.port
    ports = {port for each in task.resources for port in each.ports}
    is_several = len(ports) > 1 or any(not each.isdigit() for each in ports)  # also a range, such as `8080-8090`
    if ports and not is_several:
        return int(ports.pop())
    why = "names several ports" if is_several else "names no port"
    raise UsageError(f"the task {why} for its replicas", hints=["add `ports: 8080` below `service`"])


def draw_ports(task: Task, spec: ServiceSpec) -> ReplicaPorts:
    """Return the ports of a new replica: on the local cloud, whose nodes share this machine, two that are free."""
    if is_local(task):
        return draw_free_ports()
    port = find_port(task)
    return ReplicaPorts(program=port, entrance=ENTRANCE_PORT + (port == ENTRANCE_PORT))


def draw_free_ports() -> ReplicaPorts:
    """Return two free ports of this machine. Raises OSError without any."""
    program = draw_free_port()
    return ReplicaPorts(program=program, entrance=draw_free_port(but=program))


def draw_free_port(*, but: int | None = None) -> int:
    """Return a free port of this machine, at random: processes that look at the same time find different ones.

    Raises OSError without one.
    """
    for port in random.Random().sample(FREE_PORTS, len(FREE_PORTS)):  # seeded by the system, unlike the global one
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((LOOPBACK, port))
            if port != but:
                return port
    raise OSError(f"no port from {FREE_PORTS.start} to {FREE_PORTS.stop - 1} is free")


def is_local(task: Task) -> bool:
    """Return whether all replicas run on this machine."""
    return all(each.cloud == LOCAL for each in task.resources)


def make_replica_task(
    service: Service, task: Task, slot: Slot, *, number: int, ports: ReplicaPorts, secrets: Mapping[str, Secret]
) -> Task:
    """Return the task of one replica. Its program learns its number, address and port from the environment.

    A slot's location is tried first; if it has no capacity, the job starts anywhere that the task allows. The only port
    that its machines open is the entrance; `secrets` has the certificates for it.
    """
    resources = task.resources
    if not is_local(task):
        resources = tuple(replace(each, ports=(str(ports.entrance),)) for each in resources)
    if slot.is_spot is not None:
        resources = tuple(replace(each, use_spot=slot.is_spot) for each in resources)
    is_ordered = task.is_ordered
    if slot.zone is not None or slot.region is not None:
        preferences = task.list_preferences()
        pinned = tuple(
            replace(each, region=slot.region, zone=slot.zone, preference=preference)
            for each, preference in zip(resources, preferences, strict=True)
            if each.region in (None, slot.region) and each.zone in (None, slot.zone)
        )
        others = tuple(
            replace(each, preference=max(preferences) + 1 + preference)
            for each, preference in zip(resources, preferences, strict=True)
            if (each.region, each.zone) != (slot.region, slot.zone)
        )
        resources, is_ordered = (*pinned, *others), True
    own = (service.name, LOOPBACK, str(ports.program), str(ports.entrance), str(number))
    envs = {**task.envs, **dict(zip(OWN_VARIABLES, own, strict=True))}
    return replace(
        task, name=f"{service.name}-{number}", resources=resources, is_ordered=is_ordered, envs=envs,
        secrets={**task.secrets, **secrets}, service=None, notices=(),
    )  # fmt: skip


def digest_program(task: Task) -> str:
    """Return a digest of what a replica runs: equal for versions that differ in the rest, such as their machines."""
    envs = sorted((name, value) for name, value in task.envs.items() if name not in OWN_VARIABLES)
    files = sorted(task.file_mounts.items()), task.workdir, task.storage_mounts, task.inputs
    images = sorted({each.image_id or "" for each in task.resources})
    content = task.setup, task.run, envs, files, images, task.pipeline
    return hashlib.sha256(encode(content)).hexdigest()[:16]


def find_needs(store: Store, task: Task) -> Sequence[int]:
    """Return the jobs that the replicas of a pipeline wait for: all others of that run, a retried one by its last."""
    if not task.pipeline:
        return ()
    jobs = [each for each in store.jobs.list() if each.pipeline == task.pipeline]
    return sorted({each.name: each.id for each in jobs if SERVICE_VARIABLE not in each.task.envs}.values())
