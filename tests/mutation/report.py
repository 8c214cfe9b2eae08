"""The results of a run, as lines: totals per room and per detector, then each survivor with the change and why."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Sequence

from tests.mutation.judge import Verdict
from tests.mutation.operators import Mutant, plant

PERCENT_MIN = 90.0
DETECTORS = ("test", "simulation", "limit")


def measure_percent(judged: Sequence[tuple[Mutant, Verdict]]) -> float:
    detected = sum(1 for _, verdict in judged if verdict.by)
    return 100.0 * detected / len(judged) if judged else 100.0


def render(judged: Sequence[tuple[Mutant, Verdict]]) -> Iterator[str]:
    rooms = sorted({room_of(mutant) for mutant, _ in judged})
    yield f"{'room':20} {'detected':>8} {'of':>5} {'%':>6}   {'  '.join(f'{by:>10}' for by in DETECTORS)}"
    for room in [*rooms, "all"]:
        part = [each for each in judged if room in ("all", room_of(each[0]))]
        counts = Counter(verdict.by for _, verdict in part)
        cells = "  ".join(f"{counts[by]:10}" for by in DETECTORS)
        yield f"{room:20} {len(part) - counts['']:8} {len(part):5} {measure_percent(part):6.1f}   {cells}"
    survivors = [mutant for mutant, verdict in judged if not verdict.by]
    if survivors:
        yield f"\n{len(survivors)} survivors"
    for mutant in survivors:
        yield f"  {mutant.name}   in {mutant.function or 'the module'}"


def room_of(mutant: Mutant) -> str:
    return "/".join(mutant.file.split("/")[:2])


def render_diff(source: str, mutant: Mutant) -> Iterator[str]:
    before, after = source.splitlines(), plant(source, mutant).splitlines()
    for line in difflib.unified_diff(before, after, lineterm="", n=0):
        if line[:1] in "+-" and line[:3] not in ("+++", "---"):
            yield f"    {line}"
