"""Histories of job groups full of faults: no invariant breaks. `make test-exhaustive` plays all."""

from __future__ import annotations

import pytest

from tests.simulation.group_scenes import LONG_SCENES
from tests.simulation.runner import play_group, play_scene
from tests.simulation.scenes import Scene
from tests.tiers import exhaustive, long

FEW, ALL, CHUNK = 6, 306, 15


def play(first: int, last: int) -> None:
    for seed in range(first, last):
        result = play_group(seed)
        assert not result.failure, f"{result.failure}\n  python -m tests.simulation --groups --seed {seed} --trace"


def test_no_invariant_breaks_in_a_group_under_faults() -> None:
    play(0, FEW)


@pytest.mark.parametrize(
    "first", [pytest.param(first, marks=long if first == FEW else exhaustive) for first in range(FEW, ALL, CHUNK)]
)
def test_every_history_of_a_group_keeps_the_invariants(first: int) -> None:
    play(first, min(first + CHUNK, ALL))


@pytest.mark.long
@pytest.mark.parametrize("scene", LONG_SCENES, ids=lambda scene: scene.name)
def test_a_long_scene_ends_well(scene: Scene) -> None:
    result = play_scene(scene)
    assert not result.failure, result.failure
