"""Render outcomes and events as text for users. Only this module does, and no module parses the text.

Each kind of event has one function here, whose parameters are the event's data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from broker.types.outcomes import Event, EventKind, Outcome, OutcomeKind

if TYPE_CHECKING:
    from broker.types.market import Placement

Place = Mapping[str, Any]

_OUTCOMES: dict[OutcomeKind, Callable[[Outcome], str]] = {
    OutcomeKind.SUCCEEDED: lambda _: "succeeded",
    OutcomeKind.PROGRAM_FAILED: lambda outcome: f"failed with exit code {outcome.exit_code}",
    OutcomeKind.SETUP_FAILED: lambda _: "failed in setup",
    OutcomeKind.STALLED: lambda outcome: f"stalled at step {outcome.step}",
    OutcomeKind.GANG_BROKEN: lambda outcome: f"gang failed at step {outcome.step}",
    OutcomeKind.PREEMPTED: lambda outcome: f"preempted: {outcome.detail}{_after(outcome.step)}",
    OutcomeKind.NODE_LOST: lambda outcome: f"{outcome.detail}{_after(outcome.step)}",
    OutcomeKind.TAKEN_DOWN: lambda _: "the cluster was taken down",
    OutcomeKind.LEASE_EXPIRED: lambda outcome: (
        f"the unattended allowance of {outcome.detail} expired{_after(outcome.step)}"
    ),
    OutcomeKind.MOVED: lambda outcome: f"moved: {outcome.detail}" if outcome.detail else "moved",
    OutcomeKind.LAUNCH_FAILED: lambda outcome: f"not started: {outcome.detail}",
    OutcomeKind.REFUSED: lambda outcome: f"refused: {outcome.detail}",
    OutcomeKind.FILES_LOST: lambda _: "files were not uploaded",
    OutcomeKind.BUDGET_EXCEEDED: lambda _: "budget exceeded",
    OutcomeKind.CANCELLED: lambda _: "cancelled",
    OutcomeKind.SUPERSEDED: lambda _: "the state was restored",
    OutcomeKind.GANG_INCOMPLETE: lambda _: "the state was restored, but nodes of the gang were missing",
    OutcomeKind.NO_OFFER: lambda outcome: outcome.detail,
    OutcomeKind.DEPENDENCY_FAILED: lambda outcome: outcome.detail,
    OutcomeKind.OTHER: lambda outcome: outcome.detail,
}


def describe_outcome(outcome: Outcome | None) -> str:
    """Return how an attempt ended in a few words; empty while it has not."""
    return "" if outcome is None else _OUTCOMES[outcome.kind](outcome)


def describe_event(event: Event) -> str:
    """Return the event as a sentence, possibly with more lines; for a damaged event return its raw data."""
    try:
        return _EVENTS[event.kind](**event.data)
    except (TypeError, ValueError, KeyError, AttributeError, IndexError):
        return f"{event.kind.value}: {dict(event.data)}"


# -- details of outcomes and errors


def describe_lost_nodes(ranks: Sequence[int]) -> str:
    return f"node {' and '.join(map(str, ranks))} gone"


def describe_notice() -> str:
    return "the cloud gave notice"


def describe_lost_start(error: str) -> str:
    return f"lost while starting: {error}"


def explain_exit(exit_code: int | None, *, cause: str = "", times: int = 1, step: int | None = None) -> str:
    """Return why a job failed whose program exited with an error."""
    return f"`run` exited with {_name_code(exit_code, cause)}{_count(times, step)}"


def explain_setup_exit(exit_code: int | None) -> str:
    return f"`setup` exited with code {exit_code}"


def explain_stall(timeout_s: float, *, times: int = 1, step: int | None = None) -> str:
    return f"no new step for {timeout_s:g} s{_count(times, step)}"


def explain_broken_gang(reason: str, *, times: int = 1, step: int | None = None) -> str:
    return f"the gang failed ({reason}){_count(times, step)}"


def explain_lost_files(unflushed: str) -> str:
    return f"the program succeeded, but {unflushed}; they are lost with the nodes, which are terminated"


def explain_cancelled_run() -> str:
    return "the run was cancelled on its cluster"


def explain_budget(budget_usd: float, spent_usd: float) -> str:
    return f"the budget of {budget_usd:g} USD is used up ({spent_usd:.2f} spent); its checkpoints are kept"


def explain_dependency(job_id: int | None, name: str, status: str) -> str:
    """Return why a dependency failed; `job_id` is None if that job no longer exists."""
    job = "another job" if job_id is None else f"job {job_id} ({name})"
    return f"it depends on {job}, which is {status}"


def explain_failed_launches(tries: int, error: str) -> str:
    return f"the program could not be started on {tries} clusters: {error}"


# -- places


def make_place(placement: Placement) -> dict[str, object]:
    """Return a placement as the data of an event."""
    offer = placement.offer
    return {
        "cloud": offer.cloud,
        "region": offer.region,
        "zones": [offer.zone or offer.region, *placement.other_zones],
        "instance_type": offer.instance_type,
        "is_spot": placement.is_spot,
        "node_count": placement.node_count,
    }


def describe_place(place: Place) -> str:
    """Format as `2 x g5.xlarge spot in us-east-1a,b (aws)`, where any of the zones may be used."""
    pricing = "spot" if place["is_spot"] else "on-demand"
    zones = name_zones(place["zones"], place["region"])
    return f"{place['node_count']} x {place['instance_type']} {pricing} in {zones} ({place['cloud']})"


def name_zones(zones: Sequence[str], region: str) -> str:
    """Format as `us-east-1a,b,c`."""
    return ",".join([zones[0], *(zone.removeprefix(region) for zone in zones[1:])])


# -- a job's attempts


def _attempt(*, number: int, place: Place, usd_hour: float) -> str:
    return f"attempt {number}: {describe_place(place)} at {usd_hour:.2f} USD/h"


def _attempt_in_place(*, number: int, earlier: int) -> str:
    return f"attempt {number}: reuses the nodes of attempt {earlier}"


def _started() -> str:
    return "the program was started"


def _recovered(*, step: int, took_s: float | None = None) -> str:
    """`took_s` None: the clock was set back meanwhile."""
    took = "" if took_s is None else f", {took_s:.1f} s after the loss"
    return f"recovered at step {step}{took}"


def _attempt_lost(
    *, outcome: str, detail: str, step: int | None = None, kept_count: int | None = None, node_count: int | None = None
) -> str:
    text = describe_outcome(Outcome(kind=OutcomeKind(outcome), detail=detail, step=step))
    kept = "" if kept_count is None else f"; keeping {kept_count} of {node_count} nodes while replacing the rest"
    return f"{text}{kept}"


def _lease_expired(*, allowance: str, step: int | None = None) -> str:
    outcome = Outcome(kind=OutcomeKind.LEASE_EXPIRED, detail=allowance, step=step)
    return f"{describe_outcome(outcome)}; restarting on new nodes"


def _program_restarted(*, exit_code: int | None, cause: str, step: int | None, in_place: bool) -> str:
    at = f" at step {step}" if step else ""
    nodes = _name_nodes(in_place=in_place)
    return f"the program exited with {_name_code(exit_code, cause)}{at}; restarting on {nodes}"


def _stall_restarted(*, timeout_s: float, step: int, in_place: bool) -> str:
    return f"{explain_stall(timeout_s)} at step {step}; restarting on {_name_nodes(in_place=in_place)}"


def _gang_restarted(*, reason: str, step: int, in_place: bool) -> str:
    return f"{explain_broken_gang(reason)} at step {step}; restarting on {_name_nodes(in_place=in_place)}"


def _setup_retried(*, exit_code: int | None) -> str:
    return f"{explain_setup_exit(exit_code)} on reused nodes; retrying on new nodes"


def _launch_retried(*, cluster: str, error: str) -> str:
    return f"not started on {cluster}, trying another cluster: {error}"


def _nodes_given_back(*, number: int) -> str:
    return f"releasing the nodes of attempt {number}; requesting new ones"


def _last_lines(*, number: int, lines: Sequence[str], rank: int | None = None) -> str:
    of_rank = "" if rank is None else f" of rank {rank}"
    return "\n".join([f"last lines{of_rank} in attempt {number}:", *lines])


def _ended(*, status: str, failure: str, outcome: str | None = None) -> str:
    return f"{status}: {failure}" if failure else status


# -- while it runs or waits


def _decision(
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
) -> str:
    """Render a decision: `action` is "move", "stay" or "wait", `place` the target of a move or the current place."""
    verb = {"move": "move to", "stay": "stay on"}.get(action)
    decision = "wait without machines" if verb is None else "stay"
    if verb and place is not None:
        pricing = "spot" if place["is_spot"] else "on-demand"
        decision = f"{verb} {place['instance_type']} {pricing} in {place['cloud']} {place['zones'][0]}"
        decision += f", {usd_work_hour:.2f} USD per hour of work"
    facts = [f"{work_left_hours:.1f} h of work left"]
    facts += [] if time_left_hours is None else [f"{time_left_hours:.1f} h to the deadline"]
    facts += [] if spare_hours is None else [f"on-demand must start within {spare_hours:.1f} h"]
    facts += (
        [] if ondemand_usd_work_hour is None else [f"on-demand costs {ondemand_usd_work_hour:.2f} USD per hour of work"]
    )
    if expected_usd:
        costs = [f"{usd:.2f} USD by {name}" for name, usd in expected_usd.items()]
        facts.append(f"expected cost to finish: {', '.join(costs[:-1])} and {costs[-1]}")
    return f"{decision}{f' ({reason})' if reason else ''}: {', '.join(facts)}"


def _late() -> str:
    return "the deadline can no longer be met with the requested confidence; continuing"


def _waiting(*, error: str, wait_s: float) -> str:
    return f"{error}; retrying in {wait_s:.0f} s"


def _advised(*, rank: int) -> str:
    return f"the cloud reports an elevated preemption risk for node {rank}"


def _unseen(*, error: str) -> str:
    return f"cannot list the nodes: {error}"


def _flushing(*, text: str) -> str:
    return text


def _shrunk(*, rank: int, left: int, node_count: int) -> str:
    return f"{describe_lost_nodes([rank])}; continuing on {left} of {node_count} nodes"


def _unfit(*, rank: int, reason: str, wait_s: float, job: int) -> str:
    return (
        f"{reason}, on a replacement node: terminating it, next try in {wait_s:.0f} s; "
        f"its output is in `broker jobs logs {job}`, marked (rank{rank})"
    )


def _replacement_failed(*, error: str, wait_s: float | None = None) -> str:
    """Render a failed replacement; without `wait_s`, the other nodes are released."""
    then = "" if wait_s is None else f"; retrying in {wait_s:.0f} s"
    return f"cannot replace the lost node: {error}{then}"


def _access_not_renewed(*, error: str) -> str:
    return f"cannot renew the nodes' bucket access: {error}"


# -- the search for nodes


def _place_asked(*, place: Place, usd_hour: float, is_resumed: bool = False) -> str:
    verb = "resuming" if is_resumed else "requesting"
    return f"{verb} {describe_place(place)} at {usd_hour:.2f} USD/h"


def _place_hedged(
    *, place: Place, usd_hour: float, late: Place, at_stake_usd_hour: float, late_s: float | None = None
) -> str:
    """`late`: the previous place, which has not answered for `late_s`, or whose answer is unclear (None)."""
    why = "gives no clear answer" if late_s is None else f"has not answered for {late_s:.0f} s"
    request = _place_asked(place=place, usd_hour=usd_hour)
    return f"{describe_place(late)} {why}; also {request}, up to {at_stake_usd_hour:.2f} USD/h at once"


def _place_whole(*, place: Place, took_s: float) -> str:
    return f"{describe_place(place)}: all nodes run after {took_s:.1f} s"


def _place_refused(*, place: Place, took_s: float, error: str) -> str:
    return f"{describe_place(place)} refused after {took_s:.1f} s: {error}"


def _place_skipped(*, place: Place, error: str) -> str:
    return f"{describe_place(place)} skipped: {error}"


def _region_skipped(*, cloud: str, region: str, error: str) -> str:
    return f"{region} ({cloud}) skipped: {error}"


def _cloud_skipped(*, cloud: str, error: str) -> str:
    return f"{cloud} skipped: {error}"


def _call_failed(*, place: Place, error: str, wait_s: float | None = None) -> str:
    """Render a failed call; without `wait_s`, it is not repeated."""
    then = "giving up" if wait_s is None else f"retrying in {wait_s:.1f} s"
    return f"{describe_place(place)}: {error}; {then}"


def _call_unclear(*, place: Place, error: str) -> str:
    return f"{describe_place(place)}: {error}; checking whether nodes were created"


def _place_given_up(*, place: Place) -> str:
    return f"giving up on {describe_place(place)}; confirming that no node runs there"


def _place_unneeded(*, place: Place) -> str:
    return f"{describe_place(place)} is no longer needed; terminating it"


def _place_returned(*, place: Place, took_s: float, usd: float) -> str:
    return f"terminated {describe_place(place)} in {took_s:.1f} s (cost {usd:.4f} USD)"


def _last_places(*, regions: Sequence[str]) -> str:
    return f"no place outside {' and '.join(regions)} is left to try; waiting for a clear answer there"


# -- clusters and nodes


def _up(*, cluster: str, place: Place) -> str:
    return f"{cluster} is up: {describe_place(place)}"


def _down(*, cluster: str) -> str:
    return f"{cluster} is down"


def _replaced(*, cluster: str, rank: int) -> str:
    return f"node {rank} of {cluster} is up again"


def _collected(*, node: str) -> str:
    return f"terminated {node}, which had no record"


def _cluster_adopted(*, cluster: str, tag: str, node_count: int) -> str:
    return f"{node_count} running nodes tagged `{tag}` had no record; `broker down {cluster}` ends them"


def _attempt_adopted(*, number: int, found_count: int | None = None) -> str:
    """`found_count`: number of nodes found of an incomplete gang."""
    result = "continues" if found_count is None else f"ends, as only {found_count} of its nodes were found"
    return f"attempt {number} was found by its tags and {result}"


def _restored(*, copy: str) -> str:
    return f"the state was restored from {copy}"


def _note(*, text: str) -> str:
    return text


_EVENTS: dict[EventKind, Callable[..., str]] = {kind: globals()[f"_{kind.value}"] for kind in EventKind}


def _after(step: int | None) -> str:
    return "" if step is None else f" after step {step}"


def _count(times: int, step: int | None) -> str:
    return f", {times} times at step {step}" if times > 1 else ""


def _name_code(exit_code: int | None, cause: str) -> str:
    return f"code {exit_code} ({cause})" if cause else f"code {exit_code}"


def _name_nodes(*, in_place: bool) -> str:
    return "the same nodes" if in_place else "new nodes"
