"""Invariants that must hold at every instant of every history, one function each, named by its letter and number.

S1-S19 are safety: checked whenever something happens. L1-L3 are liveness: checked when faults have stopped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from broker.jobs.allowance import LATE_S, UNATTENDED_S
from broker.jobs.health import GANG_UNREACHABLE_S_MIN, UNREACHABLE_S_MIN
from broker.jobs.monitor import LEASE_EVERY_S
from broker.types import JobStatus, NodeState, OutcomeKind, RunStatus
from tests.simulation.events import IS_TERMINAL, LIMITED, LOST, OTHER_FAILURES, REFUSED, TERMINAL, Event, Violation
from tests.simulation.groups import (
    check_g1_the_group_is_up,
    check_g3_ends_have_a_cause,
    check_g5_addresses_are_fresh,
    check_g6_delays_are_kept,
    check_g7_running_groups_stay,
)
from tests.simulation.left import check_s7_left_success_is_heard
from tests.simulation.records import (
    check_fresh_list,
    check_s3_only_the_lost_are_collected,
    check_s3_records_outlive_nodes,
    check_s3_replacements_are_spared,
    check_s3_young_nodes_are_spared,
    check_s4_stale_calls,
    note_end,
)
from tests.simulation.services import (
    check_v1_no_double_replica,
    check_v2_no_replica_is_forgotten,
    check_v6_a_balancer_is_there,
)
from tests.simulation.starts import (
    check_s4_one_active_attempt,
    check_s7_deaths_are_true,
    check_s7_no_start_after_a_cancel,
    check_s7_no_start_after_success,
    check_s7_no_start_after_the_end,
    check_s15_needs_come_first,
    check_s17_restarts_are_bounded,
    check_s19_broken_gpus_are_left,
    check_whole_gang,
    note_moves,
)
from tests.simulation.turns import check_l1_late_gangs_go, check_s13_no_placement_is_passed_over, note_search
from tests.simulation.world import OWNER

if TYPE_CHECKING:
    from tests.simulation.machines import MachineRun
    from tests.simulation.universe import Universe

L3_MARGIN_S = 10.0
LEASE_CALL_S = 0.1  # a lease is on its way to its node this long at most: bills recorded meanwhile are not in it


def check_s1_intent_first(universe: Universe, event: Event) -> None:
    """Check that no node is made unless its intent is on disk and open.

    Stopped processes and hung calls may come too late.
    """
    assert event.request is not None
    rows = universe.read("SELECT outcome FROM intents WHERE token = ?", (event.request.token,))
    if not rows:
        raise Violation("S1", f"{event.request.cluster} is made and no intent was written")
    if not universe.file.is_intent_synced(event.request.token):
        raise Violation("S1", f"{event.request.cluster} is made, and a power cut would lose its intent")
    may_be_late = event.process is None or event.process.was_stopped or event.request.cluster in universe.stuck
    if rows[0][0] is not None and not may_be_late:
        raise Violation("S1", f"{event.request.cluster} is made by an intent closed as `{rows[0][0]}`")
    if rows[0][0] is not None:
        universe.memory.setdefault("late", {})[event.request.token] = event.process


def check_s2_no_twins(universe: Universe, event: Event) -> None:
    """Check that each cluster, attempt, rank, zone and kind has at most one live node, whatever is collected later."""
    assert event.request is not None
    live: dict[tuple[object, ...], str] = {}
    job_id = universe.get_job_id(event.request.cluster)
    whole = universe.tasks[job_id].num_nodes if job_id else 1
    gang = [each for each in universe.list_live_nodes() if each.cluster == event.request.cluster]
    # Made too late, by a process that was killed before it could end them: the collector ends them.
    late = universe.memory.get("late", {})
    orphans = {token for token, process in late.items() if process is None or not process.is_alive}
    # A kind of machines has a price of its own.
    counts = Counter(
        (node.attempt, node.zone, node.is_spot, node.usd_hour) for node in gang if node.token not in orphans
    )
    if job_id and max(counts.values(), default=0) > whole:
        raise Violation("S2", f"{event.request.cluster} has more than {whole} live nodes in one zone: {counts}")
    replacements = universe.list_replacement_tokens(event.request.cluster, whole)
    for node in gang:
        if node.token in replacements or node.token in orphans:
            continue
        key = (node.cluster, node.attempt, node.rank, node.zone, node.is_spot, node.usd_hour)
        if live.setdefault(key, node.id) != node.id:
            raise Violation("S2", f"{live[key]} and {node.id} are both rank {node.rank} of {node.cluster}")


def check_s3_owned_or_dying(universe: Universe, event: Event) -> None:
    """Measure how long live nodes of ours are in no record and no open intent, and not asked to end."""
    now_s = event.time_s
    last_s = universe.memory.get("S3", now_s)
    universe.memory["S3"] = now_s
    unowned = universe.list_unowned_nodes()
    since_s = universe.unowned_since_s
    universe.unowned_since_s = {node.id: since_s.get(node.id, now_s) for node in unowned}
    universe.unowned_s += sum(now_s - last_s for node in unowned if node.id in since_s)


def check_s4_stale_writes(universe: Universe, event: Event) -> None:
    """Check that a replaced leader changes nothing in the store."""
    store = event.process.store if event.process else None
    epoch = store.epoch if store is not None else None
    if epoch is not None and "leader" not in event.written:
        newest = universe.read("SELECT epoch FROM leader")[0][0]
        if newest != epoch:
            raise Violation("S4", f"a leader of epoch {epoch} wrote {event.written} in epoch {newest}")


def check_s5_healthy_work_is_kept(universe: Universe, event: Event) -> None:
    """Check that a working gang is only ended for a valid reason, not because of one odd answer."""
    node = event.node
    assert node is not None
    run = universe.gang.find_run(node.cluster)
    if run is None or node.id not in run.ids or not universe.gang.is_working(run):
        return
    row = universe.read("SELECT status, cancel_requested FROM jobs WHERE id = ?", (run.job,))[0]
    peers = universe.cloud.find(run.ids)
    is_excused = (
        row[0] in (JobStatus.CANCELLED, JobStatus.CANCELLING)
        or row[1]
        or run.cluster in universe.asked_down
        or run.cluster in universe.memory.get("moved", ())
        or any(peer.state is NodeState.TERMINATED or peer.reason for peer in peers)
        or universe.gang.was_silent(run.ids, one_s=UNREACHABLE_S_MIN, all_s=GANG_UNREACHABLE_S_MIN)
        or universe.gang.is_hanging(run)
        or universe.is_over_budget(run.job)
        or universe.is_over_duration(run)
    )
    if not is_excused:
        status = universe.gang.measure(run)[1]
        raise Violation("S5", f"{node.id} of {node.cluster} is ended while its program is {status} (job {row[0]})")


def check_s6_checkpoints_grow(universe: Universe, event: Event) -> None:
    """Check that saved progress never goes back, neither in step nor in attempt."""
    run = event.run
    assert run is not None
    newest = universe.memory.setdefault("S6", {})
    root = universe.gang.roots.get(run.job, run.job)
    step, attempt = newest.get(root, (0, 0))
    if event.step < step or run.attempt < attempt:
        raise Violation("S6", f"job {run.job} saved step {event.step} of attempt {run.attempt} after {step}, {attempt}")
    newest[root] = (event.step, run.attempt)


def check_s7_ends_are_final(universe: Universe, event: Event) -> None:
    """Check that an ended job never changes."""
    if "jobs" not in event.written:
        return
    ended = universe.memory.setdefault("S7", {})
    for job_id, status, is_terminal, *rest in universe.read(
        "SELECT id, status, is_terminal, failure, ended_s FROM jobs"
    ):
        end = (status, *rest)
        if is_terminal or status in TERMINAL:
            ended.setdefault(job_id, end)
        if ended.get(job_id, end) != end:
            raise Violation("S7", f"job {job_id} was {ended[job_id]} and is {end}")


def note_cancels(universe: Universe, event: Event) -> None:
    if "jobs" in event.written:
        asked = universe.memory.setdefault("cancels", {})
        for (job_id,) in universe.read("SELECT id FROM jobs WHERE cancel_requested"):
            asked.setdefault(job_id, event.time_s)


def check_s7_success_is_kept(universe: Universe, event: Event) -> None:
    """Check that a broker that has heard of a program's success never calls that attempt lost, or ended."""
    if "attempts" not in event.written:
        return
    for key, process in universe.gang.success_seen_by.items():
        if process is event.process:
            cluster, run = key[0], universe.gang.runs[key]
            sql = "SELECT outcome_kind FROM attempts WHERE job_id = ? AND number = ?"
            rows = universe.read(sql, (run.job, run.attempt))
            if rows and rows[0][0] in (*LOST, *LIMITED):
                raise Violation("S7", f"{cluster} has succeeded and counts as {rows[0][0]}")


