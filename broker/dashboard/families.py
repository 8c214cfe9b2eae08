"""Metrics in Prometheus' text format (https://prometheus.io/docs/instrumenting/exposition_formats/)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

Samples = Sequence[tuple[dict[str, str], float]]


class Family(NamedTuple):
    """A metric with its help text and samples of (labels, value)."""

    name: str
    kind: str
    text: str
    samples: Samples


def render_families(families: Iterable[Family]) -> str:
    """Render families; one without samples is left out."""
    lines = []
    for family in families:
        if family.samples:
            lines += [f"# HELP {family.name} {family.text}", f"# TYPE {family.name} {family.kind}"]
            lines += [f"{family.name}{_render_labels(labels)} {value:.10g}" for labels, value in family.samples]
    return "\n".join(lines) + "\n"


def _render_labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items()) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
