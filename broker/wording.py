"""Turn the kinds and data of outcomes and events into words for people. No other module does, and none reads them back.

Each kind of event has one function here. Its parameters are the data that an event of this kind carries.
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
    OutcomeKind.GANG_BROKEN: lambda outcome: f"fell apart at step {outcome.step}",
    OutcomeKind.PREEMPTED: lambda outcome: f"preempted: {outcome.detail}{_after(outcome.step)}",
    OutcomeKind.NODE_LOST: lambda outcome: f"{outcome.detail}{_after(outcome.step)}",
    OutcomeKind.TAKEN_DOWN: lambda _: "the cluster was taken down",
    OutcomeKind.LEASE_EXPIRED: lambda outcome: (
        f"its unattended allowance of {outcome.detail} ran out{_after(outcome.step)}"
    ),
    OutcomeKind.MOVED: lambda outcome: f"moved: {outcome.detail}" if outcome.detail else "moved",
    OutcomeKind.LAUNCH_FAILED: lambda outcome: f"not started: {outcome.detail}",
    OutcomeKind.REFUSED: lambda outcome: f"refused: {outcome.detail}",
    OutcomeKind.FILES_LOST: lambda _: "files did not arrive",
    OutcomeKind.BUDGET_EXCEEDED: lambda _: "out of budget",
    OutcomeKind.CANCELLED: lambda _: "cancelled",
    OutcomeKind.SUPERSEDED: lambda _: "the state was restored",
    OutcomeKind.GANG_INCOMPLETE: lambda _: "the state was restored, and nodes of its gang were missing",
    OutcomeKind.NO_OFFER: lambda outcome: outcome.detail,
    OutcomeKind.DEPENDENCY_FAILED: lambda outcome: outcome.detail,
    OutcomeKind.OTHER: lambda outcome: outcome.detail,
}


def describe_outcome(outcome: Outcome | None) -> str:
    """Return how an attempt ended in a few words; empty while it has not."""
    return "" if outcome is None else _OUTCOMES[outcome.kind](outcome)


def describe_event(event: Event) -> str:
    """Return the event as a sentence; some end in further lines. A damaged one reads as far as its data does."""
    try:
        return _EVENTS[event.kind](**event.data)
    except (TypeError, ValueError, KeyError, AttributeError, IndexError):
        return f"{event.kind.value}: {dict(event.data)}"


# -- what outcomes and errors say in detail


def describe_lost_nodes(ranks: Sequence[int]) -> str:
    return f"node {' and '.join(map(str, ranks))} gone"


def describe_notice() -> str:
    return "the cloud gave notice"


def describe_lost_start(error: str) -> str:
    return f"lost while starting: {error}"


def explain_exit(exit_code: int | None, *, cause: str = "", times: int = 1, step: int | None = None) -> str:
    """Return why a job has failed whose program ended with an exit code of its own."""
    return f"`run` exited with {_name_code(exit_code, cause)}{_count(times, step)}"


def explain_setup_exit(exit_code: int | None) -> str:
    return f"`setup` exited with code {exit_code}"


def explain_stall(timeout_s: float, *, times: int = 1, step: int | None = None) -> str:
    return f"no new step for {timeout_s:g} s{_count(times, step)}"


def explain_broken_gang(reason: str, *, times: int = 1, step: int | None = None) -> str:
    return f"the gang fell apart ({reason}){_count(times, step)}"


def explain_lost_files(unflushed: str) -> str:
    return f"the program succeeded, but {unflushed}; they are lost with the nodes, which are given back"


def explain_cancelled_run() -> str:
    return "the run was cancelled on its cluster"


def explain_budget(budget_usd: float, spent_usd: float) -> str:
    return f"the budget of {budget_usd:g} USD is used up ({spent_usd:.2f} spent); its checkpoints are kept"


def explain_dependency(job_id: int | None, name: str, status: str) -> str:
    """`job_id` None: no such job is left."""
    job = "a job" if job_id is None else f"job {job_id} ({name})"
    return f"{job}, which it needs, is {status}"


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
    """`2 x g5.xlarge spot in us-east-1a,b (aws)`: any of the zones will do."""
    pricing = "spot" if place["is_spot"] else "on-demand"
    zones = name_zones(place["zones"], place["region"])
    return f"{place['node_count']} x {place['instance_type']} {pricing} in {zones} ({place['cloud']})"


def name_zones(zones: Sequence[str], region: str) -> str:
    """`us-east-1a,b,c`."""
    return ",".join([zones[0], *(each.removeprefix(region) for each in zones[1:])])


# -- a job's attempts


def _attempt(*, number: int, place: Place, usd_hour: float) -> str:
    return f"attempt {number}: {describe_place(place)} at {usd_hour:.2f} USD/h"


def _attempt_in_place(*, number: int, earlier: int) -> str:
    return f"attempt {number}: the nodes of attempt {earlier}"


def _started() -> str:
    return "the program was started"


def _recovered(*, step: int, took_s: float | None = None) -> str:
    """`took_s` None: the clock was set back meanwhile."""
    took = "" if took_s is None else f" came {took_s:.1f} s after the loss"
    return f"recovered: step {step}{took}"


def _attempt_lost(
    *, outcome: str, detail: str, step: int | None = None, kept_count: int | None = None, node_count: int | None = None
) -> str:
    what = describe_outcome(Outcome(kind=OutcomeKind(outcome), detail=detail, step=step))
    kept = "" if kept_count is None else f": {kept_count} of {node_count} nodes are kept while it is replaced"
    return f"{what}{kept}"


def _lease_expired(*, allowance: str, step: int | None = None) -> str:
    outcome = Outcome(kind=OutcomeKind.LEASE_EXPIRED, detail=allowance, step=step)
    return f"{describe_outcome(outcome)}: restarted on new nodes"


def _program_restarted(*, exit_code: int | None, cause: str, step: int | None, in_place: bool) -> str:
    at = f" at step {step}" if step else ""
    nodes = _name_nodes(in_place=in_place)
    return f"the program exited with {_name_code(exit_code, cause)}{at} and is restarted on {nodes}"


def _stall_restarted(*, timeout_s: float, step: int, in_place: bool) -> str:
    return f"{explain_stall(timeout_s)} at step {step}: restarted on {_name_nodes(in_place=in_place)}"


def _gang_restarted(*, reason: str, step: int, in_place: bool) -> str:
    return f"{explain_broken_gang(reason)} at step {step}: restarted on {_name_nodes(in_place=in_place)}"


def _setup_retried(*, exit_code: int | None) -> str:
    return f"{explain_setup_exit(exit_code)} on used nodes: new nodes are tried"


def _launch_retried(*, cluster: str, error: str) -> str:
    return f"not started on {cluster}, trying another: {error}"


def _nodes_given_back(*, number: int) -> str:
    return f"the nodes of attempt {number} are given back: new ones are asked for"


def _last_lines(*, number: int, lines: Sequence[str], rank: int | None = None) -> str:
    whose = "" if rank is None else f" of rank {rank}"
    return "\n".join([f"last lines{whose} in attempt {number}:", *lines])


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
    """`action`: "move", "stay" or "wait". `place`: where to go, or where it is."""
    verb = {"move": "go to", "stay": "stay at"}.get(action)
    where = "hold no machines" if verb is None else "stay"
    if verb and place is not None:
        pricing = "spot" if place["is_spot"] else "on-demand"
        where = f"{verb} {place['instance_type']} {pricing} in {place['cloud']} {place['zones'][0]}"
        where += f", {usd_work_hour:.2f} USD for an hour of work"
    words = [f"{work_left_hours:.1f} h of work left"]
    words += [] if time_left_hours is None else [f"{time_left_hours:.1f} h to the deadline"]
    words += [] if spare_hours is None else [f"{spare_hours:.1f} h to spare before on-demand must start"]
    words += (
        [] if ondemand_usd_work_hour is None else [f"on-demand is {ondemand_usd_work_hour:.2f} USD for an hour of work"]
    )
    if expected_usd:
        costs = [f"{usd:.2f} USD by {name}" for name, usd in expected_usd.items()]
        words.append(f"expected to the end {', '.join(costs[:-1])} and {costs[-1]}")
    return f"{where}{f' ({reason})' if reason else ''}: {', '.join(words)}"


def _late() -> str:
    return "the deadline cannot be kept with the asked confidence any more; going on"


def _waiting(*, error: str, wait_s: float) -> str:
    return f"{error}; trying again in {wait_s:.0f} s"


def _advised(*, rank: int) -> str:
    return f"the cloud expects to take node {rank} sooner than usual"


def _unseen(*, error: str) -> str:
    return f"its nodes cannot be looked at: {error}"


def _flushing(*, text: str) -> str:
    return text


def _shrunk(*, rank: int, left: int, node_count: int) -> str:
    return f"{describe_lost_nodes([rank])}: going on with {left} of {node_count}"


def _unfit(*, rank: int, reason: str, wait_s: float, job: int) -> str:
    return (
        f"{reason}, on a node that replaced a lost one: it is ended, another is asked for in {wait_s:.0f} s; "
        f"its output is in `broker jobs logs {job}`, marked (rank{rank})"
    )


def _replacement_failed(*, error: str, wait_s: float | None = None) -> str:
    """`wait_s` None: the other nodes are given back."""
    then = "" if wait_s is None else f"; trying again in {wait_s:.0f} s"
    return f"no node to replace the lost one: {error}{then}"


def _access_not_renewed(*, error: str) -> str:
    return f"the nodes' access to buckets is not renewed: {error}"


# -- the search for nodes


def _place_asked(*, place: Place, usd_hour: float, is_resumed: bool = False) -> str:
    verb = "going on with" if is_resumed else "asking for"
    return f"{verb} {describe_place(place)} at {usd_hour:.2f} USD/h"


def _place_hedged(
    *, place: Place, usd_hour: float, late: Place, at_stake_usd_hour: float, late_s: float | None = None
) -> str:
    """`late`: the place asked before, which has not answered for `late_s`, or gives no clear answer (None)."""
    why = "gives no clear answer" if late_s is None else f"is late after {late_s:.0f} s"
    asked = _place_asked(place=place, usd_hour=usd_hour)
    return f"{describe_place(late)} {why}: {asked} too, {at_stake_usd_hour:.2f} USD/h at stake"


def _place_whole(*, place: Place, took_s: float) -> str:
    return f"{describe_place(place)} is whole after {took_s:.1f} s"


def _place_refused(*, place: Place, took_s: float, error: str) -> str:
    return f"{describe_place(place)} refused after {took_s:.1f} s: {error}"


def _place_skipped(*, place: Place, error: str) -> str:
    return f"{describe_place(place)} skipped: {error}"


def _region_skipped(*, cloud: str, region: str, error: str) -> str:
    return f"{region} ({cloud}) skipped: {error}"


def _cloud_skipped(*, cloud: str, error: str) -> str:
    return f"{cloud} skipped: {error}"


def _call_failed(*, place: Place, error: str, wait_s: float | None = None) -> str:
    """`wait_s` None: the place is not asked again."""
    then = "asked often enough" if wait_s is None else f"asking again in {wait_s:.1f} s"
    return f"{describe_place(place)}: {error}; {then}"


def _call_unclear(*, place: Place, error: str) -> str:
    return f"{describe_place(place)}: {error}; looking for what it made"


def _place_given_up(*, place: Place) -> str:
    return f"{describe_place(place)} is given up: making sure that nothing runs there"


def _place_unneeded(*, place: Place) -> str:
    return f"{describe_place(place)} is not needed any more and given back"


def _place_returned(*, place: Place, took_s: float, usd: float) -> str:
    return f"{describe_place(place)} is confirmed gone after {took_s:.1f} s, it cost {usd:.4f} USD"


def _last_places(*, regions: Sequence[str]) -> str:
    return f"no place outside {' and '.join(regions)} is left to ask: waiting for a clear answer there"


# -- clusters and nodes


def _up(*, cluster: str, place: Place) -> str:
    return f"{cluster} is up: {describe_place(place)}"


def _down(*, cluster: str) -> str:
    return f"{cluster} is down"


def _replaced(*, cluster: str, rank: int) -> str:
    return f"node {rank} of {cluster} is up again"


def _collected(*, node: str) -> str:
    return f"{node} had no record and was ended"


def _cluster_adopted(*, cluster: str, tag: str, node_count: int) -> str:
    return f"{node_count} running nodes tagged `{tag}` had no record; `broker down {cluster}` ends them"


def _attempt_adopted(*, number: int, found_count: int | None = None) -> str:
    """`found_count`: of a gang that was not found whole."""
    what = "continues" if found_count is None else f"ends, as only {found_count} of its nodes were found"
    return f"attempt {number} was found by its tags and {what}"


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
