"""Killed at any effect or commit of any scene, the broker's next process ends the job as an undisturbed one would."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import pytest

from tests.simulation.group_scenes import ALL_SCENES
from tests.simulation.runner import play_scene
from tests.simulation.scenes import Scene
from tests.tiers import spread

FEW, MORE = 60, 30  # one of this many effects is killed at by `make test`, and by `make test-slow`


def kill_at_each(scene: Scene, is_killed: Callable[[int], bool]) -> None:
    """Kill at the chosen effects, which are counted from one that the scene's name picks."""
    calm = play_scene(scene)
    assert not calm.failure, calm.failure
    hit = {fault.rpartition(":")[2] for fault in calm.faults}
    for name in (name for name, rate in vars(scene.mix.cloud).items() if rate):
        assert any(name.startswith(fault) for fault in hit), f"{name} is never injected"
    assert calm.points > 20
    first = zlib.crc32(scene.name.encode()) % FEW
    for kill_at in range(1, calm.points + 1):
        if not is_killed(kill_at - first):
            continue
        result = play_scene(scene, kill_at=kill_at)
        assert not result.failure, (
            f"{result.failure}\n  python -m tests.simulation --scene '{scene.name}' --kill-at {kill_at} --trace"
        )
        assert result.kills["kill:point"] > calm.kills["kill:point"]  # one at a time may come after an earlier end


each_scene = pytest.mark.parametrize("scene", ALL_SCENES, ids=lambda scene: scene.name)


@pytest.mark.parametrize("scene", spread(ALL_SCENES, every=16, more=3), ids=lambda scene: scene.name)
def test_a_kill_at_some_effects_does_not_change_the_outcome(scene: Scene) -> None:
    kill_at_each(scene, lambda place: place % FEW == 0)


@pytest.mark.parametrize("scene", spread(ALL_SCENES, every=0, more=3), ids=lambda scene: scene.name)
def test_a_kill_at_more_effects_does_not_change_the_outcome(scene: Scene) -> None:
    kill_at_each(scene, lambda place: place % MORE == 0 and place % FEW != 0)


@pytest.mark.exhaustive
@each_scene
def test_a_kill_at_any_effect_does_not_change_the_outcome(scene: Scene) -> None:
    kill_at_each(scene, lambda place: place % MORE != 0)


@pytest.mark.parametrize(
    "name",
    spread(
        [
            "a budget that is spent while its leader sleeps",
            "a leader that sleeps",
            "a killed rank and two brokers",
            "two brokers",
        ],
        every=0,
        more=4,
    ),
)
def test_a_leader_that_is_stopped_at_any_effect_changes_nothing_about_the_end(name: str) -> None:
    scene = next(scene for scene in ALL_SCENES if scene.name == name)
    for stop_at in range(1, play_scene(scene).points + 1):
        result = play_scene(scene, stop_at=stop_at)
        assert not result.failure, (
            f"{result.failure}\n  python -m tests.simulation --scene '{name}' --stop-at {stop_at} --trace"
        )
