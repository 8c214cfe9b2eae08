"""Killed at any effect of a service, broker, commands and balancer leave it as undisturbed ones would.

No replica is doubled (V1) or forgotten (V2), as many serve as before (V3), none is ended with a request (V4), the story
ends and leaves nothing (V5), and a killed balancer is started again (V6).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import pytest

from tests.simulation.mutants.table import SERVICE_MUTANTS, Mutant, hunt_service
from tests.simulation.service_scenes import SERVICE_SCENES, ServiceScene, play_service

FEW, MORE = 60, 30  # one of this many effects is killed at by `make test`, and by `make test-slow`
scenes = pytest.mark.parametrize("scene", SERVICE_SCENES, ids=lambda scene: scene.name)


def kill_at_each(scene: ServiceScene, is_killed: Callable[[int], bool]) -> None:
    """Kill at the chosen effects, which are counted from one that the scene's name picks."""
    calm = play_service(scene)
    assert not calm.failure, calm.failure
    assert calm.points > 30
    first = zlib.crc32(scene.name.encode()) % FEW
    for kill_at in range(1, calm.points + 1):
        if not is_killed(kill_at - first):
            continue
        result = play_service(scene, kill_at=kill_at)
        assert not result.failure, f"killed at {kill_at}: {result.failure}"
        assert result.kills["kill:point"] == 1


@scenes
def test_a_kill_at_some_effects_doubles_and_forgets_no_replica(scene: ServiceScene) -> None:
    kill_at_each(scene, lambda place: place % FEW == 0)


@pytest.mark.long
@scenes
def test_a_kill_at_more_effects_doubles_and_forgets_no_replica(scene: ServiceScene) -> None:
    kill_at_each(scene, lambda place: place % MORE == 0 and place % FEW != 0)


@pytest.mark.exhaustive
@scenes
def test_a_kill_at_any_effect_doubles_and_forgets_no_replica(scene: ServiceScene) -> None:
    kill_at_each(scene, lambda place: place % MORE != 0)


@pytest.mark.parametrize("mutant", SERVICE_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_bug_of_services_is_caught(mutant: Mutant) -> None:
    catch = hunt_service(mutant)
    assert catch is not None, f"{mutant.name} is not detected"
    assert catch.letter in mutant.letters.split(), catch.failure
