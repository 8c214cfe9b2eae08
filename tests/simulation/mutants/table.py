"""Known bugs of this kind of program, each planted into the product: a checker that lets one live proves little.

A mutant changes a function for as long as it lasts; nothing in the product knows of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

from broker.provision.lifecycle import Provisioner
from tests.simulation.group_scenes import ALL_SCENES, LONG_SCENES
from tests.simulation.mutants import believing, groups, jobs, provisioning, services, storage
from tests.simulation.runner import Result, play_scene
from tests.simulation.service_scenes import SERVICE_SCENES, play_service

POINTS_MAX = 100


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A planted bug.

    `letters`: the invariants that may fail. `scene`: the one sure to expose it, undisturbed or killed at one effect.
    """

    plant: Callable[[], provisioning.Patches]
    letters: str
    scene: str
    needs_collector: bool = False
    first_point: int = 1  # the effect at which the first kill of the hunt comes
    is_stop: bool = False  # exposed where a process is stopped at an effect; otherwise where it is killed

    @property
    def name(self) -> str:
        return self.plant.__name__.replace("_", " ")


@dataclass(frozen=True, kw_only=True)
class Catch:
    where: str
    failure: str

    @property
    def letter(self) -> str:
        return self.failure.partition(":")[0]


MUTANTS: tuple[Mutant, ...] = (
    Mutant(plant=provisioning.effect_before_intent, letters="S1", scene="plain"),
    Mutant(plant=provisioning.fresh_token_after_a_crash, letters="S2", scene="plain"),
    Mutant(plant=provisioning.fresh_token_on_retry, letters="S1 S2", scene="lost answers"),
    Mutant(plant=provisioning.forget_unanswered_intent, letters="S10 S1", scene="lost answers"),
    Mutant(plant=provisioning.intent_closed_before_the_record, letters="S2", scene="plain"),
    Mutant(plant=provisioning.part_of_a_gang_accepted, letters="S2", scene="a node that never boots"),
    Mutant(plant=provisioning.refusal_of_another_zone_believed, letters="S13", scene="full zones"),
    Mutant(plant=provisioning.refusal_for_ever, letters="S13", scene="a place that has room again"),
    Mutant(plant=provisioning.late_gang_kept, letters="L1", scene="mute calls and a long program"),
    Mutant(plant=provisioning.late_call_unheard, letters="S10", scene="mute calls"),
    Mutant(
        plant=provisioning.late_nodes_of_a_closed_intent_kept, letters="S2", scene="taken down while its call hangs"
    ),
    Mutant(plant=provisioning.answer_awaited_for_ever, letters="L2", scene="mute calls and no hedge"),
    Mutant(
        plant=provisioning.one_miss_believed, letters="S2 S4 S5 L1", scene="lists that are empty while no node answers"
    ),
    Mutant(
        plant=provisioning.absence_by_a_short_time_only,
        letters="S2 S4 S5 L1",
        scene="lists that are empty while no node answers",
    ),
    Mutant(
        plant=provisioning.absence_by_count_only,
        letters="S2 S4 S5 L1",
        scene="lists that are empty while no node answers",
    ),
    Mutant(plant=provisioning.empty_list_trusted, letters="S5", scene="lists that are empty while no node answers"),
    Mutant(plant=provisioning.silence_believed_at_once, letters="S5", scene="head out of reach for a while"),
    Mutant(
        plant=provisioning.dead_on_request_accepted,
        letters="S4 L1 S2 S3",
        scene="hung program and forgotten terminates",
    ),
    Mutant(
        plant=provisioning.failed_teardown_forgotten,
        letters="S4 L1 S3",
        scene="hung program on nodes that refuse to end",
    ),
    Mutant(
        plant=provisioning.relaunch_without_confirmed_end,
        letters="S4",
        scene="program that hangs again",
    ),
    Mutant(plant=provisioning.collector_ends_foreign_nodes, letters="S8", scene="plain", needs_collector=True),
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
    Mutant(plant=jobs.controller_death_fails_the_job, letters="S7", scene="plain"),
    Mutant(plant=jobs.terminal_state_overwritten, letters="S7", scene="plain"),
    Mutant(plant=jobs.outcome_and_status_in_two_commits, letters="S7", scene="plain"),
    Mutant(plant=jobs.stale_epoch_writes, letters="S4", scene="a leader that sleeps"),
    Mutant(plant=jobs.two_leaders, letters="S4", scene="two brokers"),
    Mutant(plant=jobs.broken_gpu_is_kept, letters="S19", scene="a broken GPU"),
    Mutant(plant=jobs.outcome_ignored, letters="S5 S7", scene="node lost after success"),
    Mutant(plant=jobs.lost_node_is_the_users_failure, letters="S7", scene="preemption"),
    Mutant(plant=jobs.cancel_forgotten_in_recovery, letters="S7", scene="cancel in recovery"),
    Mutant(plant=jobs.budget_unchecked, letters="S9 S11", scene="nodes that never boot"),
    Mutant(plant=jobs.lease_never_given, letters="L3", scene="no broker any more"),
    Mutant(plant=jobs.lease_never_renewed, letters="S11", scene="long program"),
    Mutant(plant=jobs.lease_of_a_quarter_of_an_hour, letters="S14", scene="broker away for an hour"),
    Mutant(plant=jobs.lease_regardless_of_the_budget, letters="L3", scene="broker away with little money left"),
    Mutant(
        plant=jobs.failure_left_behind_is_the_programs,
        letters="S7",
        scene="a preemption while the broker is away, with a bucket",
    ),
    Mutant(
        plant=jobs.outcome_left_behind_is_not_read,
        letters="S11 S7",
        scene="broker away while its job succeeds, with a bucket",
    ),
    Mutant(plant=jobs.request_id_ignored, letters="S12", scene="submitted twice"),
    Mutant(plant=jobs.retry_restarts_attempt_numbers, letters="S4", scene="retry of a failed job"),
    Mutant(plant=jobs.restarted_without_headway, letters="S17", scene="ranks killed at one step"),
    Mutant(plant=jobs.started_beside_the_old_program, letters="S4", scene="hung program"),
    Mutant(plant=jobs.report_of_the_old_run_counts, letters="S11 S17", scene="killed ranks and headway"),
    Mutant(plant=jobs.nodes_given_back_at_every_restart, letters="S11", scene="hung program"),
    Mutant(plant=jobs.restart_in_place_in_two_commits, letters="S11 S4 L2", scene="hung program"),
    Mutant(plant=jobs.survivors_given_back, letters="S11", scene="preemption"),
    Mutant(plant=jobs.needs_ignored, letters="S15", scene="a pipeline"),
    Mutant(plant=storage.intents_not_durable, letters="S1", scene="a cluster beside a job"),
    Mutant(plant=storage.synchronous_never_back_to_full, letters="S1", scene="plain"),
    Mutant(plant=storage.record_deleted_before_nodes_are_gone, letters="S3", scene="plain"),
    Mutant(
        plant=storage.no_epoch_fence_before_create,
        letters="S4",
        scene="a leader that sleeps while nodes boot",
        is_stop=True,
    ),
    Mutant(
        plant=storage.collector_ends_a_replacement_under_way,
        letters="S3",
        scene="elastic, collected while a node is on its way",
        needs_collector=True,
    ),
    Mutant(
        plant=storage.collector_ignores_age,
        letters="S3",
        scene="a call that is carried out again after its job, collected at once",
        needs_collector=True,
    ),
    Mutant(plant=storage.budget_per_attempt, letters="S9 S11", scene="budget over several attempts"),
    Mutant(plant=storage.stopwatch_counts_suspended_time, letters="S5", scene="a laptop that sleeps"),
    Mutant(plant=storage.lister_shares_an_older_list, letters="S16", scene="three jobs and slow lists"),
    Mutant(
        plant=believing.list_of_another_account_believed, letters="S3 S4 S5 S10", scene="a login for another account"
    ),
    Mutant(
        plant=believing.silent_region_counts_as_empty, letters="S3 S10", scene="lost answers of regions that are silent"
    ),
    Mutant(
        plant=believing.answering_agent_is_no_proof_of_life,
        letters="S5",
        scene="lists that are empty for ten minutes",
    ),
    Mutant(
        plant=believing.silent_gang_replaced_as_soon_as_one_node,
        letters="S5",
        scene="a gang out of reach for minutes",
    ),
    Mutant(
        plant=believing.silence_forgotten_at_a_restart,
        letters="S11",
        scene="a gang without power under a broker that restarts",
    ),
    Mutant(plant=storage.failed_list_is_a_loss, letters="S5", scene="a login that expires under a program"),
)


