"""Operations on a canary: start one with a share of the requests, promote it, or roll it back."""

from __future__ import annotations

import re

from broker.app.container import Context
from broker.app.gateways import READY
from broker.app.services import describe_services
from broker.errors import UsageError
from broker.serve.canary import Canary, read_canary, remove_canary, write_canary
from broker.serve.replicas import find_folder
from broker.types import Service, ServiceEventKind, Task


def read_share(text: str) -> float:
    """Read the share of a canary: `10%` or `0.1`. Raises UsageError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(%?)", text.strip())
    share = float(found[1]) / (100 if found[2] else 1) if found else 0.0
    if not 0 < share < 1:
        raise UsageError(f"invalid share `{text}` for `--canary`", hints=["for example `--canary 10%`"])
    return share


def add_canary_version(context: Context, service: Service, task: Task, share: float) -> int:
    """Add a canary's version while the service keeps its own version; return its number. Call within a transaction."""
    services = context.store.services
    version = services.add_version(service.name, task, mode=service.mode)
    services.set_version(service.name, service.version)
    services.add_event(service.name, ServiceEventKind.CANARY_STARTED, detail=f"{version} ({share:.0%})")
    return version


def start_canary(context: Context, service: Service, version: int, share: float) -> None:
    """Route this share of requests to an added version. Call after the version is committed."""
    write_canary(find_folder(context.config, service), Canary(version=version, share=share))


def promote_canary(context: Context, service: Service) -> int:
    """Make the canary the version of the service; return its number.

    Raises UsageError unless there is a canary with a ready replica.
    """
    folder, services = find_folder(context.config, service), context.store.services
    canary = _must_read(context, service)
    (line,) = describe_services(context, [service.name])
    if not any(each.status == READY and each.replica.version == canary.version for each in line.replicas):
        hint = f"see `broker serve why {service.name}`" if service.wanted else "send a request: it is scaled to zero"
        raise UsageError(f"no replica of version {canary.version} is ready", hints=[hint])
    with context.store.transaction():
        services.mark_ready(service.name, canary.version)
        services.set_version(service.name, canary.version)
        services.add_event(service.name, ServiceEventKind.UPDATED, detail=str(canary.version))
    # last: if killed earlier, a canary of the wanted version remains, which the controller ignores
    remove_canary(folder)
    return canary.version


def roll_back_canary(context: Context, service: Service) -> int:
    """Drain the canary's replicas; return the version that remains. Raises UsageError without a canary."""
    _must_read(context, service)
    remove_canary(find_folder(context.config, service))
    context.store.services.add_event(service.name, ServiceEventKind.CANARY_ENDED, detail=str(service.version))
    return service.version


def check_no_canary(context: Context, service: Service) -> None:
    """Raise UsageError while a canary is on trial: another update would leave it undecided."""
    if read_canary(find_folder(context.config, service)) is not None:
        raise UsageError(
            f"service `{service.name}` already has a canary",
            hints=[f"end it with `broker serve promote {service.name}` or `broker serve rollback {service.name}`"],
        )


def _must_read(context: Context, service: Service) -> Canary:
    canary = read_canary(find_folder(context.config, service))
    if canary is None:
        hint = f"start one with `broker serve update {service.name} TASK.yaml --canary 10%`"
        raise UsageError(f"service `{service.name}` has no canary", hints=[hint])
    return canary
