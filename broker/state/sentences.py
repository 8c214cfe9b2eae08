"""Conversion of sentences from schema 9 into kinds with data.

Used only by that migration, and never changed: today's sentences come from `broker/wording/`, and no code reads them.

A sentence that no pattern matches is kept verbatim, as `OutcomeKind.OTHER` or `EventKind.NOTE`.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Mapping
from typing import Any

from broker.types.outcomes import Event, EventKind, Outcome, OutcomeKind, make_event

_AFTER = r"(?: after step (?P<step>\d+))?"
_OUTCOMES: tuple[tuple[OutcomeKind, str], ...] = (
    (OutcomeKind.SUCCEEDED, r"succeeded"),
    (OutcomeKind.CANCELLED, r"cancelled"),
    (OutcomeKind.BUDGET_EXCEEDED, r"out of budget"),
    (OutcomeKind.FILES_LOST, r"files did not arrive"),
    (OutcomeKind.PROGRAM_FAILED, r"failed with exit code (?P<exit_code>-?\d+|None)"),
    (OutcomeKind.SETUP_FAILED, r"failed in setup"),
    (OutcomeKind.STALLED, r"stalled at step (?P<step>\d+)"),
    (OutcomeKind.GANG_BROKEN, r"fell apart at step (?P<step>\d+)"),
    (OutcomeKind.TAKEN_DOWN, r"preempted: its cluster was taken down"),
    (
        OutcomeKind.PREEMPTED,
        rf"preempted: (?P<detail>.*?){_AFTER}(?:: \d+ of \d+ nodes are kept while it is replaced)?",
    ),
    (OutcomeKind.LEASE_EXPIRED, rf"its unattended allowance of (?P<detail>.*?) ran out{_AFTER}"),
    (OutcomeKind.MOVED, r"moved(?:: (?P<detail>.*))?"),
    (OutcomeKind.LAUNCH_FAILED, r"not started(?:: (?P<detail>.*))?"),
    (OutcomeKind.REFUSED, r"refused(?:: (?P<detail>.*))?"),
    (OutcomeKind.SUPERSEDED, r"the state was restored"),
    (OutcomeKind.GANG_INCOMPLETE, r"the state was restored, and nodes of its gang were missing"),
)

# By status; the first pattern that matches the failure applies.
_ENDS: Mapping[str, tuple[tuple[OutcomeKind, str], ...]] = {
    "SUCCEEDED": ((OutcomeKind.SUCCEEDED, r".*"),),
    "CANCELLED": ((OutcomeKind.DEPENDENCY_FAILED, r".*, which it needs, is .*"), (OutcomeKind.CANCELLED, r".*")),
    "FAILED": (
        (OutcomeKind.PROGRAM_FAILED, r"`run` exited with code .*"),
        (OutcomeKind.BUDGET_EXCEEDED, r"the budget of .* is used up .*"),
        (OutcomeKind.STALLED, r"no new step for .*"),
        (OutcomeKind.FILES_LOST, r"the program succeeded, but .*"),
        (OutcomeKind.GANG_BROKEN, r"the gang fell apart .*"),
    ),
    "FAILED_SETUP": ((OutcomeKind.SETUP_FAILED, r".*"),),
    "FAILED_PRECHECKS": (
        (OutcomeKind.LAUNCH_FAILED, r"the program could not be started on .*"),
        (OutcomeKind.REFUSED, r".*"),
    ),
    "FAILED_NO_RESOURCE": ((OutcomeKind.NO_OFFER, r".*"),),
}

_PLACE = r"\d+ x \S+ (?:spot|on-demand) in \S+ \(\S+\)"
_USD_HOUR = r"(?P<usd_hour>[\d.]+) USD/h"
_NODES = r"(?P<in_place>the same nodes|new nodes)"
_EVENTS: Mapping[str, tuple[tuple[EventKind, str], ...]] = {
    "attempt": (
        (EventKind.ATTEMPT_IN_PLACE, r"attempt (?P<number>\d+): the nodes of attempt (?P<earlier>\d+)"),
        (EventKind.ATTEMPT, rf"attempt (?P<number>\d+): (?P<place>{_PLACE}) at {_USD_HOUR}"),
    ),
    "started": ((EventKind.STARTED, r"the program was started"),),
    "recovered": (
        (EventKind.RECOVERED, r"recovered: step (?P<step>\d+)(?: came (?P<took_s>[\d.]+) s after the loss)?"),
    ),
    "preempted": (
        (
            EventKind.ATTEMPT_LOST,
            rf"preempted: (?P<detail>.*?){_AFTER}"
            r"(?:: (?P<kept_count>\d+) of (?P<node_count>\d+) nodes are kept while it is replaced)?",
        ),
    ),
    "restart": (
        (
            EventKind.PROGRAM_RESTARTED,
            r"the program exited with code (?P<exit_code>-?\d+|None)(?: \((?P<cause>.*)\))?(?: at step (?P<step>\d+))? "
            rf"and is restarted on {_NODES}",
        ),
        (
            EventKind.STALL_RESTARTED,
            rf"no new step for (?P<timeout_s>[\d.e+]+) s at step (?P<step>\d+): restarted on {_NODES}",
        ),
        (
            EventKind.GANG_RESTARTED,
            rf"the gang fell apart \((?P<reason>.*)\) at step (?P<step>\d+): restarted on {_NODES}",
        ),
        (
            EventKind.LEASE_EXPIRED,
            rf"its unattended allowance of (?P<allowance>.*?) ran out{_AFTER}: restarted on new nodes",
        ),
        (EventKind.SETUP_RETRIED, r"`setup` exited with code (?P<exit_code>-?\d+) on used nodes: new nodes are tried"),
        (EventKind.LAUNCH_RETRIED, r"not started on (?P<cluster>\S+), trying another: (?P<error>.*)"),
        (
            EventKind.NODES_GIVEN_BACK,
            r"the nodes of attempt (?P<number>\d+) are given back: new ones are asked for",
        ),
    ),
    "last lines": (
        (EventKind.LAST_LINES, r"last lines(?: of rank (?P<rank>\d+))? in attempt (?P<number>\d+):\n(?P<lines>.*)"),
    ),
    "ended": ((EventKind.ENDED, r"(?P<status>[A-Z_]+)(?:: (?P<failure>.*))?"),),
    "late": (
        (EventKind.LATE, r"the deadline cannot be kept with the asked confidence any more; going on"),
    ),
    "waiting": (
        (
            EventKind.REPLACEMENT_FAILED,
            r"no node to replace the lost one: (?P<error>.*?)(?:; trying again in (?P<wait_s>\d+) s)?",
        ),
        (EventKind.WAITING, r"(?P<error>.*); trying again in (?P<wait_s>\d+) s"),
    ),
    "advised": ((EventKind.ADVISED, r"the cloud expects to take node (?P<rank>\d+) sooner than usual"),),
    "unseen": ((EventKind.UNSEEN, r"its nodes cannot be looked at: (?P<error>.*)"),),
    "flushing": ((EventKind.FLUSHING, r"(?P<text>.*)"),),
    "shrunk": (
        (EventKind.SHRUNK, r"node (?P<rank>\d+) gone: going on with (?P<left>\d+) of (?P<node_count>\d+)"),
    ),
    "unfit": (
        (
            EventKind.UNFIT,
            r"(?P<reason>.*), on a node that replaced a lost one: it is ended, another is asked for in "
            r"(?P<wait_s>\d+) s; its output is in `broker jobs logs (?P<job>\d+)`, marked \(rank(?P<rank>\d+)\)",
        ),
    ),
    "access": ((EventKind.ACCESS_NOT_RENEWED, r"the nodes' access to buckets is not renewed: (?P<error>.*)"),),
    "up": ((EventKind.UP, rf"(?P<cluster>\S+) is up: (?P<place>{_PLACE})"),),
    "down": ((EventKind.DOWN, r"(?P<cluster>\S+) is down"),),
    "replaced": ((EventKind.REPLACED, r"node (?P<rank>\d+) of (?P<cluster>\S+) is up again"),),
    "collected": ((EventKind.COLLECTED, r"(?P<node>\S+) had no record and was ended"),),
    "adopted": (
        (
            EventKind.ATTEMPT_ADOPTED,
            r"attempt (?P<number>\d+) was found by its tags and "
            r"(?:continues|ends, as only (?P<found_count>\d+) of its nodes were found)",
        ),
        (
            EventKind.CLUSTER_ADOPTED,
            r"(?P<node_count>\d+) running nodes tagged `(?P<tag>\S+)` had no record; "
            r"`broker down (?P<cluster>\S+)` ends them",
        ),
    ),
    "restored": ((EventKind.RESTORED, r"the state was restored from (?P<copy>.*)"),),
    "failover": (
        (EventKind.PLACE_ASKED, rf"asking for (?P<place>{_PLACE}) at {_USD_HOUR}"),
        (EventKind.PLACE_ASKED, rf"(?P<is_resumed>going on) with (?P<place>{_PLACE}) at {_USD_HOUR}"),
        (
            EventKind.PLACE_HEDGED,
            rf"(?P<late>{_PLACE}) (?:is late after (?P<late_s>\d+) s|gives no clear answer): asking for "
            rf"(?P<place>{_PLACE}) at {_USD_HOUR} too, (?P<at_stake_usd_hour>[\d.]+) USD/h at stake",
        ),
        (EventKind.PLACE_WHOLE, rf"(?P<place>{_PLACE}) is whole after (?P<took_s>[\d.]+) s"),
        (EventKind.PLACE_REFUSED, rf"(?P<place>{_PLACE}) refused after (?P<took_s>[\d.]+) s: (?P<error>.*)"),
        (EventKind.PLACE_SKIPPED, rf"(?P<place>{_PLACE}) skipped: (?P<error>.*)"),
        (EventKind.REGION_SKIPPED, r"(?P<region>\S+) \((?P<cloud>\S+)\) skipped: (?P<error>.*)"),
        (EventKind.CLOUD_SKIPPED, r"(?P<cloud>\S+) skipped: (?P<error>.*)"),
        (EventKind.CALL_FAILED, rf"(?P<place>{_PLACE}): (?P<error>.*); asking again in (?P<wait_s>[\d.]+) s"),
        (EventKind.CALL_FAILED, rf"(?P<place>{_PLACE}): (?P<error>.*); asked often enough"),
        (EventKind.CALL_UNCLEAR, rf"(?P<place>{_PLACE}): (?P<error>.*); looking for what it made"),
        (EventKind.PLACE_GIVEN_UP, rf"(?P<place>{_PLACE}) is given up: making sure that nothing runs there"),
        (EventKind.PLACE_UNNEEDED, rf"(?P<place>{_PLACE}) is not needed any more and given back"),
        (
            EventKind.PLACE_RETURNED,
            rf"(?P<place>{_PLACE}) is confirmed gone after (?P<took_s>-?[\d.]+) s, it cost (?P<usd>-?[\d.]+) USD",
        ),
        (
            EventKind.LAST_PLACES,
            r"no place outside (?P<regions>.*) is left to ask: waiting for a clear answer there",
        ),
    ),
}  # fmt: skip
_TEXTS = {"cause": "", "failure": "", "reason": ""}  # the value of an empty group that is not optional
_COUNTS = {
    "number", "earlier", "step", "kept_count", "node_count", "exit_code", "rank", "left", "found_count", "job",
}  # fmt: skip
_DECISION = (
    r"(?:(?P<verb>go to|stay at) (?P<type>\S+) (?P<pricing>spot|on-demand) in (?P<cloud>\S+) (?P<zone>\S+), "
    r"(?P<usd_work_hour>[\d.]+) USD for an hour of work|(?P<idle>stay|hold no machines))(?: \((?P<reason>[^:]*)\))?: "
    r"(?P<work_left_hours>[\d.]+) h of work left(?:, (?P<time_left_hours>-?[\d.]+) h to the deadline)?"
    r"(?:, (?P<spare_hours>-?[\d.]+) h to spare before on-demand must start)?"
    r"(?:, on-demand is (?P<ondemand_usd_work_hour>[\d.]+) USD for an hour of work)?"
    r"(?:, expected to the end (?P<expected>.*))?"
)


def convert(connection: sqlite3.Connection) -> None:
    """Fill the columns of schema 10, within the transaction of the migration. Damaged rows are left unchanged."""
    before = connection.text_factory
    connection.text_factory = lambda text: text.decode(errors="replace")
    try:
        _convert_attempts(connection)
        _convert_jobs(connection)
        _convert_intents(connection)
        _convert_events(connection)
    finally:
        connection.text_factory = before


def read_outcome(sentence: str, *, is_spot: bool = True) -> Outcome | None:
    """Return the outcome that an attempt's sentence describes; None for an empty one: the attempt has not ended."""
    for kind, pattern in _OUTCOMES if sentence else ():
        if found := re.fullmatch(pattern, sentence, re.DOTALL):
            parts = found.groupdict()
            if kind is OutcomeKind.PREEMPTED and not is_spot:
                kind = OutcomeKind.NODE_LOST
            return Outcome(
                kind=kind,
                detail=parts.get("detail") or "",
                step=_read_number(parts.get("step")),
                exit_code=_read_number(parts.get("exit_code")),
            )
    return Outcome(kind=OutcomeKind.OTHER, detail=sentence) if sentence else None


