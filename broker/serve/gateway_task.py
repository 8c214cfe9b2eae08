"""The task of one gateway: a small on-demand machine that runs a balancer of the service, and nothing else.

~/.broker/gateway/     the program, sent as a file mount: a wheel of broker and `gateway_program.py`
~/.broker/exchange/    the folder of the balancer, whose files the controller pushes and reads
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from broker.errors import StateError, UsageError
from broker.frozen import frozen
from broker.runtime import node_python
from broker.runtime.package import list_requirements, pack_wheel
from broker.serve import gateway_program
from broker.serve.credentials import read_gateway_files
from broker.serve.files import Routing, ServiceFolder, encode, write_bytes, write_file
from broker.serve.replicas import LOCAL, LOOPBACK, SERVICE_VARIABLE, is_local
from broker.types import GatewayPlace, GatewaySpec, Quantity, Resources, Service, Task, TlsFiles

ANY = "0.0.0.0"  # a machine behind address translation does not have its public address
EXTRAS = ("serve",)
PROGRAM_TARGET = ".broker/gateway"
RUN = f'exec python3 -I -S "$HOME/{PROGRAM_TARGET}/{Path(gateway_program.__file__).name}"'
TLS_KEY, TLS_CERTIFICATE = "tls-key.pem", "tls-certificate.pem"


@frozen
class GatewayListener:
    """The address on which a gateway listens, on its own machine."""

    host: str
    port: int


def find_places(task: Task, spec: GatewaySpec) -> Sequence[GatewayPlace]:
    """Return the place of each gateway."""
    places = spec.places or (GatewayPlace(cloud=LOCAL if is_local(task) else None),)
    return [places[number % len(places)] for number in range(spec.count)]


def check_places(task: Task, spec: GatewaySpec) -> None:
    """Raise UsageError for gateways that cannot reach the replicas, or have different kinds of addresses."""
    are_here = [place.cloud == LOCAL for place in find_places(task, spec)]
    if any(are_here) and not all(are_here):
        raise UsageError(
            "gateways are either all on this machine or all elsewhere", hints=["write clouds only, or `infra: local`"]
        )
    if is_local(task) and not all(are_here):
        raise UsageError(
            "gateways elsewhere cannot reach replicas on the local cloud", hints=["write `gateway: {infra: local}`"]
        )


def find_listener(service: Service, task: Task, spec: GatewaySpec, number: int) -> GatewayListener:
    """Return where gateway `number` listens. Local ones share this machine, so their ports are adjacent."""
    if find_places(task, spec)[number - 1].cloud == LOCAL:
        return GatewayListener(host=LOOPBACK, port=service.port + number - 1)
    return GatewayListener(host=ANY, port=service.port)


def find_resources(task: Task, spec: GatewaySpec, number: int, *, port: int) -> Resources:
    """Return the machine of gateway `number`: on-demand, with this port open to all addresses."""
    place = find_places(task, spec)[number - 1]
    is_here = place.cloud == LOCAL
    return Resources(
        cloud=place.cloud, region=place.region, zone=place.zone, use_spot=False,
        cpus=None if is_here else Quantity(value=spec.vcpus_min, is_minimum=True),
        ports=() if is_here else (str(port),),
    )  # fmt: skip


def make_gateway_task(service: Service, task: Task, spec: GatewaySpec, number: int, program: Path) -> Task:
    """Return the task of gateway `number`; `program` is the folder that `write_program` filled."""
    resources = find_resources(task, spec, number, port=find_listener(service, task, spec, number).port)
    return Task(
        name=f"{service.name}-gateway-{number}",
        resources=(resources,),
        file_mounts={f"~/{PROGRAM_TARGET}": str(program)},
        envs={SERVICE_VARIABLE: service.name},
        run=RUN,
    )


def write_program(folder: ServiceFolder, *, is_here: bool) -> Path:
    """Write the files that gateways run, completely or not at all; return their folder. Raises StateError.

    `is_here`: the gateways are processes of this machine, and use the Python that runs here. Each release of broker has
    a folder of its own, so that a gateway that starts meanwhile copies one release.
    """
    wheel, needs = pack_wheel(), list_requirements(EXTRAS)
    settings = {
        "digest": wheel.digest,
        "needs": [[each.name, each.least] for each in needs],
        "packages": [each.text for each in needs],
        "python": sys.executable if is_here else "",
    }
    target = folder.path / f"gateway-{hashlib.sha256(encode(settings)).hexdigest()[:16]}"
    if target.exists():
        return target
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    write_file(aside / gateway_program.SETTINGS, settings)
    write_bytes(aside / gateway_program.WHEEL, wheel.content)
    for source in (Path(gateway_program.__file__), Path(node_python.__file__)):
        write_bytes(aside / source.name, source.read_bytes())
    aside.replace(target)
    return target


def make_files(folder: ServiceFolder, routing: Routing, listener: GatewayListener, number: int) -> Mapping[str, str]:
    """Return the files of a gateway by name, the routing file last. Raises StateError.

    It has its own key, the replicas' certificate, and the hashes of API keys; nothing of the state folder beside them.
    """
    files = dict(read_gateway_files(folder, number))
    if folder.keys.exists():
        files[folder.keys.name] = _read(folder.keys)
    tls = None
    if routing.tls is not None:
        files[TLS_KEY] = _read(Path(routing.tls.key_path))
        files[TLS_CERTIFICATE] = _read(Path(routing.tls.certificate_path))
        tls = TlsFiles(key_path=TLS_KEY, certificate_path=TLS_CERTIFICATE)  # relative to its working directory
    own = replace(routing, host=listener.host, port=listener.port, tls=tls)
    return {**files, folder.routing.name: encode(own).decode()}


def _read(path: Path) -> str:
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StateError(f"cannot read {path}: {error}") from error
