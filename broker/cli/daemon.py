"""`broker daemon`: drives the managed jobs of a state folder. Started on demand by the commands that need it."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Annotated

import typer

from broker.cli.context import Context
from broker.jobs.daemon import run_daemon


def daemon(
    idle: Annotated[float, typer.Option("--idle", help="Leave after so many seconds without a job.")] = 60,
) -> None:
    """Drive the managed jobs of a state folder."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    context = Context()
    os.chdir(context.config.home)  # the caller's folder may go away
    asyncio.run(
        run_daemon(
            store=context.store,
            make_controller=context.make_controller,
            provisioner=context.provisioner,
            clock=context.clock,
            config=context.config,
            idle_s=idle,
        )
    )
