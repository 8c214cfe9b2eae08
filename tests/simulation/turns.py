"""The order in which places are requested: no place is skipped for another's refusal, or for an expired one.

Derived from commits and the plan alone: the product's own memory of refusals is what is checked.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from broker.jobs.deadline import follows_deadline
from broker.jobs.replanning import order_plan
from broker.types import Attempt, IntentEnd, NodeRequest, Placement
from tests.simulation.events import REFUSED, Event, Violation

if TYPE_CHECKING:
    from tests.simulation.universe import Universe

# As README and docs promise users: a full place rests for ten minutes, twice as long each time, a used up quota for an
# hour, an unexplained answer for a minute; none for more than four hours.
FULL_S, QUOTA_S, UNCLEAR_S, REST_S_MAX = 600.0, 3600.0, 60.0, 4 * 3600.0
LATE_S = 300.0
PROBE_S = 120.0  # one search probes whether a place grants nodes again, and all others wait
UNCLEAR = tuple(
    f"create:{fault}" for fault in ("transient", "unknown_before", "unknown_after", "late", "mute", "stuck")
)
TOKENS_LOW = 2.0  # of the budget of failed calls: below it the whole cloud may rest
Place = tuple[str, str, bool]  # region, zone ("": all of it), is_spot


@dataclass
class Turns:
    """Checkers' knowledge of requests so far. Times are the loop's, which never jump."""

    newest: int = 0  # row of the newest intent
    asked: dict[str, list[Placement]] = field(default_factory=dict)  # cluster -> in this search
    open: dict[str, tuple[str, Placement]] = field(default_factory=dict)  # token -> cluster and place
    begun_s: dict[tuple[str, bool], list[tuple[float, str]]] = field(default_factory=dict)  # region: when, whose
    refused: dict[Place, tuple[float, int]] = field(default_factory=dict)  # until when at most, how often
    poor_s: float = -math.inf  # when the budget of failed calls was last low
    searched_s: dict[str, float] = field(default_factory=dict)  # cluster -> when the search began
    written: dict[Place, float] = field(default_factory=dict)  # the product's memory of refusals, and until when
    unclear: Counter[str] = field(default_factory=Counter)  # cluster -> calls in this search that failed unexplained


def get_turns(universe: Universe) -> Turns:
    turns = universe.memory.setdefault("turns", Turns())
    assert isinstance(turns, Turns)
    return turns


def note_search(universe: Universe, event: Event) -> None:
    """Note that a search begins at the top of the plan; requests begun by an earlier process of it continue at once."""
    turns = get_turns(universe)
    turns.asked[event.name] = [placement for cluster, placement in turns.open.values() if cluster == event.name]
    turns.searched_s[event.name] = event.time_s
    turns.unclear[event.name] = 0


def note_unclear(universe: Universe, fault: str, cluster: str) -> None:
    """Note that a create call of this cluster failed, and its caller does not hear why."""
    if fault in UNCLEAR:
        get_turns(universe).unclear[cluster] += 1


def check_s13_no_placement_is_passed_over(universe: Universe, event: Event) -> None:
    """Check that each better place was requested in this search, or has refused and may still stand by it."""
    turns = get_turns(universe)
    if "retry_budgets" in event.written:
        tokens = universe.read("SELECT min(tokens) FROM retry_budgets")[0][0]
        turns.poor_s = event.time_s if tokens < TOKENS_LOW else turns.poor_s
    if "refusals" in event.written:
        _note_written(universe, turns, event.time_s)
    if "intents" not in event.written:
        return
    _note_closed(universe, turns, event.time_s)
    for number, token, cluster, body in universe.read(
        "SELECT rowid, token, cluster, body FROM intents WHERE rowid > ? ORDER BY rowid", (turns.newest,)
    ):
        turns.newest = number
        placement = msgspec.json.decode(body, type=NodeRequest).placement
        if passed_over := _find_passed_over(universe, turns, cluster, placement, event.time_s):
            better = _name(passed_over)
            raise Violation("S13", f"{cluster} requests {_name(placement)}, although nothing rules out {better}")
        turns.asked.setdefault(cluster, []).append(placement)
        turns.open[token] = cluster, placement
        begun = turns.begun_s.setdefault((placement.offer.region, placement.is_spot), [])
        begun.append((event.time_s, cluster))


def check_l1_late_gangs_go(universe: Universe, event: Event) -> None:
    """Check that after the last fault no gang that a search did not need lives on alongside the one it found."""
    if universe.mix.leaves_broker_dead or not universe.is_healed:
        return
    rows = universe.read(
        "SELECT intents.token FROM intents JOIN clusters ON clusters.name = intents.cluster "
        "WHERE intents.outcome IS NULL AND json_extract(CAST(clusters.body AS TEXT), '$.status') = 'UP'"
    )
    tokens = {token for (token,) in rows}
    since_s = universe.memory.get("late gangs", {})
    late = universe.memory["late gangs"] = {
        node.id: since_s.get(node.id, event.time_s)
        for node in (universe.list_live_nodes() if tokens else ())
        if node.account == universe.account
        and node.token in tokens
        and math.isinf(universe.cloud.get_ending_s(node.id))
    }
    for node_id, begun_s in late.items():
        if event.time_s - begun_s > LATE_S:
            raise Violation("L1", f"{node_id} has not been needed for {event.time_s - begun_s:.0f} s, and still runs")


def _note_closed(universe: Universe, turns: Turns, now_s: float) -> None:
    tokens = ", ".join(f"'{token}'" for token in turns.open)
    for token, outcome in universe.read(f"SELECT token, outcome FROM intents WHERE token IN ({tokens})"):
        if outcome is None:
            continue
        _, placement = turns.open.pop(token)
        if outcome in (*REFUSED, IntentEnd.TERMINATED):  # a partial gang is ended, and counts as full
            _note_refusal(turns, placement, outcome, now_s)


def _note_refusal(turns: Turns, placement: Placement, outcome: str, now_s: float) -> None:
    offer = placement.offer
    zone, rest_s = offer.zone or "", FULL_S
    if outcome == IntentEnd.QUOTA_EXCEEDED:
        zone, rest_s = "", QUOTA_S
    elif outcome == IntentEnd.UNCLEAR:
        zone, rest_s = "", UNCLEAR_S  # of the region, unless it was one call only
    _rest(turns, (offer.region, zone, placement.is_spot), rest_s, now_s, is_new=True)


def _note_written(universe: Universe, turns: Turns, now_s: float) -> None:
    """Note a refusal at the end of its try: later than its intent was closed, if another process closed it."""
    rows = universe.read("SELECT region, zone, is_spot, expires_s FROM refusals")
    written = {(region, zone, bool(is_spot)): expires_s for region, zone, is_spot, expires_s in rows}
    for place, expires_s in written.items():
        region, zone, is_spot = place
        was_refused = place in turns.refused if zone else any(each[::2] == (region, is_spot) for each in turns.refused)
        if (
            turns.written.get(place) != expires_s and was_refused
        ):  # a quota's intent may be closed as one that was ended
            _rest(turns, place, FULL_S if zone else QUOTA_S, now_s, is_new=False)
    turns.written = written


def _rest(turns: Turns, place: Place, rest_s: float, now_s: float, *, is_new: bool) -> None:
    until_s, count = turns.refused.get(place, (0.0, 0))
    count = max(1, count + is_new)
    turns.refused[place] = max(until_s, now_s + min(REST_S_MAX, rest_s * 2.0 ** (count - 1))), count


def _find_passed_over(
    universe: Universe, turns: Turns, cluster: str, placement: Placement, now_s: float
) -> Placement | None:
    """Return the first place that should have been asked before this one, or None."""
    job_id = universe.get_job_id(cluster)
    searched_s = turns.searched_s.get(cluster, now_s)
    if job_id is not None and follows_deadline(universe.tasks[job_id]):
        return None  # where and when is for the policy to decide
    if job_id is not None and universe.tasks[job_id].group is not None:
        return None  # it is placed near the other tasks, see `groups.py`
    if job_id is None or not universe.mix.is_clock_true or turns.poor_s >= searched_s - PROBE_S:
        return None
    if placement.node_count < universe.tasks[job_id].num_nodes:
        return None  # for a gang that stands: where that is
    if len(universe.tasks[job_id].resources) > 1:
        return None  # a refusal is of one kind of machines, and places are zones here
    order = _list_places(universe, job_id)
    # A place requested again right after its refusal was the only one left: then all others count as better.
    better = order if _has_refused(universe, placement) else order[: order.index(placement)]
    busy = {place.offer.zone for owner, place in turns.open.values() if owner == cluster}
    tried = {place.offer.region for owner, place in turns.open.values() if owner == cluster}
    doubtful = tried if turns.unclear[cluster] >= 2 else ()  # after two failures, another zone would fail too
    asked = turns.asked.get(cluster, [])
    for each in better:
        is_excused = (
            each in (placement, *asked)
            or each.offer.zone in busy  # a zone that is late is late for all
            or each.offer.region in doubtful
            or any(searched_s < until_s for until_s in _list_rests(turns, each))  # when its turn came, perhaps
            or _is_probed(turns, each, cluster, searched_s=searched_s, now_s=now_s)
        )
        if not is_excused:
            return each
    return None


def _list_places(universe: Universe, job_id: int) -> Sequence[Placement]:
    rows = universe.read("SELECT body FROM attempts WHERE job_id = ? ORDER BY number", (job_id,))
    attempts = [msgspec.json.decode(body, type=Attempt) for (body,) in rows]
    plan = order_plan(universe.make_whole_plan(job_id), attempts)
    return [estimate.placement for estimate in plan.estimates]


def _has_refused(universe: Universe, placement: Placement) -> bool:
    offer = placement.offer
    rows = universe.read(
        "SELECT 1 FROM refusals WHERE region = ? AND zone = ? AND is_spot = ? AND expires_s > ?",
        (offer.region, offer.zone, placement.is_spot, universe.clock.now_s()),
    )
    return bool(rows)


def _list_rests(turns: Turns, placement: Placement) -> Iterator[float]:
    offer = placement.offer
    for zone in ("", offer.zone or ""):
        yield turns.refused.get((offer.region, zone, placement.is_spot), (0.0, 0))[0]


def _is_probed(turns: Turns, placement: Placement, cluster: str, *, searched_s: float, now_s: float) -> bool:
    """Return whether another search probes whether this place, which did refuse, grants nodes again.

    Or did so during this search: when it skipped the place is unknown, and its next request may come much later.
    """
    if not any(_list_rests(turns, placement)):
        return False
    begun = turns.begun_s.get((placement.offer.region, placement.is_spot), [])
    return any((now_s if owner == cluster else searched_s) < begun_s + PROBE_S + 1.0 for begun_s, owner in begun)


def _name(placement: Placement) -> str:
    return f"{placement.offer.zone} {'spot' if placement.is_spot else 'on-demand'}"