def read_end(status: str, failure: str) -> OutcomeKind | None:
    """Return how a job ended; None if it has not ended."""
    found = (kind for kind, pattern in _ENDS.get(status, ()) if re.fullmatch(pattern, failure, re.DOTALL))
    return next(found, OutcomeKind.OTHER if status.startswith("FAILED") else None)


def read_event(kind: str, message: str) -> Event:
    """Convert the sentence of an event to a kind with data; one that matches no pattern becomes a NOTE."""
    if kind == "decision":
        return _read_decision(message)
    for now, pattern in _EVENTS.get(kind, ()):
        if found := re.fullmatch(pattern, message, re.DOTALL):
            return make_event(now, **_read_data(now, found.groupdict()))
    return make_event(EventKind.NOTE, text=message)


def _convert_attempts(connection: sqlite3.Connection) -> None:
    rows = connection.execute(
        "SELECT rowid, json_extract(body, '$.outcome'), json_extract(body, '$.returncode'), "
        "json_extract(body, '$.placement.is_spot') FROM attempts WHERE CASE WHEN json_valid(body) THEN 1 END"
    ).fetchall()
    for rowid, sentence, code, is_spot in rows:
        outcome = read_outcome(sentence, is_spot=bool(is_spot)) if isinstance(sentence, str) else None
        connection.execute(
            "UPDATE attempts SET body = json_remove(body, '$.outcome', '$.returncode'), outcome_kind = ?, "
            "outcome_detail = ?, outcome_step = ?, exit_code = ? WHERE rowid = ?",
            (
                outcome and outcome.kind.value,
                outcome.detail if outcome else "",
                outcome and outcome.step,
                code if isinstance(code, int) else outcome and outcome.exit_code,
                rowid,
            ),
        )


