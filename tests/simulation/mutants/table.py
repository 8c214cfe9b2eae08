"""Known bugs of this kind of program, each planted into the product: a checker that lets one live proves little.

A mutant changes a function for as long as it lasts; nothing in the product knows of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

from broker.provision.lifecycle import Provisioner
from tests.simulation.mutants import jobs, provisioning
from tests.simulation.runner import Result, play_scene, play_seed
from tests.simulation.scenes import SCENES

SEEDS_MAX = 400
KILLS_MAX = 100


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """`letters`: the invariants that may tell. `scene`: the one that is sure to; else seeds are played."""

    plant: Callable[[], provisioning.Patches]
    letters: str
    seed: int = 0  # the first that is known to tell
    scene: str = ""

    @property
    def name(self) -> str:
        return self.plant.__name__.replace("_", " ")


@dataclass(frozen=True, kw_only=True)
class Catch:
    where: str
    failure: str
    tries: int

    @property
    def letter(self) -> str:
        return self.failure.partition(":")[0]


MUTANTS: tuple[Mutant, ...] = tuple(
    Mutant(plant=plant, letters="")
    for plant in (
        provisioning.effect_before_intent,
        provisioning.fresh_token_after_a_crash,
        provisioning.fresh_token_on_retry,
        provisioning.forget_unanswered_intent,
        provisioning.intent_closed_before_the_record,
        provisioning.part_of_a_gang_accepted,
        provisioning.refusal_of_another_zone_believed,
        provisioning.refusal_for_ever,
        provisioning.one_miss_believed,
        provisioning.absence_by_time_only,
        provisioning.absence_by_count_only,
        provisioning.empty_list_trusted,
        provisioning.silence_believed_at_once,
        provisioning.dead_on_request_accepted,
        provisioning.failed_burial_forgotten,
        provisioning.relaunch_without_confirmed_end,
        provisioning.collector_ends_foreign_nodes,
        provisioning.collector_reads_records_first,
        provisioning.collector_blind_to_intents,
        jobs.controller_death_fails_the_job,
        jobs.terminal_state_overwritten,
        jobs.stale_epoch_writes,
        jobs.two_leaders,
        jobs.outcome_ignored,
        jobs.lost_node_is_the_users_failure,
        jobs.cancel_forgotten_in_recovery,
        jobs.budget_unchecked,
        jobs.lease_never_given,
        jobs.lease_never_renewed,
        jobs.request_id_ignored,
        jobs.retry_counts_attempts_anew,
    )
)


def hunt(mutant: Mutant, seeds: Iterable[int], *, is_collector_off: bool = False) -> Catch | None:
    """The first scene or seed that tells."""
    with _planted(mutant, is_collector_off=is_collector_off):
        for tries, (where, play) in enumerate(_list_scenes(mutant.scene), 1):
            if failure := play().failure:
                return Catch(where=where, failure=failure, tries=tries)
        for tries, seed in enumerate(seeds, 1):
            if failure := play_seed(seed).failure:
                return Catch(where=f"seed {seed}", failure=failure, tries=tries)
    return None


def _list_scenes(name: str) -> Iterator[tuple[str, Callable[[], Result]]]:
    """The scene undisturbed, then with a kill at each deed."""
    for scene in SCENES:
        if scene.name == name:
            yield f"scene {name}", partial(play_scene, scene)
            for kill_at in range(1, KILLS_MAX):
                yield f"scene {name}, killed at {kill_at}", partial(play_scene, scene, kill_at=kill_at)


@contextmanager
def _planted(mutant: Mutant, *, is_collector_off: bool) -> Iterator[None]:
    with ExitStack() as stack:
        for each in mutant.plant():
            stack.enter_context(each)
        if is_collector_off:
            stack.enter_context(patch.object(Provisioner, "collect", _collect_nothing))
        yield


async def _collect_nothing(provisioner: Provisioner) -> int:
    return 0
