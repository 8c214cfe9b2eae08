"""The boundary between the command line and the application: a verb runs here, or on the logged-in server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from broker.app.container import Context
from broker.clock import Clock

P = ParamSpec("P")
T = TypeVar("T")


class Session(Protocol):
    """Runs the verbs of `broker.app.verbs`. Errors of a verb are raised here, regardless of where it ran."""

    clock: Clock

    def call(self, verb: Callable[Concatenate[Context, P], T], *arguments: P.args, **named: P.kwargs) -> T:
        """Run a verb to completion. Arguments are passed by name; callbacks run in this thread."""
        ...


class EmbeddedSession:
    """Runs verbs in this process, on the state folder of this user."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.clock = context.clock

    def call(self, verb: Callable[Concatenate[Context, P], T], *arguments: P.args, **named: P.kwargs) -> T:
        """Run the verb in this process, with this context."""
        return verb(self.context, *arguments, **named)
