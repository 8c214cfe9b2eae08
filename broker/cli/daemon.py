"""`broker daemon`: run the managed jobs of a state folder. Commands start it on demand."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from typing import Annotated

import typer

from broker.app.container import Context
from broker.app.freshness import keep_prices_fresh
from broker.cli.context import make_context
from broker.cli.descriptors import allow_descriptors
from broker.cli.log_lines import start_log
from broker.config import keep_settings
from broker.jobs.daemon import run_daemon
from broker.state.opening import open_store


def daemon(
    idle: Annotated[
        float, typer.Option("--idle", metavar="SECONDS", help="Exit after this many seconds without a job.")
    ] = 60,
) -> None:
    """Run the managed jobs of a state folder."""
    context = make_context()
    start_log(context.config)
    keep_settings(context.config.home)
    allow_descriptors()  # each node keeps one; with fewer, the remaining nodes are polled
    os.chdir(context.config.home)  # the caller's folder may be deleted
    asyncio.run(run_controllers(context, idle_s=idle))


async def run_controllers(context: Context, *, idle_s: float) -> None:
    """Run the controllers of all jobs and services, and keep prices fresh meanwhile."""
    updates = asyncio.ensure_future(keep_prices_fresh(context.clock, context.config.home))
    try:
        await run_daemon(
            store=context.store,
            make_controller=context.make_any_controller,
            provisioner=context.provisioner,
            clock=context.clock,
            config=context.config,
            notifier=context.notifier,
            scheduler=context.scheduler,
            open_store=partial(open_store, context.config, clock=context.clock),
            idle_s=idle_s,
        )
    finally:
        updates.cancel()