def check_s8_only_ours(universe: Universe, event: Event) -> None:
    """Check that every node we end carries our tag and a token from our journal."""
    node = event.node
    assert node is not None
    is_known = universe.read("SELECT 1 FROM intents WHERE token = ?", (node.token,))
    if node.owner != OWNER or not is_known:
        raise Violation("S8", f"{node.id} of `{node.owner}` is ended")


def note_bills(universe: Universe, event: Event) -> None:
    """Note when each node was first on record, since billing starts at its creation, and when it was gone."""
    if "nodes" in event.written:
        known: dict[str, float] = universe.memory.setdefault("bills", {})
        gone: dict[str, float] = universe.memory.setdefault("gone", {})
        for node_id, ended_s in universe.read("SELECT id, ended_s FROM nodes"):
            known.setdefault(node_id, event.time_s)
            if ended_s is not None:
                gone.setdefault(node_id, event.time_s)


def check_s9_budget(universe: Universe, event: Event) -> None:
    """Check that a job whose money is spent requests nothing more, except for one poll."""
    assert event.request is not None
    job_id = universe.get_job_id(event.request.cluster)
    budget_usd = universe.budgets.get(job_id) if job_id else None
    # A call that hung is judged by when it was made.
    hung_s = universe.cloud.clock.now_s() - universe.cloud.asked_s[event.request.token]
    look_s = universe.mix.poll_s + 1.0 + hung_s
    if budget_usd is not None and universe.measure_recorded_usd(job_id, ago_s=look_s) > budget_usd:
        raise Violation("S9", f"job {job_id} has spent its {budget_usd:g} USD and asks for {event.request.cluster}")


