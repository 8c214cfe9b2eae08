"""`broker balancer`: run the balancer of one service. Its controller starts it."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Annotated

import typer

from broker.cli.descriptors import allow_descriptors
from broker.clock import SystemClock
from broker.errors import StateError
from broker.serve.files import ServiceFolder


def balancer(folder: Annotated[Path, typer.Argument(help="Folder of the service in the state folder.")]) -> None:
    """Run the balancer of one service."""
    from broker.serve.balancer import run_balancer

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    allow_descriptors()  # two for each request in flight; on a gateway, no daemon has raised the limit
    try:
        asyncio.run(run_balancer(ServiceFolder(path=folder), clock=SystemClock()))
    except OSError as error:
        raise StateError(f"the balancer cannot listen: {error.strerror or error}") from error
