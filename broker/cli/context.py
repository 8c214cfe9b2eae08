"""Make the context of a command: notes and warnings go to stderr."""

from __future__ import annotations

from broker.app.container import Context
from broker.cli.render import print_note


def make_context() -> Context:
    return Context(on_note=print_note)
