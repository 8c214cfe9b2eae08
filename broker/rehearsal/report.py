"""Reconstruct the run of a rehearsed program from its progress files. Pure except for reading the files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

TAIL_BYTES = 8192
WARM_UP_STEPS = 2  # of each start; they are slower than the rest


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a progress file; `time_s` is real, seconds since the epoch."""

    step: int
    total: int | None
    loss: float | None
    checkpoint_step: int | None
    time_s: float | None
    tokens_per_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class ReportedAttempt:
    """One attempt as reported by its program. `start_s`: real seconds from its start to its first new step."""

    number: int
    lines: tuple[Line, ...]
    start_s: float | None = None

    @property
    def begin_step(self) -> int | None:
        """The step it resumed from: 0 for a fresh start, None without a report."""
        if not self.lines:
            return None
        first = self.lines[0]
        if first.checkpoint_step is not None and 0 <= first.step - first.checkpoint_step <= 1:
            return first.checkpoint_step
        return max(0, first.step - 1) if first.loss is not None or first.step <= 1 else first.step

    @property
    def last_step(self) -> int | None:
        """The last step that the attempt reported; None without any."""
        return max((line.step for line in self.lines), default=None)

    @property
    def saved_step(self) -> int | None:
        """The newest reported checkpoint."""
        return max((line.checkpoint_step for line in self.lines if line.checkpoint_step is not None), default=None)


@dataclass(frozen=True, kw_only=True)
class Resume:
    """The resume of an attempt after an earlier one."""

    number: int  # of the later attempt
    last_step: int
    saved_step: int | None
    begin_step: int

    @property
    def steps_lost(self) -> int:
        """Number of steps that the next attempt repeated."""
        return max(0, self.last_step - self.begin_step)

    @property
    def is_from_scratch(self) -> bool:
        """Whether the attempt restarted from step 0 although steps had been made."""
        return self.begin_step == 0 and self.last_step > 0

    @property
    def is_short(self) -> bool:
        """Whether it resumed from an older step than the newest reported checkpoint."""
        return self.saved_step is not None and self.begin_step < self.saved_step


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Losses of steps that ran twice, or in two runs; `first` is the first difference: (step, one loss, the other)."""

    steps: int = 0
    equal: int = 0
    first: tuple[int, float, float] | None = None

    @property
    def is_exact(self) -> bool:
        """Whether all repeated steps have bit-identical losses."""
        return self.steps > 0 and self.equal == self.steps


@dataclass(frozen=True, kw_only=True)
class Measures:
    """Real seconds and steps, measured on this machine; None if the program does not report them."""

    total: int | None
    last_step: int | None
    step_s: float | None = None
    start_s: float | None = None  # from the program's start to its first new step
    stall_s: float | None = None  # time that a checkpoint adds to the steps around it
    checkpoint_steps: int | None = None  # steps between checkpoints


def read_lines(path: Path) -> tuple[Line, ...]:
    """Read complete lines that are JSON objects with a step; none if there is no file."""
    try:
        raw = path.read_bytes()
    except OSError:
        return ()
    return tuple(_parse_lines(raw.split(b"\n")[:-1]))


def read_newest_line(path: Path) -> Line | None:
    """Read the newest line, from the last few thousand bytes."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            raw = file.read()
    except OSError:
        return None
    return next(reversed(_parse_lines(raw.split(b"\n")[:-1])), None)


def _parse_lines(texts: Sequence[bytes]) -> list[Line]:
    lines = []
    for text in texts:
        try:
            value = json.loads(text.decode("utf-8", "replace"))
        except ValueError:
            continue
        if isinstance(value, dict) and _whole(value.get("step")) is not None:
            lines.append(_parse(value))
    return lines


def _parse(value: Mapping[str, Any]) -> Line:
    time_s = _number(value.get("time_s"))
    return Line(
        step=_whole(value.get("step")) or 0,
        total=_whole(value.get("total")),
        loss=_number(value.get("loss")),
        checkpoint_step=_whole(value.get("checkpoint_step")),
        time_s=_number(value.get("time")) if time_s is None else time_s,
        tokens_per_s=_number(value.get("tokens_per_s")),
    )


def _number(value: object) -> float | None:
    try:
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
    except OverflowError:  # an integer of hundreds of digits
        return None


def _whole(value: object) -> int | None:
    """Return a number as an integer; None for `Infinity`, the `total` of an endless run, and `NaN`."""
    number = _number(value)
    return None if number is None or not math.isfinite(number) else int(number)


