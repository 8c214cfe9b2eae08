"""The end of a torture run as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tests.torture.story import Outcome


def render(outcome: Outcome) -> str:
    return "\n".join(list_lines(outcome))


def list_lines(outcome: Outcome) -> Iterator[str]:
    yield f"\n{outcome.bed}: seed {outcome.seed}, {outcome.elapsed_s / 60:.1f} minutes"
    yield row("submitted", sum(outcome.kinds.values()), outcome.kinds)
    yield row("jobs", sum(outcome.statuses.values()), outcome.statuses)
    yield row("attempts", outcome.attempts, outcome.outcomes)
    yield row("acts", sum(outcome.acts.values()), outcome.acts)
    for sentence in outcome.skipped:
        yield f"  left out    {sentence}"
    yield f"  violations  {len(outcome.violations)}"
    for claim in outcome.violations:
        yield f"    {claim}"


def row(title: str, total: int, counts: Counter[str]) -> str:
    parts = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    return f"  {title:<10}{total:>6}  {parts}"
