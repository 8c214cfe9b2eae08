"""`broker daemon`: drives the managed jobs of a state folder. Started on demand by the commands that need it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
from typing import Annotated

import typer

from broker.cli.context import Context
from broker.jobs.daemon import run_daemon

DESCRIPTORS = 65536


def daemon(
    idle: Annotated[float, typer.Option("--idle", help="Leave after so many seconds without a job.")] = 60,
) -> None:
    """Drive the managed jobs of a state folder."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    context = Context()
    _allow_descriptors()
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


def _allow_descriptors() -> None:
    """One descriptor a node is kept open; shells allow 1,024 where the system allows many more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # the daemon works with fewer: nodes beyond them are polled
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
