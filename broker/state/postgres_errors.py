"""Explain errors of a PostgreSQL server that does not respond or refuses a statement, with hints."""

from __future__ import annotations

from urllib.parse import urlsplit, urlunsplit

import psycopg

from broker.errors import StateError


def hide_password(url: str) -> str:
    """Return the URL without its password and options, for messages."""
    try:
        parts = urlsplit(url)
        user = f"{parts.username}@" if parts.username else ""
        host = parts.netloc.rpartition("@")[2]
    except ValueError:
        return "postgresql://"
    return urlunsplit((parts.scheme, f"{user}{host}", parts.path, "", ""))


def explain_postgres_error(url: str, error: psycopg.Error) -> StateError:
    """Make the error for a failed use of the database at `url`. The server's messages never contain the password."""
    where = hide_password(url)
    reason = (error.diag.message_primary or str(error).strip().partition("\n")[0]).rstrip(".")
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        hint = "give broker's user its own database, or a schema in which it may create tables"
    elif isinstance(error, psycopg.errors.LockNotAvailable | psycopg.errors.QueryCanceled):
        hint = "another broker process has been writing for a minute; retry when it has finished"
    elif isinstance(error, psycopg.errors.DiskFull):
        hint = "free some space on the server's disk, then repeat the command: nothing was partially written"
    elif isinstance(error, psycopg.errors.IntegrityError | psycopg.errors.DataError):
        hint = "`broker state check` lists damaged rows."
    elif isinstance(error, psycopg.OperationalError):
        hint = "check that the server is running and that `state` in `config.toml`, or `BROKER_STATE`, is correct"
    else:
        hint = "`broker state check` lists errors in the database."
    return StateError(f"the state in {where} cannot be used: {reason}", hints=(hint,))
