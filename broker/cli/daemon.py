"""`broker daemon`: run the managed jobs of a state folder. Commands start it on demand."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from typing import Annotated

import typer

from broker.cli.context import make_context
from broker.cli.log_lines import start_log
from broker.jobs.daemon import run_daemon

DESCRIPTORS = 65536


def daemon(
    idle: Annotated[
        float, typer.Option("--idle", metavar="SECONDS", help="Exit after this many seconds without a job.")
    ] = 60,
) -> None:
    """Run the managed jobs of a state folder."""
    context = make_context()
    start_log(context.config)
    _allow_descriptors()
    os.chdir(context.config.home)  # the caller's folder may be deleted
    asyncio.run(
        run_daemon(
            store=context.store,
            make_controller=context.make_any_controller,
            provisioner=context.provisioner,
            clock=context.clock,
            config=context.config,
            notifier=context.notifier,
            scheduler=context.scheduler,
            idle_s=idle,
        )
    )


def _allow_descriptors() -> None:
    """Raise the limit of open files: each node keeps one, and shells default to 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # with fewer, the remaining nodes are polled
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