def check_s10_unknown_is_not_failed(universe: Universe, event: Event) -> None:
    """Check that an intent is closed as refused only when nothing of it lives: no answer is not a refusal."""
    if "intents" not in event.written:
        return
    closed = universe.read(f"SELECT token, outcome FROM intents WHERE outcome IN {REFUSED}")
    refused = {token: outcome for token, outcome in closed if token in universe.cloud._ids_by_token}
    for node in universe.list_live_nodes() if refused else ():
        if node.token in refused and node.created_s < event.time_s:
            raise Violation("S10", f"{node.id} of {node.cluster} lives and its intent is `{refused[node.token]}`")


def check_s12_one_effect_a_request(universe: Universe, event: Event) -> None:
    """Check that the same request made twice is one job."""
    if "jobs" not in event.written:
        return
    count = universe.read("SELECT count(*) FROM jobs")[0][0]
    if count > universe.requests_made:
        raise Violation("S12", f"{universe.requests_made} requests made {count} jobs")


def check_ends_are_true(universe: Universe, event: Event) -> None:
    """Check S7 and L2: a job's recorded end is how it did end."""
    if "jobs" not in event.written:
        return
    checked = universe.memory.setdefault("truth", set())
    for job_id, status, cancel_requested, failure, kind in universe.read(
        f"SELECT id, status, cancel_requested, failure, outcome_kind FROM jobs WHERE status IN {TERMINAL}"
    ):
        if job_id in checked:
            continue
        checked.add(job_id)
        runs = universe.gang.runs_by_job.get(job_id, [])
        states = [universe.gang.measure(run)[1:] for run in runs]
        if kind == OutcomeKind.GROUP_ENDED:
            continue  # see `groups.py`
        if status == JobStatus.SUCCEEDED and (RunStatus.SUCCEEDED, 0) not in states:
            raise Violation("S7", f"job {job_id} is SUCCEEDED, and its runs {states}")
        if status == JobStatus.CANCELLED and not cancel_requested and kind != OutcomeKind.DEPENDENCY_FAILED:
            raise Violation("S7", f"job {job_id} is CANCELLED without a request")
        if status == JobStatus.FAILED:
            failed = any(universe.gang.has_died(run) for run in runs)
            if not failed and kind not in OTHER_FAILURES:
                raise Violation("S7", f"job {job_id} is FAILED ({failure}), and its runs {states}")
        if status in (JobStatus.FAILED_CONTROLLER, JobStatus.FAILED_SETUP):
            raise Violation("S7", f"job {job_id} is {status}: {failure}")
        if (RunStatus.SUCCEEDED, 0) in states and status not in (JobStatus.SUCCEEDED, JobStatus.CANCELLED):
            last = states[-1]
            if last == (RunStatus.SUCCEEDED, 0) and kind not in LIMITED:
                raise Violation("S7", f"job {job_id} is {status} ({failure}), and its program succeeded")