GROUP_MUTANTS: tuple[Mutant, ...] = (
    Mutant(plant=groups.start_before_all_tasks_are_set_up, letters="G1", scene="a group"),
    Mutant(
        plant=groups.start_in_two_regions,
        letters="G4",
        scene="a group that has not started follows a task to another region",
    ),
    Mutant(
        plant=groups.ended_task_is_waited_for,
        letters="L2 S11",
        scene="a group that restarts without a task that has ended",
    ),
    Mutant(
        plant=groups.addresses_not_sent_after_a_recovery, letters="G5", scene="a group whose auxiliary task is lost"
    ),
    Mutant(plant=groups.addresses_of_a_lost_task_are_kept, letters="G5", scene="a group whose auxiliary task is lost"),
    Mutant(
        plant=groups.one_task_is_forgotten_at_a_restart,
        letters="G1 G2 L2",
        scene="a group that restarts with its first task",
    ),
    Mutant(plant=groups.success_of_the_primary_tasks_ends_no_other, letters="L2", scene="a group"),
    Mutant(
        plant=groups.first_success_ends_the_group,
        letters="G3",
        scene="a group with two primary tasks, of which the second fails",
    ),
    Mutant(plant=groups.termination_delay_ignored, letters="G6", scene="a group whose auxiliary task ends later"),
    Mutant(
        plant=groups.cancelled_task_ends_no_other, letters="L2 S11", scene="a group whose primary task is cancelled"
    ),
    Mutant(
        plant=groups.success_is_overwritten_by_a_failure,
        letters="S7",
        scene="a group with two primary tasks, of which the second fails",
    ),
    Mutant(
        plant=groups.running_group_moves_at_once,
        letters="G7",
        scene="a running group moves to a region with capacity",
    ),
    Mutant(
        plant=groups.both_tasks_move_to_each_other,
        letters="S11",
        scene="a group that has not started follows a task to another region",
    ),
    Mutant(plant=groups.budget_counts_the_whole_group, letters="S11", scene="a group with a budget for each task"),
    Mutant(plant=groups.retry_joins_the_old_group, letters="S11 G3 S7", scene="a failed group is retried"),
    Mutant(
        plant=groups.group_is_retried_in_several_commits,
        letters="S11",
        scene="a failed group is retried",
        first_point=110,
    ),
)


