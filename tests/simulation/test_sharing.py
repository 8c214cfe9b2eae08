"""Histories of two to five controllers on one store: no invariant breaks, and every planted bug of claims and slots is
caught.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from tests.simulation.mutants.sharing import MUTANTS, Patches
from tests.simulation.sharing import SharedResult, describe_coverage, play_shared
from tests.simulation.slots import COVERED
from tests.tiers import exhaustive, long, spread

RICH = (9, 15, 2, 10)  # short histories of `make test`, in which all that it asks for occurs
MORE, MANY = 18, 48  # histories of `make test-slow` and `make test-exhaustive`
HUNTED_MAX = 40  # histories until a planted bug is caught
FAULTS = {"kill:anytime", "stop", "store:cut off", "store:restart", "store:crash", "store:answer lost"}


def check(result: SharedResult) -> None:
    seed = result.seed
    assert not result.failure, f"{result.failure}\n  python -m tests.simulation.sharing --seed {seed} --trace"


def test_controllers_share_jobs_whatever_happens_to_them_and_to_the_store() -> None:
    takeovers, faults, covered = 0, Counter[str](), Counter[str]()
    for seed in RICH:
        result = play_shared(seed)
        check(result)
        takeovers += result.takeovers
        faults += result.faults
        covered.update(result.covered)
    print(describe_coverage(covered, len(RICH)))
    assert all(covered[name] for name in COVERED), describe_coverage(covered, len(RICH))
    assert takeovers > 5 * len(RICH), "jobs change their controllers"
    assert faults.keys() >= FAULTS


@pytest.mark.parametrize("count", [pytest.param(MORE, marks=long), pytest.param(MANY, marks=exhaustive)])
def test_more_histories_of_several_controllers(count: int) -> None:
    covered = Counter[str]()
    for seed in range(count):
        result = play_shared(seed)
        check(result)
        covered.update(result.covered)
    print(describe_coverage(covered, count))
    assert all(covered[name] >= count / 5 for name in COVERED), describe_coverage(covered, count)


@pytest.mark.parametrize(
    ("plant", "letters", "first"), spread(MUTANTS, every=0, more=4), ids=[plant.__name__ for plant, *_ in MUTANTS]
)
def test_a_planted_bug_of_claims_or_slots_is_caught(plant: Callable[[], Patches], letters: str, first: int) -> None:
    with ExitStack() as stack:
        for each in plant():
            stack.enter_context(each)
        failure = next((found for seed in range(first, first + HUNTED_MAX) if (found := play_shared(seed).failure)), "")
    assert failure.partition(":")[0] in letters.split(), failure or "not caught"
