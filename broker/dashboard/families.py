"""Render metrics in Prometheus' text format (https://prometheus.io/docs/instrumenting/exposition_formats/)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

Labels = dict[str, str] | str  # a str was already rendered by `render_labels` or `render_job_label`
Samples = Sequence[tuple[Labels, float]]


class Histogram:
    """Counts values by ascending upper bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    @classmethod
    def of(cls, bounds: Sequence[float], counts: Sequence[int], total: float) -> Histogram:
        """Make a histogram of values that were counted elsewhere: one count for each bound, and one for larger ones."""
        made = cls(bounds)
        made._counts, made._sum = list(counts), total
        return made

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def render(self, name: str, labels: dict[str, str]) -> Iterator[str]:
        """Return the lines of all its series: cumulative buckets, sum and count."""
        names = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        for bound, count in zip(names, accumulate(self._counts), strict=True):
            yield f"{name}_bucket{render_labels({**labels, 'le': bound})} {count}"
        yield f"{name}_sum{render_labels(labels)} {self._sum:.10g}"
        yield f"{name}_count{render_labels(labels)} {sum(self._counts)}"


class Family(NamedTuple):
    """A metric with its help text and samples of (labels, value).

    For the kind `histogram`, `histograms` has pairs of (labels, histogram) instead.
    """

    name: str
    kind: str
    text: str
    samples: Samples = ()
    histograms: Sequence[tuple[dict[str, str], Histogram]] = ()


def render_families(families: Iterable[Family]) -> str:
    """Render families, except those without samples."""
    lines = []
    for family in families:
        if family.samples or family.histograms:
            lines += [f"# HELP {family.name} {family.text}", f"# TYPE {family.name} {family.kind}"]
            for labels, histogram in family.histograms:
                lines += histogram.render(family.name, labels)
            name = family.name
            lines += [
                f"{name}{labels if isinstance(labels, str) else render_labels(labels)} {value:.10g}"
                for labels, value in family.samples
            ]
    return "\n".join(lines) + "\n"


def render_labels(labels: dict[str, str]) -> str:
    """Return the labels as text."""
    if not labels:
        return ""
    return "{" + ",".join([f'{name}="{_escape(value)}"' for name, value in labels.items()]) + "}"


def render_job_label(job_id: int) -> str:
    """Return the label of a job's series: it is part of thousands of lines, and a number needs no escapes."""
    return f'{{job="{job_id}"}}'


def _escape(value: str) -> str:
    if value.isalnum():
        return value
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
