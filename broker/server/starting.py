"""Run the server of a state folder in this process: its first token, its signals, and the end of a replaced server."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

from broker import __version__
from broker.app.container import Context
from broker.config import find_backup_url, keep_settings
from broker.errors import FencedError, UsageError
from broker.server.context import Policy
from broker.server.serving import Certificate, Listening, serve, write_listening
from broker.server.tokens import create_token
from broker.state.people import Role
from broker.state.secret_rows import load_key

REPLACED = "replaced"  # below `server/`


def run_server(
    context: Context,
    *,
    host: str,
    port: int,
    policy: Policy,
    certificate: Certificate | None,
    on_token: Callable[[Path], None],
    on_ready: Callable[[Listening], None],
) -> None:
    """Serve until SIGTERM or Ctrl-C. `on_token` gets the file of the first administrator's token when it is written.

    Raises UsageError if the address cannot be used, and FencedError once a restored server has replaced this one.
    """
    home = context.config.home
    keep_settings(home)

    def begin(listening: Listening) -> None:
        write_listening(home, listening, version=__version__)
        on_ready(listening)

    try:
        if (token := ensure_first_token(context)) is not None:
            on_token(token)
        served = serve(
            home, host=host, port=port, policy=policy, certificate=certificate, on_ready=begin, until=_wait_for_stop
        )
        asyncio.run(served)
    except FencedError:
        (home / "server" / REPLACED).touch()  # keeps its supervisor from restarting it
        raise
    except OSError as error:
        raise UsageError(
            f"cannot listen on {host}:{port}: {error.strerror or error}",
            hints=["choose another port: `broker server start --port 0`"],
        ) from None


async def _wait_for_stop() -> None:
    stopped = asyncio.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(each, stopped.set)
    await stopped.wait()


def ensure_first_token(context: Context) -> Path | None:
    """Write an administrator's token to a file, mode 0600, and return its path; None if the server has a token.

    Creates the key of backups and shared stores, too: `broker server up` copies it, and jobs with secrets need it.
    """
    home = context.config.home
    if find_backup_url(home) is not None or context.store.is_shared:
        load_key(home)
    if context.store.tokens.list():
        return None
    path = home / "server" / "admin.token"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = create_token(context.store, user="admin", role=Role.ADMIN, days=None)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(made.value.value + "\n")
    return path
