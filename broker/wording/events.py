"""Render events. `render_KIND` in `jobs` or `nodes` takes the data of an event of that kind as parameters."""

from __future__ import annotations

from collections.abc import Callable

import broker.wording.jobs as job_events
import broker.wording.nodes as node_events
from broker.types.outcomes import Event, EventKind

_RENDERERS: dict[str, Callable[..., str]] = {**vars(job_events), **vars(node_events)}


def describe_event(event: Event) -> str:
    """Return the event as a sentence, possibly with more lines; for a damaged event, return its raw data."""
    try:
        return find_renderer(event.kind)(**event.data)
    except (TypeError, ValueError, KeyError, AttributeError, IndexError):
        return f"{event.kind.value}: {dict(event.data)}"


def find_renderer(kind: EventKind) -> Callable[..., str]:
    """Return the function that renders events of this kind."""
    return _RENDERERS[f"render_{kind.value}"]
