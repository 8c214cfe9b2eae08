"""Run one framework's template twice: with a killed worker and preempted nodes, then undisturbed."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.frameworks.beds import Bed, StuckError
from tests.frameworks.registry import Framework

STEPS, SAVE_STEPS, NOTICE_S = 400, 20, 15
KILL_STEP = 50


def run_trial(name: str, framework: Framework, template: Path, folder: Path, venvs: Path) -> dict[str, Any]:
    """Return the row of the table. Raises StuckError, or AssertionError where a bar is missed."""
    common = {"STEPS": str(STEPS), "SAVE_STEPS": str(SAVE_STEPS), "BROKER_VENVS": str(venvs), **framework.envs}
    disturbed = Bed(folder / "disturbed", template, {"STEP_S": "0.1", **common})
    try:
        row = disturb(disturbed, framework)
        result, losses = disturbed.read_result(), disturbed.read_losses()
    finally:
        disturbed.close()
    whole = Bed(folder / "whole", template, {**common, "STEP_S": "0"})
    try:
        whole.wait(whole.is_over, "the end of the undisturbed run")
        assert whole.shell.get_status(1).name == "SUCCEEDED", whole.log()
        expected, expected_losses = whole.read_result(), whole.read_losses()
    finally:
        whole.close()
    is_same = result["weights_sha256"] == expected["weights_sha256"]
    common_steps = losses.keys() & expected_losses.keys()
    difference = max((abs(losses[step] - expected_losses[step]) for step in common_steps), default=0.0)
    assert is_same or not framework.is_exact, f"{name}: other weights; losses differ by up to {difference:.3g}"
    return {"framework": name, **row, "is_identical": is_same, "loss_difference_max": 0.0 if is_same else difference}


def disturb(bed: Bed, framework: Framework) -> dict[str, Any]:
    """Kill rank 1's process, preempt its node, then the first node where that is asked for, and wait for the end."""
    await_checkpoint(bed, KILL_STEP)
    victims = bed.find_victims(framework.victim, 1)
    if not victims:
        raise StuckError(f"no process of rank 1 matches {framework.victim}: {bed.shell.find_processes()}")
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    row: dict[str, Any] = {"kill": await_recovery(bed, framework, "the kill", set(victims))}
    await_checkpoint(bed, bed.lines[-1]["step"] + SAVE_STEPS)
    joining = replace(framework, victim=framework.service or framework.victim)
    row["preemption"] = preempt(bed, joining, 1, set(bed.find_victims(joining.victim, 1)))
    if framework.loses_first:
        await_checkpoint(bed, bed.lines[-1]["step"] + SAVE_STEPS)
        row["first"] = preempt(bed, replace(framework, is_elastic=False, shrinks=False), 0, set())
    bed.wait(bed.is_over, "the end")
    assert bed.shell.get_status(1).name == "SUCCEEDED", bed.log()
    attempts = bed.read_result()["attempt"]
    assert not framework.loses_first or attempts == 2, f"{attempts} attempts, not 2"
    row |= count_repeated(bed, framework)
    starts = [line["start_cpu_s"] for line in bed.lines if "start_cpu_s" in line]
    return {"start_cpu_s": round(sorted(starts)[len(starts) // 2], 1), **row, "attempts": attempts}


def count_repeated(bed: Bed, framework: Framework) -> dict[str, int]:
    """Return all steps that ran again, if the program counts them: it may repeat steps long after a loss."""
    lines = [line for line in bed.lines if "repeated" in line]
    if not lines:
        return {}
    ends = [line for line, after in pairwise(lines) if "start_cpu_s" in after]  # of a process
    total = sum(line["repeated"] for line in [*ends, lines[-1]])
    losses = 2 + framework.part_count * framework.loses_first  # one part per lost node, all for the first node
    assert total <= losses * SAVE_STEPS, f"{total} steps ran again after {losses} losses"
    return {"repeated_steps": total}


def await_checkpoint(bed: Bed, step: int) -> None:
    bed.wait(lambda: has_saved(bed.lines, step), f"a checkpoint after step {step}")


def preempt(bed: Bed, framework: Framework, node: int, old: set[int]) -> dict[str, Any]:
    count = len(bed.lines)
    bed.shell.run("local", "preempt", "1", "--node", str(node), "--notice", str(NOTICE_S))
    found = await_recovery(bed, framework, f"the preemption of node {node}", old)
    if framework.shrinks:
        bed.wait(lambda: 1 in read_ranks(bed, count), "a step of the other node alone")
        alone = count + read_ranks(bed, count).index(1)
        bed.wait(lambda: 2 in read_ranks(bed, alone), "a step together with the new node")
        joined = alone + read_ranks(bed, alone).index(2)
        found["lost_steps_at_join"] = bed.lines[joined - 1]["step"] - (bed.lines[joined]["step"] - 1)
        assert found["lost_steps_at_join"] <= SAVE_STEPS + 1, f"steps lost when the node was replaced: {found}"
    return found


def read_ranks(bed: Bed, start: int) -> list[int]:
    return [line["ranks"] for line in bed.lines[start:]]


def await_recovery(bed: Bed, framework: Framework, what: str, old: set[int]) -> dict[str, Any]:
    """Return the seconds until a step after the recovery, the steps that were repeated, and whether it restarted.

    An elastic program is recovered when rank 1 has a new process; any other one when it reports a start.
    """
    begin_s, count = time.monotonic(), len(bed.lines)

    def has_started() -> bool:
        return any("start_cpu_s" in line for line in bed.lines[count:])

    def has_joined() -> bool:
        return framework.is_elastic and bool(set(bed.find_victims(framework.victim, 1)) - old)

    bed.wait(lambda: has_started() or has_joined(), f"a new start after {what}")
    joined = len(bed.lines)
    bed.wait(lambda: has_started() or len(bed.lines) > joined, f"a step after {what}")
    seconds = round(time.monotonic() - begin_s, 1)
    is_restarted = has_started()
    lost = 0
    if is_restarted:
        place = next(place for place in range(count, len(bed.lines)) if "start_cpu_s" in bed.lines[place])
        newest = max(line["step"] for line in bed.lines[:place])
        lost = max(0, newest - (bed.lines[place]["step"] - 1))  # replicas that started first may be further
    assert lost <= framework.part_count * (SAVE_STEPS + 1), f"{lost} steps lost after {what}"
    return {"recovery_s": seconds, "lost_steps": lost, "is_restarted": is_restarted}


def has_saved(lines: list[dict[str, Any]], step: int) -> bool:
    return bool(lines) and lines[-1]["step"] >= step and bool(lines[-1].get("checkpoint_step"))