SERVICE_MUTANTS: tuple[Mutant, ...] = (
    Mutant(plant=services.replica_is_recorded_after_its_job, letters="V2", scene="a service"),
    Mutant(plant=services.drained_replica_is_ended_at_once, letters="V4", scene="a service that is updated"),
    Mutant(
        plant=services.old_version_is_drained_with_the_first_new_replica,
        letters="V3",
        scene="a service that is updated",
    ),
    Mutant(plant=services.service_is_forgotten_before_its_replicas_are_gone, letters="V2 V5", scene="a service"),
    Mutant(plant=services.replica_that_is_not_ready_is_not_counted, letters="V1", scene="a service"),
    Mutant(plant=services.balancer_is_started_once, letters="V6", scene="a service that is updated", first_point=45),
)


def hunt_service(mutant: Mutant) -> Catch | None:
    """Return the first play of a service's scene that exposes the mutant, or None."""
    scene = next(scene for scene in SERVICE_SCENES if scene.name == mutant.scene)
    with planted(mutant, is_collector_off=False):
        for point in (None, *range(mutant.first_point, mutant.first_point + POINTS_MAX)):
            if failure := play_service(scene, kill_at=point).failure:
                return Catch(where=scene.name if point is None else f"{scene.name}, killed at {point}", failure=failure)
    return None


def hunt(mutant: Mutant, *, is_collector_off: bool = False) -> Catch | None:
    """Return the first play of the scene that exposes the mutant, or None."""
    with planted(mutant, is_collector_off=is_collector_off):
        for where, play in _list_plays(mutant):
            if failure := play().failure:
                return Catch(where=where, failure=failure)
    return None


def _list_plays(mutant: Mutant) -> Iterator[tuple[str, Callable[[], Result]]]:
    """List the plays: the scene undisturbed, then with a kill, or a stop, at each effect."""
    scene = next(scene for scene in (*ALL_SCENES, *LONG_SCENES) if scene.name == mutant.scene)
    yield scene.name, partial(play_scene, scene)
    for point in range(mutant.first_point, mutant.first_point + POINTS_MAX):
        if mutant.is_stop:
            yield f"{scene.name}, stopped at {point}", partial(play_scene, scene, stop_at=point)
        else:
            yield f"{scene.name}, killed at {point}", partial(play_scene, scene, kill_at=point)


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
