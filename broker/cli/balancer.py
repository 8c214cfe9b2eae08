"""`broker balancer`: run the balancer of one service. Its controller starts it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from broker.cli.descriptors import allow_descriptors
from broker.cli.log_lines import write_log
from broker.clock import SystemClock
from broker.errors import StateError
from broker.serve.files import Routing, ServiceFolder, read_file


def balancer(folder: Annotated[Path, typer.Argument(help="Folder of the service in the state folder.")]) -> None:
    """Run the balancer of one service."""
    from broker.serve.balancer import run_balancer

    write_log(is_json=has_json_logs(ServiceFolder(path=folder)))
    allow_descriptors()  # two for each request in flight; on a gateway, no daemon has raised the limit
    try:
        asyncio.run(run_balancer(ServiceFolder(path=folder), clock=SystemClock()))
    except OSError as error:
        raise StateError(f"the balancer cannot listen: {error.strerror or error}") from error


def has_json_logs(folder: ServiceFolder) -> bool:
    """Return the format of the log that the controller wants; a gateway has no `config.toml`."""
    try:
        routing = read_file(folder.routing, Routing)
    except StateError:
        return False  # `run_balancer` reports it
    return routing is not None and routing.has_json_logs
