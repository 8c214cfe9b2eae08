"""Invariants of records and nodes: each node's owner, who may end it, and agreement between records and nodes."""

from __future__ import annotations

import json
from contextvars import ContextVar
from typing import TYPE_CHECKING

from broker.provision.collection import GRACE_S
from broker.types import EventKind, NodeState
from tests.simulation.events import Event, Violation

if TYPE_CHECKING:
    from tests.simulation.universe import Universe

IS_COLLECTOR: ContextVar[bool] = ContextVar("is_collector", default=False)


def note_end(universe: Universe, event: Event) -> None:
    """Note whether a node had an owner when it was asked to end."""
    node = event.node
    assert node is not None
    is_owned = node.id not in {each.id for each in universe.list_unowned_nodes()}
    universe.memory.setdefault("ends", {})[node.id] = (is_owned, event.process, event.time_s)


def check_s3_only_the_lost_are_collected(universe: Universe, event: Event) -> None:
    """Check that the collector ends nothing that an open intent or a record names."""
    if "events" not in event.written:
        return
    last = universe.memory.get("collected", 0)
    ends = universe.memory.get("ends", {})
    for number, node_id in universe.read(
        "SELECT id, json_extract(data, '$.node') FROM events WHERE kind = ? AND id > ? ORDER BY id",
        (EventKind.COLLECTED.value, last),
    ):
        universe.memory["collected"] = number
        is_owned, process, ended_s = ends.get(node_id, (False, None, 0.0))
        # Otherwise it was ended before, and that may be known: a stale list shows it alive once more.
        is_news = universe.memory.get("gone", {}).get(node_id, event.time_s) >= event.time_s
        if is_owned and process is event.process and event.time_s - ended_s < 1.0 and is_news:
            raise Violation("S3", f"the collector ends a node that has an owner: {node_id}")


def check_s3_young_nodes_are_spared(universe: Universe, event: Event) -> None:
    """Check that the collector waits until no call under way can claim a node; with a true clock it knows the age."""
    node = event.node
    assert node is not None
    age_s = event.time_s - node.created_s
    is_true = universe.mix.is_clock_true and universe.mix.offset_s == 0.0
    if IS_COLLECTOR.get() and is_true and age_s < GRACE_S and node.id in _list_unowned(universe):
        raise Violation("S3", f"the collector ends {node.id} of {node.cluster}, which is {age_s:.0f} s old")


def check_s3_replacements_are_spared(universe: Universe, event: Event) -> None:
    """Check that the collector ends no node that a working gang is waiting for."""
    node = event.node
    assert node is not None
    process = universe.memory.get("replacing", {}).get(node.cluster)
    if not IS_COLLECTOR.get() or process is None or not process.is_alive or process.is_stopped:
        return
    whole = universe.tasks[universe.get_job_id(node.cluster) or 0].num_nodes
    is_awaited = node.token in universe.list_replacement_tokens(node.cluster, whole)
    is_open = universe.read("SELECT 1 FROM intents WHERE token = ? AND outcome IS NULL", (node.token,))
    row = universe.read(
        "SELECT 1 FROM jobs WHERE id = ? AND status = 'RUNNING' AND NOT cancel_requested",
        (universe.get_job_id(node.cluster),),
    )
    if is_awaited and is_open and row:
        raise Violation("S3", f"the collector ends {node.id}, which is on its way into {node.cluster}")


def check_s3_records_outlive_nodes(universe: Universe, event: Event) -> None:
    """Check that a node leaves its record, and an intent is closed as ended, only when the node is gone."""
    if "clusters" in event.written:
        rows = universe.read("SELECT name, CAST(body AS TEXT) FROM clusters")
        records = {name: {node["id"] for node in json.loads(body)["nodes"]} for name, body in rows}
        before = universe.memory.get("records", {})
        universe.memory["records"] = records
        dropped = [node_id for name, ids in before.items() for node_id in ids - records.get(name, set())]
        for node in universe.cloud.find(sorted(dropped)):
            if node.state is not NodeState.TERMINATED:
                raise Violation("S3", f"{node.id} runs, and the record of {node.cluster} no longer names it")
    if "intents" in event.written:
        _check_ended_intents(universe)


def _check_ended_intents(universe: Universe) -> None:
    known = universe.memory.setdefault("ended intents", set())
    new = {
        token
        for (token,) in universe.read("SELECT token FROM intents WHERE outcome = 'terminated'")
        if token not in known
    }
    known |= new
    for node in universe.list_live_nodes() if new else ():
        if node.token in new:
            raise Violation("S3", f"{node.id} of {node.cluster} runs, and its intent is closed as ended")


def _list_unowned(universe: Universe) -> set[str]:
    return {node.id for node in universe.list_unowned_nodes()}


def check_fresh_list(universe: Universe, event: Event) -> None:
    """Check S16: a requested list starts after the request, since an older one may lack new nodes."""
    if event.late_s > 0.0:
        raise Violation("S16", f"a shared list was begun {event.late_s:.3f} s before it was requested")


def check_s4_stale_calls(universe: Universe, event: Event) -> None:
    """Check that a replaced leader requests nothing."""
    store = event.process.store if event.process else None
    epoch = store.epoch if store is not None else None
    newest = universe.read("SELECT epoch FROM leader")[0][0]
    if epoch is not None and newest != epoch:
        raise Violation("S4", f"a leader of epoch {epoch} asks for nodes in epoch {newest}")
