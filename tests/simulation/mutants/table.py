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
    needs_collector: bool = False

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


MUTANTS: tuple[Mutant, ...] = (
    Mutant(plant=provisioning.effect_before_intent, letters="S1"),
    Mutant(plant=provisioning.fresh_token_after_a_crash, letters="S2"),
    Mutant(plant=provisioning.fresh_token_on_retry, letters="S1 S2", seed=1),
    Mutant(plant=provisioning.forget_unanswered_intent, letters="S10 S1", seed=1),
    Mutant(plant=provisioning.intent_closed_before_the_record, letters="S2", scene="plain"),
    Mutant(plant=provisioning.part_of_a_gang_accepted, letters="S2", seed=1),
    Mutant(plant=provisioning.refusal_of_another_zone_believed, letters="L2", scene="full zones"),
    Mutant(plant=provisioning.refusal_for_ever, letters="L2", scene="all zones full for a minute"),
    Mutant(plant=provisioning.one_miss_believed, letters="S2 S4 S5 L1", seed=1),
    Mutant(plant=provisioning.absence_by_a_short_time_only, letters="S2 S4 S5 L1"),
    Mutant(plant=provisioning.absence_by_count_only, letters="S2 S4 S5 L1"),
    Mutant(plant=provisioning.empty_list_trusted, letters="S5", seed=9),
    Mutant(plant=provisioning.silence_believed_at_once, letters="S5", seed=8),
    Mutant(plant=provisioning.dead_on_request_accepted, letters="S4 L1 S2", seed=4),
    Mutant(plant=provisioning.failed_burial_forgotten, letters="S4 L1", seed=4),
    Mutant(plant=provisioning.relaunch_without_confirmed_end, letters="S4", seed=4),
    Mutant(plant=provisioning.collector_ends_foreign_nodes, letters="S8", needs_collector=True),
    Mutant(
        plant=provisioning.collector_reads_records_first,
        letters="S3 S5",
        scene="collecting while nodes come up",
        needs_collector=True,
    ),
    Mutant(
        plant=provisioning.collector_blind_to_intents,
        letters="S3 S5",
        scene="collecting while nodes come up",
        needs_collector=True,
    ),
    Mutant(plant=jobs.controller_death_fails_the_job, letters="S7", seed=1),
    Mutant(plant=jobs.terminal_state_overwritten, letters="S7", seed=1),
    Mutant(plant=jobs.stale_epoch_writes, letters="S4", seed=11),
    Mutant(plant=jobs.two_leaders, letters="S4", seed=2),
    Mutant(plant=jobs.outcome_ignored, letters="S5 S7", seed=8),
    Mutant(plant=jobs.lost_node_is_the_users_failure, letters="S7", seed=2),
    Mutant(plant=jobs.cancel_forgotten_in_recovery, letters="S7", scene="cancel in recovery"),
    Mutant(plant=jobs.budget_unchecked, letters="S9 S11", scene="nodes that never boot"),
    Mutant(plant=jobs.lease_never_given, letters="L3", scene="no broker any more"),
    Mutant(plant=jobs.lease_never_renewed, letters="S11", scene="long program"),
    Mutant(plant=jobs.request_id_ignored, letters="S12", seed=1),
    Mutant(plant=jobs.retry_counts_attempts_anew, letters="S4", scene="retry of a failed job"),
)


def hunt(mutant: Mutant, seeds: Iterable[int], *, is_collector_off: bool = False) -> Catch | None:
    """The first scene or seed that tells."""
    with planted(mutant, is_collector_off=is_collector_off):
        for tries, (where, play) in enumerate(_list_scenes(mutant.scene), 1):
            if failure := play().failure:
                return Catch(where=where, failure=failure, tries=tries)
        for tries, seed in enumerate(dict.fromkeys([mutant.seed, *seeds]), 1):
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
def planted(mutant: Mutant, *, is_collector_off: bool) -> Iterator[None]:
    with ExitStack() as stack:
        for each in mutant.plant():
            stack.enter_context(each)
        if is_collector_off:
            stack.enter_context(patch.object(Provisioner, "collect", _collect_nothing))
        yield


async def _collect_nothing(provisioner: Provisioner) -> int:
    return 0
