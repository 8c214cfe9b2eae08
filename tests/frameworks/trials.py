"""Run one framework's template three ways: undisturbed, then with a killed worker and a preempted node."""

from __future__ import annotations

import os
import signal
import time
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
    whole = Bed(folder / "whole", template, {"STEP_S": "0", **common})
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
    """Kill rank 1's process, preempt its node, and wait for the end."""
    bed.wait(lambda: has_saved(bed.lines, KILL_STEP), "the first checkpoint")
    victims = bed.find_victims(framework.victim, 1)
    if not victims:
        raise StuckError(f"no process of rank 1 matches {framework.victim}: {bed.shell.find_processes()}")
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    killed = await_recovery(bed, framework, "the kill", set(victims))
    first = bed.lines[-1]["step"]
    bed.wait(lambda: has_saved(bed.lines, first + SAVE_STEPS), "a checkpoint after the kill")
    victims = bed.find_victims(framework.victim, 1)
    bed.shell.run("local", "preempt", "1", "--node", "1", "--notice", str(NOTICE_S))
    preempted = await_recovery(bed, framework, "the preemption", set(victims))
    bed.wait(bed.is_over, "the end")
    assert bed.shell.get_status(1).name == "SUCCEEDED", bed.log()
    starts = [line["start_cpu_s"] for line in bed.lines if "start_cpu_s" in line]
    return {
        "start_cpu_s": round(sorted(starts)[len(starts) // 2], 1),
        "kill": killed,
        "preemption": preempted,
        "attempts": bed.read_result()["attempt"],
    }


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
    is_restarted = has_started()
    lost = 0
    if is_restarted:
        place = next(place for place in range(count, len(bed.lines)) if "start_cpu_s" in bed.lines[place])
        newest = max(line["step"] for line in bed.lines[:place])
        lost = newest - (bed.lines[place]["step"] - 1)
        assert 0 <= lost <= SAVE_STEPS + 1, f"{lost} steps lost after {what}, at step {newest}"
    seconds = round(time.monotonic() - begin_s, 1)
    return {"recovery_s": seconds, "lost_steps": lost, "is_restarted": is_restarted}


def has_saved(lines: list[dict[str, Any]], step: int) -> bool:
    return bool(lines) and lines[-1]["step"] >= step and bool(lines[-1].get("checkpoint_step"))
