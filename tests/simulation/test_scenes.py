"""Killed at any effect or commit of any scene, the broker's next process ends the job as an undisturbed one would."""

from __future__ import annotations

import zlib

import pytest

from tests.simulation.group_scenes import ALL_SCENES
from tests.simulation.runner import play_scene
from tests.simulation.scenes import Scene

KILL_EVERY = 20  # effects of a scene killed at in `make test`; `make test-slow` kills at every second one of the others


def kill_at_each(scene: Scene, *, is_rest: bool) -> None:
    """Kill at every `KILL_EVERY`th effect, from one that the scene's name picks; the rest is every second other one."""
    calm = play_scene(scene)
    assert not calm.failure, calm.failure
    hit = {fault.rpartition(":")[2] for fault in calm.faults}
    for name in (name for name, rate in vars(scene.mix.cloud).items() if rate):
        assert any(name.startswith(fault) for fault in hit), f"{name} is never played"
    assert calm.points > 20
    first = zlib.crc32(scene.name.encode()) % KILL_EVERY
    for kill_at in range(1, calm.points + 1):
        if (kill_at % KILL_EVERY != first) != is_rest:
            continue
        if is_rest and kill_at % 2 == first % 2:
            continue
        result = play_scene(scene, kill_at=kill_at)
        assert not result.failure, (
            f"{result.failure}\n  python -m tests.simulation --scene '{scene.name}' --kill-at {kill_at} --trace"
        )
        assert result.kills["kill:point"] > calm.kills["kill:point"]  # one at a time may come after an earlier end


@pytest.mark.parametrize("scene", ALL_SCENES, ids=lambda scene: scene.name)
def test_a_kill_at_every_twentieth_effect_does_not_change_the_outcome(scene: Scene) -> None:
    kill_at_each(scene, is_rest=False)


@pytest.mark.long
@pytest.mark.parametrize("scene", ALL_SCENES, ids=lambda scene: scene.name)
def test_a_kill_at_every_second_other_effect_does_not_change_the_outcome(scene: Scene) -> None:
    kill_at_each(scene, is_rest=True)


@pytest.mark.parametrize(
    "name",
    [
        "a budget that is spent while its leader sleeps",
        "a leader that sleeps",
        pytest.param("a killed rank and two brokers", marks=pytest.mark.long),
        "two brokers",
    ],
)
def test_a_leader_that_is_stopped_at_any_deed_changes_nothing_about_the_end(name: str) -> None:
    scene = next(scene for scene in ALL_SCENES if scene.name == name)
    for stop_at in range(1, play_scene(scene).points + 1):
        result = play_scene(scene, stop_at=stop_at)
        assert not result.failure, (
            f"{result.failure}\n  python -m tests.simulation --scene '{name}' --stop-at {stop_at} --trace"
        )