def _convert_jobs(connection: sqlite3.Connection) -> None:
    for job_id, status, failure in connection.execute("SELECT id, status, failure FROM jobs").fetchall():
        kind = read_end(str(status), str(failure))
        connection.execute("UPDATE jobs SET outcome_kind = ? WHERE id = ?", (kind and kind.value, job_id))


def _convert_intents(connection: sqlite3.Connection) -> None:
    connection.execute(
        "UPDATE intents SET outcome = 'refused', detail = substr(outcome, 10) WHERE outcome LIKE 'refused: %'"
    )
    connection.execute("UPDATE intents SET outcome = 'never_asked' WHERE outcome = 'never asked'")


def _convert_events(connection: sqlite3.Connection) -> None:
    for rowid, kind, message in connection.execute("SELECT id, kind, message FROM events").fetchall():
        event = read_event(str(kind), str(message))
        data = json.dumps(event.data, ensure_ascii=False)
        connection.execute("UPDATE events SET kind = ?, data = ? WHERE id = ?", (event.kind.value, data, rowid))


def _read_data(kind: EventKind, parts: Mapping[str, str | None]) -> dict[str, object]:
    data = {name: _read_value(name, text) for name, text in parts.items()}
    data = {name: value for name, value in data.items() if value is not None or name in ("exit_code", "step")}
    if kind is EventKind.ATTEMPT_LOST:
        is_ours = data["detail"] == "its cluster was taken down"
        data["outcome"] = (OutcomeKind.TAKEN_DOWN if is_ours else OutcomeKind.PREEMPTED).value
    return data


