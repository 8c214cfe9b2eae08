"""Open the store given in the settings: the SQLite file of the state folder, or a PostgreSQL database."""

from __future__ import annotations

from broker.clock import Clock
from broker.config import Config, find_state_url
from broker.errors import StateError
from broker.state.store import Store


def open_store(config: Config, *, clock: Clock) -> Store:
    """Open the store. Raises StateError, and UsageError for an invalid URL."""
    url = find_state_url(config.home)
    if url is None:
        return Store(config.database, clock=clock, owner=config.owner)
    try:
        from broker.state.postgres_store import PostgresStore
    except ImportError as error:
        raise StateError(
            f"the state is in PostgreSQL, but `{error.name}` is not installed",
            hints=("pip install 'intercloud-broker[server]'",),
        ) from error
    return PostgresStore(url, home=config.home, clock=clock, owner=config.owner)
