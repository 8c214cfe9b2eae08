"""Render the events of managed jobs: attempts, decisions and recoveries."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TypedDict

from broker.formatting import format_usd
from broker.types.outcomes import Outcome, OutcomeKind
from broker.wording.outcomes import (
    describe_lost_nodes,
    describe_outcome,
    explain_broken_gang,
    explain_setup_exit,
    explain_stall,
    name_exit_code,
)
from broker.wording.places import Place, describe_place
from broker.wording.waits import describe_slots


class KindFacts(TypedDict):
    """A kind of machines in an event: hours of work per hour (corrected and planned), and USD per hour of work."""

    name: str
    speed: float
    told: float
    seen_hours: float
    spot_usd_work_hour: float | None
    ondemand_usd_work_hour: float | None


def render_scheduled(*, schedule: str, due_s: float) -> str:
    due = time.strftime("%Y-%m-%d %H:%M", time.gmtime(due_s))
    return f"submitted by schedule {schedule}, due {due} UTC"


def render_attempt(*, number: int, place: Place, usd_hour: float) -> str:
    return f"attempt {number}: {describe_place(place)} at {format_usd(usd_hour)} USD/h"


def render_attempt_in_place(*, number: int, earlier: int) -> str:
    return f"attempt {number}: reuses the nodes of attempt {earlier}"


def render_started() -> str:
    return "the program was started"


def render_recovered(*, step: int, took_s: float | None = None) -> str:
    """Render the end of a recovery. `took_s` is None if the clock was set back in the meantime."""
    took = "" if took_s is None else f", {took_s:.1f} s after the loss"
    return f"recovered at step {step}{took}"


def render_attempt_lost(
    *, outcome: str, detail: str, step: int | None = None, kept_count: int | None = None, node_count: int | None = None
) -> str:
    text = describe_outcome(Outcome(kind=OutcomeKind(outcome), detail=detail, step=step))
    kept = "" if kept_count is None else f"; keeping {kept_count} of {node_count} nodes while replacing the rest"
    return f"{text}{kept}"


def render_lease_expired(*, allowance: str, step: int | None = None) -> str:
    outcome = Outcome(kind=OutcomeKind.LEASE_EXPIRED, detail=allowance, step=step)
    return f"{describe_outcome(outcome)}; restarting on new nodes"


def render_program_restarted(
    *, exit_code: int | None, cause: str, step: int | None, in_place: bool, checkpoint: int = 0
) -> str:
    at = f" at step {step}" if step else f" after checkpoint {checkpoint}" if checkpoint else ""
    nodes = _name_nodes(in_place=in_place)
    return f"the program exited with {name_exit_code(exit_code, cause)}{at}; restarting on {nodes}"


def render_stall_restarted(*, timeout_s: float, step: int, in_place: bool) -> str:
    return f"{explain_stall(timeout_s)} at step {step}; restarting on {_name_nodes(in_place=in_place)}"


def render_gang_restarted(*, reason: str, step: int, in_place: bool) -> str:
    return f"{explain_broken_gang(reason)} at step {step}; restarting on {_name_nodes(in_place=in_place)}"


def render_setup_retried(*, exit_code: int | None) -> str:
    return f"{explain_setup_exit(exit_code)} on reused nodes; retrying on new nodes"


def render_setup_restored(
    *, number: int, setup_s: float, size_gib: float, took_s: float, nodes: int, saved_usd: float
) -> str:
    """Render a restored `setup`. `saved_usd`: the price of the gang for the saved time."""
    where = "" if nodes == 1 else f" on {nodes} nodes"
    text = f"`setup` was skipped{where}: its files came from an archive of {size_gib:.2f} GiB in {took_s:.1f} s"
    return f"{text} instead of {setup_s:.1f} s, which saved {format_usd(saved_usd)} USD"


def render_setup_kept(*, number: int, setup_s: float, size_gib: float) -> str:
    return f"kept the files of `setup`, which took {setup_s:.1f} s, for later starts: {size_gib:.2f} GiB"


def render_setup_not_kept(*, number: int, reason: str) -> str:
    return f"`setup` is not cached: {reason}"


def render_launch_retried(*, cluster: str, error: str) -> str:
    return f"not started on {cluster}, trying another cluster: {error}"


def render_nodes_given_back(*, number: int) -> str:
    return f"releasing the nodes of attempt {number}; requesting new ones"


def render_group_placed(*, group: str, place: str, usd: float, apart_usd: float, near: str = "") -> str:
    """Render the place of a group. `near`: the task whose machines are already there; "" if chosen for all tasks."""
    if near:
        return f"group {group}: placing near task {near} in {place}"
    costs = f"{format_usd(usd)} USD for all tasks; {format_usd(apart_usd)} USD with each task in its cheapest location"
    return f"group {group}: placing in {place}, {costs}"


def render_group_ready(*, group: str, waiting: Sequence[str]) -> str:
    others = f"; waiting for {', '.join(waiting)}" if waiting else ""
    return f"set up for group {group}{others}"


def render_group_started(*, group: str, generation: int) -> str:
    again = "" if generation == 1 else f" (start {generation} of the group)"
    return f"all tasks of group {group} are up: the program may start{again}"


def render_group_restarted(*, group: str, cause: str, in_place: bool) -> str:
    why = f"task {cause} was lost" if cause else "another task was lost"
    return f"group {group} restarts because {why}; restarting on {_name_nodes(in_place=in_place)}"


def render_group_move(*, group: str, place: str, reason: str) -> str:
    return f"group {group}: leaving {place}: {reason}"


def render_last_lines(*, number: int, lines: Sequence[str], rank: int | None = None) -> str:
    of_rank = "" if rank is None else f" of rank {rank}"
    return "\n".join([f"last lines{of_rank} in attempt {number}:", *lines])


def render_ended(*, status: str, failure: str, outcome: str | None = None) -> str:
    return f"{status}: {failure}" if failure else status


# -- while it runs or waits


def render_decision(
    *,
    action: str,
    reason: str,
    work_left_hours: float,
    place: Place | None = None,
    usd_work_hour: float | None = None,
    time_left_hours: float | None = None,
    spare_hours: float | None = None,
    ondemand_usd_work_hour: float | None = None,
    expected_usd: Mapping[str, float] | None = None,
    machine: str | None = None,
    kinds: Sequence[KindFacts] = (),
) -> str:
    """Render a decision: `action` is "move", "stay" or "wait"; `place` is the target of a move or the current place.

    With machines of several `kinds`, `machine` is the kind at the place.
    """
    verb = {"move": "move to", "stay": "stay on"}.get(action)
    decision = "wait without machines" if verb is None else "stay"
    if verb and place is not None:
        pricing = "spot" if place["is_spot"] else "on-demand"
        type_ = place["instance_type"]
        named = type_ if machine in (None, type_) else f"{type_} ({machine})"
        decision = f"{verb} {named} {pricing} in {place['cloud']} {place['zones'][0]}"
        decision += f", {format_usd(usd_work_hour)} USD per hour of work"
    facts = [f"{work_left_hours:.1f} h of work left"]
    facts += [] if time_left_hours is None else [f"{time_left_hours:.1f} h to the deadline"]
    facts += [] if spare_hours is None else [f"on-demand must start within {spare_hours:.1f} h"]
    facts += (
        []
        if ondemand_usd_work_hour is None
        else [f"on-demand costs {format_usd(ondemand_usd_work_hour)} USD per hour of work"]
    )
    if expected_usd:
        costs = [f"{format_usd(usd)} USD by {name}" for name, usd in expected_usd.items()]
        facts.append(f"expected cost to finish: {', '.join(costs[:-1])} and {costs[-1]}")
    text = f"{decision}{f' ({reason})' if reason else ''}: {', '.join(facts)}"
    return f"{text}; {'; '.join(_describe_kind(each, kinds[-1]) for each in kinds)}" if kinds else text


def _describe_kind(kind: KindFacts, slowest: KindFacts) -> str:
    """Describe the speed of a kind relative to the slowest one, and the cost of an hour of work on it."""
    ratio, factor = kind["speed"] / slowest["speed"], kind["speed"] / kind["told"]
    speed = f"{kind['name']}" if kind is slowest else f"{kind['name']} does {ratio:.2g} times the work per hour"
    prices = [("spot", kind["spot_usd_work_hour"]), ("on-demand", kind["ondemand_usd_work_hour"])]
    texts = [f"{format_usd(usd)} USD {name}" for name, usd in prices if usd is not None]
    cost = f" at {' and '.join(texts)} per hour of work" if texts else ""
    seen = f", {factor:.2g} of the planned speed by the last {kind['seen_hours']:.1f} h" if kind["seen_hours"] else ""
    return f"{speed}{cost}{seen}"


def render_late() -> str:
    return "the deadline can no longer be met with the requested confidence; continuing"


def render_waiting(*, error: str, wait_s: float, hint: str = "") -> str:
    """Render a wait. `hint`, what a user can do about it, is missing in older events."""
    return f"{error}{f'; {hint}' if hint else ''}; retrying in {wait_s:.0f} s"


def render_queued(*, position: int, limit: int, project: str = "") -> str:
    return f"waiting for {describe_slots(limit, project)}, at position {position}"


def render_displacing(*, victim: int) -> str:
    return f"takes the slot of job {victim}, which has a lower priority and saves its state first"


def render_displaced(*, by: int) -> str:
    return f"job {by} has a higher priority and takes the slot; the program is signalled to save"


def render_slot_returned(*, by: int) -> str:
    return f"returned its slot to job {by}; it keeps its position in the queue and resumes from its newest checkpoint"


def render_advised(*, rank: int) -> str:
    return f"the cloud reports an elevated preemption risk for node {rank}"


def render_noticed(*, rank: int, place: Place, node: str = "") -> str:
    """Render a notice of a preemption. `node` is missing in older events."""
    name = f"node {rank} ({node})" if node else f"node {rank}"
    return f"the cloud announced the preemption of {name}: {describe_place(place)}"


def render_unseen(*, error: str, hint: str = "") -> str:
    """Render an error that hides the nodes. `hint`, the remedy, is missing in older events."""
    return f"cannot list the nodes: {error}" + (f"; {hint}" if hint else "")


def render_login_needed(*, error: str, hint: str = "") -> str:
    return f"cannot start machines until you act: {error}" + (f"; {hint}" if hint else "")


def render_flushing(*, text: str) -> str:
    return text


def render_shrunk(*, rank: int, left: int, node_count: int) -> str:
    return f"{describe_lost_nodes([rank])}; continuing on {left} of {node_count} nodes"


def render_head_moved(*, rank: int) -> str:
    return f"node {rank} now coordinates the others"


def render_unfit(*, rank: int, reason: str, wait_s: float, job: int) -> str:
    return (
        f"{reason}, on a replacement node: terminating it, next try in {wait_s:.0f} s; "
        f"its output is in `broker jobs logs {job}`, marked (rank{rank})"
    )


def render_node_unhealthy(*, rank: int, node: str, reason: str, days: float, is_remembered: bool) -> str:
    text = f"node {rank} ({node}) is unhealthy: {reason}; replacing it"
    return f"{text}, and not using its GPUs for {days:g} days" if is_remembered else text


def render_node_slow(*, rank: int, node: str, own_s: float, usual_s: float) -> str:
    return f"node {rank} ({node}) is slow: {own_s:.3g} s for its own part of a step, {usual_s:.3g} s on the others"


def render_network_slow(
    *,
    number: int,
    backend: str,
    expected_gbs: float,
    gang_gbs: float | None,
    pair: Sequence[int] | None,
    pair_gbs: float | None,
) -> str:
    parts = [] if gang_gbs is None else [f"an all-reduce reaches {gang_gbs * 8:.3g} Gbit/s"]
    if pair and pair_gbs is not None:
        parts.append(f"nodes {pair[0]} and {pair[1]} reach {pair_gbs * 8:.3g} Gbit/s")
    speeds = ", ".join(parts)
    return f"the network between the nodes is slower than expected: {speeds}, not {expected_gbs * 8:.3g} ({backend})"


def render_replacement_failed(*, error: str, wait_s: float | None = None) -> str:
    """Render a failed replacement; without `wait_s`, the other nodes are released."""
    then = "" if wait_s is None else f"; retrying in {wait_s:.0f} s"
    return f"cannot replace the lost node: {error}{then}"


def render_access_not_renewed(*, error: str) -> str:
    return f"cannot renew the nodes' bucket access: {error}"


def _name_nodes(*, in_place: bool) -> str:
    return "the same nodes" if in_place else "new nodes"
