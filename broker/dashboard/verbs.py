"""Verbs of the read model, which run here or on a server like those of `broker.app.verbs`."""

from __future__ import annotations

from broker.app.container import Context
from broker.dashboard.model import Overview, read_overview


def show_overview(context: Context) -> Overview:
    """Read the overview, and restart a dead daemon while jobs are live."""
    context.keep_jobs_going()
    return read_overview(context)