def _read_value(name: str, text: str | None) -> object:
    if text is None:
        return _TEXTS.get(name)
    if name in _COUNTS:
        return _read_number(text)
    if name.endswith(("_s", "_hour", "_hours")) or name == "usd":
        return float(text)
    if name in ("place", "late"):
        return _read_place(text)
    if name in ("in_place", "is_resumed"):
        return text != "new nodes"
    if name in ("lines", "regions"):
        return text.split("\n" if name == "lines" else " and ")
    return text


def _read_number(text: str | None) -> int | None:
    return None if text in (None, "None") else int(text or 0)


def _read_place(text: str) -> dict[str, object]:
    """Read a place; the region is the common prefix of several zones, or the only zone."""
    found = re.fullmatch(r"(\d+) x (\S+) (spot|on-demand) in (\S+) \((\S+)\)", text)
    assert found is not None, "the pattern of the event has found it"
    count, instance_type, pricing, names, cloud = found.groups()
    first, *others = names.split(",")
    region = first[: -len(others[0])] if others else first
    return {
        "cloud": cloud,
        "region": region,
        "zones": [first, *(f"{region}{each}" for each in others)],
        "instance_type": instance_type,
        "is_spot": pricing == "spot",
        "node_count": int(count),
    }


def _read_decision(message: str) -> Event:
    found = re.fullmatch(_DECISION, message, re.DOTALL)
    if found is None:
        return make_event(EventKind.NOTE, text=message)
    parts = found.groupdict()
    is_move = parts["verb"] == "go to"
    data: dict[str, Any] = {
        "action": "move" if is_move else "wait" if parts["idle"] == "hold no machines" else "stay",
        "reason": parts["reason"] or "",
    }
    for name in ("work_left_hours", "time_left_hours", "spare_hours", "ondemand_usd_work_hour", "usd_work_hour"):
        if parts[name] is not None:
            data[name] = float(parts[name])
    if parts["verb"]:
        data["place"] = {
            "cloud": parts["cloud"],
            "region": parts["zone"],
            "zones": [parts["zone"]],
            "instance_type": parts["type"],
            "is_spot": parts["pricing"] == "spot",
            "node_count": None,
        }
    if parts["expected"]:
        each = re.findall(r"([\d.]+) USD by (.+?)(?=, [\d.]+ USD by | and [\d.]+ USD by |$)", parts["expected"])
        data["expected_usd"] = {name: float(usd) for usd, name in each}
    return make_event(EventKind.DECISION, **data)
