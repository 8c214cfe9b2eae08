"""Explain why a program exited with an error, and decide whether to restart it. Pure.

By default, a job is restarted while it makes progress: a step or checkpoint beyond the one reached at its last failure.
Failures at steps 40, 90 and 130 cause three restarts; three failures at step 40 end the job. A job that has never
reached a step fails at once, because retrying does not fix a typo, unless a signal ended a program that keeps
checkpoints.

Without any reported step, the checkpoints that the agent observed count. A new `checkpoint-200` beyond `checkpoint-100`
is progress. A new `last.ckpt` shows that the program saves, not that it loads what it saves, so it is progress at most
ten times.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from broker.state.history import StepRange
from broker.types import Attempt, JobRecovery

DEATHS_MAX = 3  # at the same step: the program is at fault, not the machines
REWRITES_MAX = 10  # deaths with a new checkpoint each, but no number that shows how far it is
SHELL_BASE = 128  # a shell reports death by signal n as 128 + n
CAUSES = {
    signal.SIGKILL: "killed; running out of memory is the usual cause",
    signal.SIGABRT: "aborted, as by NCCL's watchdog or a failed CUDA assertion",
    signal.SIGSEGV: "segmentation fault",
    signal.SIGBUS: "bus error, often a full /dev/shm",
    signal.SIGTERM: "terminated",
    signal.SIGILL: "illegal instruction: built for another CPU",
    signal.SIGFPE: "arithmetic error",
    signal.SIGINT: "interrupted",
}
CODES = {
    75: "it requested a restart, without progress",
    126: "the command cannot be executed",
    127: "the command was not found",
}
# A launcher such as torchrun exits with 1 and prints the exit code or signal of the rank that failed first.
LAUNCHERS = re.compile(r"exitcode\s*:\s*-(\d+)|[Ss]ignal (\d+) \(SIG")
OUT_OF_GPU_MEMORY = re.compile(r"CUDA out of memory|OutOfMemoryError|HIP out of memory")


def find_signal(returncode: int) -> int | None:
    """Return the signal that ended the program; None if it exited normally."""
    number = -returncode if returncode < 0 else returncode - SHELL_BASE
    return number if number in set(signal.Signals) else None


def find_fatal_signal(returncode: int | None, last_lines: Sequence[str] = ()) -> int | None:
    """Return the signal that ended the program, or the rank that a launcher's report names; None if there is none."""
    number = None if returncode is None else find_signal(returncode)
    if number is None and returncode is not None and (match := LAUNCHERS.search("\n".join(last_lines))):
        number = int(match[1] or match[2])
    return number if number in set(signal.Signals) else None


def describe_cause(returncode: int | None, last_lines: Sequence[str] = ()) -> str:
    """Return the likely cause in a few words; empty if unknown."""
    if returncode is None:
        return ""
    if OUT_OF_GPU_MEMORY.search("\n".join(last_lines)):
        return "out of GPU memory"
    number = find_fatal_signal(returncode, last_lines)
    if number is None:
        return CODES.get(returncode, "")
    name = signal.Signals(number).name
    return f"{name}: {CAUSES[signal.Signals(number)]}" if signal.Signals(number) in CAUSES else name


class Headway(NamedTuple):
    """How far a job has come: its highest reported step; without one, its observed checkpoints."""

    step: int = 0
    checkpoint: int = 0
    unnumbered_s: float = 0.0


def measure_headway(steps: Mapping[int, StepRange], attempts: Sequence[Attempt] = (), *, until: int) -> Headway:
    """Return the highest step that attempts up to this number have reported or saved, else what they were seen to save.

    Reported steps decide alone: a program that starts from scratch saves new checkpoints without making progress.
    """
    ranges = [steps_seen for number, steps_seen in steps.items() if number <= until]
    step = max((max(seen.last_step, seen.checkpoint_step or 0) for seen in ranges), default=0)
    if step:
        return Headway(step)
    observed = [old.checkpoints for old in attempts if old.checkpoints and old.number <= until]
    return Headway(
        checkpoint=max((each.number for each in observed), default=0),
        unnumbered_s=max((each.unnumbered_s for each in observed), default=0.0),
    )


def is_counted(recovery: JobRecovery, attempt: Attempt) -> bool:
    """Return whether this attempt ended with an exit code that the task does not list."""
    return attempt.returncode is not None and attempt.returncode not in recovery.recover_on_exit_codes


def count_deaths(
    recovery: JobRecovery,
    attempts: Sequence[Attempt],
    steps: Mapping[int, StepRange],
    *,
    present: int,
    is_numbered: bool = False,
) -> int:
    """Return the number of consecutive failures without progress, including this one.

    With `is_numbered`, only a higher step or number of a checkpoint is progress.
    """

    def measure(until: int) -> Headway:
        headway = measure_headway(steps, attempts, until=until)
        return headway._replace(unnumbered_s=0.0) if is_numbered else headway

    earlier = (old for old in attempts if old.number < present and is_counted(recovery, old))
    return 1 + sum(1 for old in earlier if measure(old.number) == measure(present))


def is_restart_due(
    recovery: JobRecovery,
    returncode: int | None,
    *,
    failures: int = 0,
    deaths: int = 1,
    rewrites: int = 1,
    headway: Headway = Headway(),
    keeps_checkpoints: bool = False,
    last_lines: Sequence[str] = (),
) -> bool:
    """Return whether to restart the program.

    `failures`: earlier restarts after exit codes that are not listed. `deaths`: failures at this `headway`, including
    this one. `rewrites`: failures at its step and number. `last_lines` may have a launcher's report of a signal. The
    task's own settings for exit codes and restarts override the default.
    """
    if returncode in recovery.recover_on_exit_codes:  # unlimited, as in SkyPilot
        return True
    if recovery.max_restarts_on_errors is not None:
        return failures < recovery.max_restarts_on_errors
    if returncode is None or deaths >= DEATHS_MAX or rewrites >= REWRITES_MAX:
        return False
    return headway != Headway() or (keeps_checkpoints and find_fatal_signal(returncode, last_lines) is not None)
