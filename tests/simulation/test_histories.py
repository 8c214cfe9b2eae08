"""A thousand histories full of faults: no invariant breaks, every fault meets every state, and a seed replays."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from broker.types import JobStatus
from tests.simulation import scenes
from tests.simulation.coverage import find_empty, fold
from tests.simulation.runner import Result, play_scene, play_seed
from tests.simulation.scenes import Scene

COVERED = 400  # seeds that meet every cell together
CHUNK = 100
UNOWNED_S_MAX = 10.0  # mean over the seeds: a node of ours runs, and nobody knows of it
DIGESTS = "from tests.simulation.runner import play_seed; print(*(play_seed(seed).digest for seed in range(20, 32)))"


def explain(result: Result) -> str:
    return f"{result.failure}\n  python -m tests.simulation --seed {result.seed} --trace"


def test_every_fault_meets_a_job_in_every_state_and_nothing_breaks() -> None:
    cells: Counter[tuple[str, str]] = Counter()
    unowned_s = 0.0
    for seed in range(COVERED):
        result = play_seed(seed)
        assert not result.failure, explain(result)
        cells.update(fold(result.cells))
        unowned_s += result.unowned_s
    assert not find_empty(cells)
    assert unowned_s <= UNOWNED_S_MAX * COVERED


@pytest.mark.parametrize("first", range(COVERED, 1000, CHUNK))
def test_no_history_breaks_what_must_hold(first: int) -> None:
    for seed in range(first, first + CHUNK):
        result = play_seed(seed)
        assert not result.failure, explain(result)


def test_a_seed_replays_whatever_the_order_of_hashes() -> None:
    folder = Path(__file__).parents[2]
    told = [
        subprocess.run(
            [sys.executable, "-c", DIGESTS],
            cwd=folder,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert told[0] == told[1]
    assert len(set(told[0].split())) == 12


ACTS = st.sampled_from(
    (
        scenes.cancel,
        scenes.take_down,
        scenes.retry,
        scenes.collect,
        scenes.use_cluster,
        scenes.submit_again,
        scenes.preempt,
        scenes.kill,
    )
)
PAUSES_S = st.sampled_from((0.0, 0.1, 1.0, 3.0, 10.0, 40.0))
JOBS = st.sampled_from(((), (3,), (3, 0)))


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(commands=st.lists(st.tuples(PAUSES_S, ACTS), max_size=10), exit_codes=JOBS, seed=st.integers(0, 9))
def test_no_sequence_of_commands_breaks_what_must_hold(
    commands: list[tuple[float, scenes.Act]], exit_codes: tuple[int, ...], seed: int
) -> None:
    after_s, acts = -3.0, []
    for pause_s, act in commands:
        after_s += pause_s
        acts.append((after_s, act))
    mix = scenes.make_mix(scenes.make_job(exit_codes=exit_codes), heal_s=600.0)
    ends = tuple(status for status in JobStatus if status.is_terminal)
    result = play_scene(Scene(name="commands", mix=mix, acts=tuple(acts), ends=ends, seed=seed))
    assert not result.failure, (result.failure, [(after_s, act.__name__) for after_s, act in acts])