def measure_start_s(lines: Sequence[Line], started_s: float) -> float | None:
    """Return the seconds until the first line with a loss or beyond the initial step; None if there is none."""
    if not lines:
        return None
    for line in lines:
        if line.time_s is not None and (line.loss is not None or line.step > lines[0].step):
            return max(0.0, line.time_s - started_s)
    return None


def find_resumes(trials: Sequence[ReportedAttempt]) -> tuple[Resume, ...]:
    """Find the resume of every attempt that reported progress after an earlier one did."""
    resumes = []
    reported = [trial for trial in trials if trial.lines]
    for index, trial in enumerate(reported[1:], start=1):
        before = reported[:index]
        begin = trial.begin_step
        assert begin is not None and before[-1].last_step is not None
        saved = max((earlier.saved_step for earlier in before if earlier.saved_step is not None), default=None)
        resumes.append(Resume(number=trial.number, last_step=before[-1].last_step, saved_step=saved, begin_step=begin))
    return tuple(resumes)


def compare_repeats(trials: Sequence[ReportedAttempt]) -> Comparison:
    """Compare the losses of every step that two attempts ran, each with the previous one."""
    pairs = list[tuple[int, float, float]]()
    earlier = dict[int, float]()
    for trial in trials:
        losses = read_losses([trial])
        pairs += [(step, earlier[step], loss) for step, loss in losses.items() if step in earlier]
        earlier.update(losses)
    return _compare(pairs)


def compare_runs(first: Sequence[ReportedAttempt], second: Sequence[ReportedAttempt]) -> Comparison:
    """Compare the last losses of every step that both runs reported."""
    left, right = read_losses(first), read_losses(second)
    return _compare([(step, left[step], right[step]) for step in sorted(left.keys() & right.keys())])


def read_losses(trials: Iterable[ReportedAttempt]) -> dict[int, float]:
    """Return the loss of every step; for a repeated step, the last one."""
    return {line.step: line.loss for trial in trials for line in trial.lines if line.loss is not None}


def _compare(pairs: Sequence[tuple[int, float, float]]) -> Comparison:
    """Compare exactly: floats are written with all digits. NaN equals NaN."""
    unequal = [(step, a, b) for step, a, b in pairs if a != b and not (a != a and b != b)]
    return Comparison(steps=len(pairs), equal=len(pairs) - len(unequal), first=unequal[0] if unequal else None)


def measure(trials: Sequence[ReportedAttempt]) -> Measures:
    """Return medians over all attempts, in real seconds."""
    lines = [line for trial in trials for line in trial.lines]
    steps = [step_s for trial in trials for step_s in _time_steps(trial.lines)]
    starts = [trial.start_s for trial in trials if trial.start_s is not None]
    gaps = [late - early for trial in trials for early, late in pairwise(list_saved_steps(trial))]
    return Measures(
        total=next((line.total for line in reversed(lines) if line.total), None),
        last_step=max((line.step for line in lines), default=None),
        step_s=median(steps) if steps else None,
        start_s=median(starts) if starts else None,
        stall_s=_measure_stall_s(trials),
        checkpoint_steps=int(median(gaps)) if gaps else None,
    )


def list_saved_steps(trial: ReportedAttempt) -> list[int]:
    """Return the steps at which the attempt reported checkpoints, ascending."""
    return sorted({line.checkpoint_step for line in trial.lines if line.checkpoint_step})


def _time_steps(lines: Sequence[Line]) -> list[float]:
    """Return the seconds of each step after the warm-up."""
    timed = [(line.step, line.time_s) for line in lines if line.time_s is not None and line.loss is not None]
    durations = [(b_s - a_s) / (b - a) for (a, a_s), (b, b_s) in pairwise(timed) if b > a]
    return durations[WARM_UP_STEPS:] if len(durations) > 2 * WARM_UP_STEPS else durations


def _measure_stall_s(trials: Sequence[ReportedAttempt]) -> float | None:
    """Measure the time beyond the median step time, per checkpoint."""
    steps = [step_s for trial in trials for step_s in _time_steps(trial.lines)]
    saves = sum(len(list_saved_steps(trial)) for trial in trials)
    if len(steps) < 10 or saves < 2:
        return None
    usual = median(steps)
    return max(0.0, sum(steps) - usual * len(steps)) / saves
