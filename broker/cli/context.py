"""Make the context of a command: notes and warnings go to stderr."""

from __future__ import annotations

from broker.app.container import Context
from broker.app.session import EmbeddedSession, Session
from broker.cli.render import print_note
from broker.config import find_login
from broker.errors import UsageError

# What to do after `broker login` instead of a command that works on the state of this machine.
INSTEAD = {
    "gc": "the server's daemon terminates orphaned resources itself; or run `broker gc` on the server's machine",
    "state": "the state is on the server: run `broker state` on its machine",
    "server": "run it on the server's machine (after `broker server up`, `broker server status` shows the command), "
    "or log out first: `broker logout`",
}


def make_context() -> Context:
    """Return the context of a command; its notes go to stderr."""
    return Context(on_note=print_note)


def check_embedded(name: str) -> None:
    """Raise UsageError for a command that works on the state of this machine while the user is on a server."""
    if find_login() is not None:
        raise UsageError(
            f"`broker {name}` does not run through a server",
            hints=[INSTEAD.get(name, "run it on the server's machine, or log out first: `broker logout`")],
        )


def make_session() -> Session:
    """Make the session of a command: with the server after `broker login`, else with the state folder."""
    path = find_login()
    if path is None:
        return EmbeddedSession(make_context())
    from broker.client.remote import RemoteSession

    return RemoteSession.open(path, on_note=print_note)