def check_l1_unowned_go(universe: Universe, event: Event) -> None:
    """Check that after the last fault no node stays unowned beyond the limit."""
    from tests.simulation.universe import L1_S

    for node_id, since_s in universe.unowned_since_s.items():
        is_seen = universe.cloud.find([node_id])[0].account == universe.account
        seen_s = max(since_s, universe.healed_s, universe.login_s)
        if event.time_s - seen_s > L1_S and is_seen and not universe.mix.leaves_broker_dead:
            raise Violation("L1", f"{node_id} has had no owner for {event.time_s - since_s:.0f} s")


def check_l2_jobs_end(universe: Universe, event: Event) -> None:
    """Check that after the last fault every job ends and leaves nothing behind."""
    late_s = universe.mix.end_s_max
    if event.time_s - universe.healed_s > late_s and not universe.mix.leaves_broker_dead:
        left = [
            *(
                f"job {row[0]} {row[1]}"
                for row in universe.read(f"SELECT id, status FROM jobs WHERE NOT {IS_TERMINAL}")
            ),
            *(f"cluster {row[0]}" for row in universe.read("SELECT name FROM clusters")),
            *(node.id for node in universe.list_live_nodes()),
        ]
        raise Violation("L2", f"{late_s:.0f} s after the last fault there are {', '.join(left)}")


def find_allowance_s(universe: Universe, job_id: int) -> float:
    """Return how long the job's machines may run without a broker, as its user wrote it."""
    unattended_s = universe.tasks[job_id].unattended_s
    return UNATTENDED_S if unattended_s is None else unattended_s


def check_l3_unattended_time_is_bounded(universe: Universe, event: Event) -> None:
    """Check that no node given a program lives longer than its allowance after its broker's last word."""
    live = {node.id for node in universe.list_live_nodes()}
    heard_s: dict[str, tuple[float, MachineRun]] = {}  # a node may have had several runs: its lease is the newest
    for run in universe.gang.runs.values():
        for member in run.members:
            last_s = run.renewed_s.get(member.id, member.joined_s)
            heard_s[member.id] = max(heard_s.get(member.id, (last_s, run)), (last_s, run), key=lambda each: each[0])
    for node_id in live & heard_s.keys():
        last_s, run = heard_s[node_id]
        alone_s = event.time_s - last_s
        if alone_s > find_allowance_s(universe, run.job) + L3_MARGIN_S:
            raise Violation("L3", f"{node_id} of {run.cluster} runs {alone_s:.0f} s after its broker's last word")


def check_l3_lease_is_allowed(universe: Universe, event: Event) -> None:
    """Check that a lease ends within the allowance, and at most one renewal after the budget is used up."""
    run = event.run
    assert run is not None
    if event.lease_s > find_allowance_s(universe, run.job):
        raise Violation("L3", f"{event.name} may continue for {event.lease_s:.0f} s")
    budget_usd = universe.budgets.get(run.job)
    if budget_usd is not None:
        usd_s = sum(node.usd_hour for node in universe.cloud.find(run.ids[: universe.tasks[run.job].num_nodes])) / 3600
        # Above the budget where the clocks differ.
        recorded_usd = universe.measure_recorded_usd(run.job, ago_s=LEASE_CALL_S)
        universe.memory[f"spent when heard {run.job}"] = recorded_usd
        spent_usd = recorded_usd + usd_s * event.lease_s
        if spent_usd > max(budget_usd, recorded_usd) + usd_s * LEASE_EVERY_S + 1e-9:
            raise Violation("L3", f"{run.cluster} may spend {spent_usd:.4f} USD alone; its budget is {budget_usd:g}")


