"""Every known bug, planted into the product, is detected by the invariant that forbids it, despite other defences."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from tests.simulation import invariants
from tests.simulation.mutants.provisioning import forget_unanswered_intent
from tests.simulation.mutants.table import GROUP_MUTANTS, MUTANTS, Mutant, hunt, planted
from tests.simulation.runner import play_scene
from tests.simulation.scenes import SCENES
from tests.tiers import spread


@pytest.mark.parametrize("mutant", spread(MUTANTS, every=4, more=2), ids=lambda mutant: mutant.name)
@pytest.mark.parametrize(
    "is_collector_off", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["", "collector off"]
)
def test_a_planted_bug_is_caught(mutant: Mutant, is_collector_off: bool) -> None:
    if mutant.needs_collector and is_collector_off:
        return
    catch = hunt(mutant, is_collector_off=is_collector_off)
    assert catch is not None, f"{mutant.name} is not detected"
    assert catch.letter in mutant.letters.split(), catch.failure


@pytest.mark.parametrize("mutant", spread(GROUP_MUTANTS, every=0, more=4), ids=lambda mutant: mutant.name)
def test_a_planted_bug_of_job_groups_is_caught(mutant: Mutant) -> None:
    catch = hunt(mutant)
    assert catch is not None, f"{mutant.name} is not detected"
    assert catch.letter in mutant.letters.split(), catch.failure


def test_unowned_node_seconds_count_even_if_no_checker_fails() -> None:
    only_time = {"tick": (invariants.check_s3_owned_or_dying, invariants.check_l2_jobs_end)}
    mutant = Mutant(plant=forget_unanswered_intent, letters="", scene="")
    scene = next(scene for scene in SCENES if scene.name == "lost answers")
    with planted(mutant, is_collector_off=True), patch.object(invariants, "CHECKERS", only_time):
        assert play_scene(scene).unowned_s > 20.0
    assert play_scene(scene).unowned_s == 0.0
