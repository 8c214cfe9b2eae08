"""Verbs of the read model, which run here or on a server like those of `broker.app.verbs`."""

from __future__ import annotations

from broker.app.container import Context
from broker.dashboard.model import Overview, read_overview
from broker.dashboard.place_history import PlaceHistory, read_places
from broker.frozen import frozen
from broker.state.refusals import Refusal


def show_overview(context: Context) -> Overview:
    """Read the overview, and restart a dead daemon while jobs are live."""
    context.restart_daemon_if_needed()
    return read_overview(context)


@frozen
class Locations:
    """The locations where jobs ran on spot or were refused, and the refusals that are in force."""

    places: tuple[PlaceHistory, ...]
    refusals: tuple[Refusal, ...]


def list_locations(context: Context) -> Locations:
    """List the locations, the most preempted first."""
    refusals = context.store.refusals.list_active(context.clock.now_s())
    return Locations(places=tuple(read_places(context)), refusals=tuple(refusals))