def check_s14_useful_nodes_are_left_alone(universe: Universe, event: Event) -> None:
    """Check that no node ends itself while its program works and its broker was heard within its allowance."""
    run = event.run
    assert run is not None
    goal = universe.tasks[run.job].goal
    allowance_s = find_allowance_s(universe, run.job)
    if goal is not None and goal.deadline_hours is not None:
        allowance_s = min(allowance_s, LATE_S)
    alone_s = event.time_s - run.renewed_s[event.name]
    is_early = alone_s < allowance_s - L3_MARGIN_S and not _is_spent(universe, run, alone_s)
    is_early = is_early and not universe.is_over_duration(run)
    if universe.gang.is_working(run) and is_early:
        raise Violation(
            "S14", f"{event.name} of {run.cluster} ends by itself, {event.reason}, after {alone_s:.0f} s alone"
        )


def _is_spent(universe: Universe, run: MachineRun, alone_s: float) -> bool:
    """Return whether the recorded cost uses up the budget, or was due to by now when the broker was last heard."""
    budget_usd = universe.budgets.get(run.job)
    if budget_usd is None:
        return False
    usd_s = sum(node.usd_hour for node in universe.cloud.find(run.ids[: universe.tasks[run.job].num_nodes])) / 3600
    heard_usd = universe.memory.get(
        f"spent when heard {run.job}", 0.0
    )  # more than is on record if the clock was set back
    return max(heard_usd, universe.measure_recorded_usd(run.job)) + usd_s * alone_s >= budget_usd


Checker = Callable[["Universe", Event], None]
CHECKERS: dict[str, tuple[Checker, ...]] = {
    "ask": (check_s4_stale_calls,),
    "list": (check_fresh_list,),
    "create": (check_s1_intent_first, check_s9_budget),
    "created": (check_s2_no_twins,),
    "terminate": (
        note_end,
        check_s8_only_ours,
        check_s5_healthy_work_is_kept,
        check_s3_young_nodes_are_spared,
        check_s3_replacements_are_spared,
    ),
    "start": (
        check_s4_one_active_attempt,
        check_s7_no_start_after_the_end,
        check_s7_no_start_after_success,
        check_s7_no_start_after_a_cancel,
        check_whole_gang,
        check_s15_needs_come_first,
        check_s17_restarts_are_bounded,
        check_s19_broken_gpus_are_left,
    ),
    "lease": (check_l3_lease_is_allowed,),
    "self-end": (check_s14_useful_nodes_are_left_alone,),
    "release": (check_g1_the_group_is_up,),
    "save": (check_s6_checkpoints_grow,),
    "search": (note_search,),
    "commit": (
        note_cancels,
        note_moves,
        note_bills,
        check_s13_no_placement_is_passed_over,
        check_s3_only_the_lost_are_collected,
        check_s3_records_outlive_nodes,
        check_s7_success_is_kept,
        check_s7_deaths_are_true,
        check_s7_left_success_is_heard,
        check_s4_stale_writes,
        check_s7_ends_are_final,
        check_ends_are_true,
        check_g3_ends_have_a_cause,
        check_g6_delays_are_kept,
        check_g7_running_groups_stay,
        check_s10_unknown_is_not_failed,
        check_s12_one_effect_a_request,
        check_v1_no_double_replica,
        check_v2_no_replica_is_forgotten,
    ),
    "tick": (
        check_s3_owned_or_dying,
        check_l1_unowned_go,
        check_l1_late_gangs_go,
        check_l2_jobs_end,
        check_g5_addresses_are_fresh,
        check_l3_unattended_time_is_bounded,
        check_v6_a_balancer_is_there,
    ),
}


def check_all(universe: Universe, event: Event) -> None:
    for check in CHECKERS.get(event.kind, ()):
        check(universe, event)


__all__ = ["CHECKERS", "TERMINAL", "Any", "Event", "Violation", "check_all"]
