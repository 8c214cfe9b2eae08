"""Outcomes and events as kinds: their storage, and the conversion of the sentences that schema 9 recorded.

`schema_9.sql` is a state file of the last schema with sentences: rows that its controller wrote in the simulation.
`schema_9.json` is the output of its `jobs why`, `jobs events` and spot history for those rows.
"""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from broker.cli.main import main
from broker.clock import SystemClock
from broker.config import load_config
from broker.errors import DamagedRowError
from broker.state.copies import list_copies
from broker.state.restoring import restore
from broker.state.schema import MIGRATIONS
from broker.state.sentences import read_end, read_event, read_outcome
from broker.state.store import Store
from broker.types import Attempt, EventKind, Outcome, OutcomeKind, Placement, Task, make_event
from broker.wording import describe_event, describe_outcome
from tests.simulation.world import make_offer
from tests.state.rewording import KEPT, reword
from tests.state.samples import Hands

HERE = Path(__file__).parent
SAID: dict[str, Any] = json.loads((HERE / "schema_9.json").read_text())
JOBS = 18
ONDEMAND = re.compile(r"on-demand would have\s+cost [\d.]+ USD")  # of the billed hours today, of the attempts then
NOW_S = 1700003700.0  # soon after the last of them ended


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state folder as schema 9 left it."""
    folder = tmp_path / "home"
    folder.mkdir()
    with closing(sqlite3.connect(folder / "state.db")) as connection:
        connection.executescript((HERE / "schema_9.sql").read_text())
        owner = connection.execute("SELECT value FROM meta WHERE key = 'installation'").fetchone()[0]
    (folder / "owner").write_text(owner)
    monkeypatch.setenv("BROKER_HOME", str(folder))
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield folder
    monkeypatch.undo()
    time.tzset()


def open_store(home: Path) -> Store:
    clock = Hands()
    clock.time_s = NOW_S
    return Store(home / "state.db", clock=clock, owner=load_config(home).owner)


def say(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert not ended.value.code
    return capsys.readouterr().out


def test_why_shows_the_same_for_each_job(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(1, JOBS + 1):
        shown, before = say(capsys, "jobs", "why", str(number)), reword(SAID["why"][str(number)])
        assert ONDEMAND.sub("", shown) == ONDEMAND.sub("", before)
    with closing(sqlite3.connect(home / "state.db")) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)


def test_events_say_the_same_and_have_a_kind_and_data(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = set()
    for number in range(1, JOBS + 1):
        events = json.loads(say(capsys, "jobs", "events", str(number), "--json"))
        assert [each["message"] for each in events] == [reword(text) for text in SAID["events"][str(number)]]
        kinds |= {EventKind(each["kind"]) for each in events}
        assert all(isinstance(each["data"], dict) for each in events)
    assert EventKind.NOTE not in kinds and len(kinds) > 25


def test_outcomes_say_the_same_and_have_a_kind(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(1, JOBS + 1):
        attempts = json.loads(say(capsys, "jobs", "why", str(number), "--json"))["attempts"]
        for attempt, (outcome, returncode, is_spot) in zip(attempts, SAID["outcomes"][str(number)], strict=True):
            said = KEPT.sub("", reword(outcome))
            assert attempt["outcome"] == (said if is_spot else said.removeprefix("preempted: "))
            assert attempt["returncode"] == returncode
            assert OutcomeKind(attempt["outcome_kind"]) is not OutcomeKind.OTHER


def test_spot_evidence_is_the_same(home: Path) -> None:
    store = open_store(home)
    stays = store.history.list_stays()
    assert [
        [list(stay.place), stay.node_count, stay.begin_s, stay.end_s, stay.is_preempted, stay.is_over] for stay in stays
    ] == SAID["stays"]
    assert {stay.is_preempted for stay in stays} == {True, False}
    history = store.history.read()
    assert [[list(place), seen.preemptions, seen.node_hours] for place, seen in history.items()] == SAID["spot"]


def test_a_backup_of_the_last_version_is_restored(home: Path) -> None:
    (home / "backups").mkdir()
    shutil.copy(home / "state.db", home / "backups" / "state-20231114T221500Z.db")
    (home / "state.db").unlink()
    (copy, *_) = list_copies(home / "state.db")
    restore(home / "state.db", copy.path, clock=SystemClock(), owner=load_config(home).owner)
    store = open_store(home)
    messages = [event.message for event in store.events.list(job_id=1)]
    assert messages == [reword(text) for text in SAID["events"]["1"]]
    assert store.events.list()[-1].kind is EventKind.RESTORED


def test_a_damaged_row_of_the_previous_version_is_left_unchanged(home: Path) -> None:
    with closing(sqlite3.connect(home / "state.db")) as connection:
        connection.execute("DROP INDEX attempts_open")  # the index would reject damage that a disk may cause
        connection.execute("UPDATE attempts SET body = '{\"job_id' WHERE job_id = 1")
        connection.execute(
            "INSERT INTO events (time_s, kind, message) VALUES (1.0, 'late', CAST(X'FF00FE' AS TEXT)), (1.0, X'00', 7)"
        )
        connection.commit()
    store = open_store(home)
    with pytest.raises(DamagedRowError):
        store.jobs.list_attempts(1)
    assert store.jobs.list_attempts(2)[0].outcome is not None
    assert [event.kind for event in store.events.list()[-2:]] == [EventKind.NOTE, EventKind.NOTE]


@pytest.mark.parametrize(
    ("kind", "message", "now"),
    [
        ("late", "the deadline cannot be kept with the asked confidence any more; going on", EventKind.LATE),
        ("advised", "the cloud expects to take node 3 sooner than usual", EventKind.ADVISED),
        ("unfit", "`setup` exited with 3 on rank 1, on a node that replaced a lost one: it is ended, another is "
         "asked for in 15 s; its output is in `broker jobs logs 4`, marked (rank1)", EventKind.UNFIT),
        ("access", "the nodes' access to buckets is not renewed: no answer", EventKind.ACCESS_NOT_RENEWED),
        ("flushing", "1 file (2.0 GB) on its way to `s3://b`", EventKind.FLUSHING),
        ("waiting", "the login has expired; trying again in 16 s", EventKind.WAITING),
        ("waiting", "no node to replace the lost one: full; trying again in 9 s", EventKind.REPLACEMENT_FAILED),
        ("restart", "`setup` exited with code 2 on used nodes: new nodes are tried", EventKind.SETUP_RETRIED),
        ("restart", "not started on job-1-1, trying another: a, b: c", EventKind.LAUNCH_RETRIED),
        ("restart", "the program exited with code 3 and is restarted on new nodes", EventKind.PROGRAM_RESTARTED),
        ("preempted", "preempted: the cloud gave notice after step 9", EventKind.ATTEMPT_LOST),
        ("preempted", "preempted: lost while starting: no answer", EventKind.ATTEMPT_LOST),
        ("last lines", "last lines of rank 1 in attempt 2:\none\n\ntwo", EventKind.LAST_LINES),
        ("last lines", "last lines in attempt 2:\none", EventKind.LAST_LINES),
        ("recovered", "recovered: step 3", EventKind.RECOVERED),
        ("adopted", "attempt 2 was found by its tags and continues", EventKind.ATTEMPT_ADOPTED),
        ("adopted", "attempt 2 was found by its tags and ends, as only 1 of its nodes were found",
         EventKind.ATTEMPT_ADOPTED),
        ("adopted", "2 running nodes tagged `dev` had no record; `broker down dev` ends them",
         EventKind.CLUSTER_ADOPTED),
        ("restored", "the state was restored from state-1.db", EventKind.RESTORED),
        ("failover", "asking for 2 x g5.xlarge spot in us-east-1a,b (aws) at 2.00 USD/h", EventKind.PLACE_ASKED),
        ("failover", "going on with 1 x a2 on-demand in us-central1-a,-b (gcp) at 2.00 USD/h", EventKind.PLACE_ASKED),
        ("failover", "us-east-1 (aws) skipped: not enabled", EventKind.REGION_SKIPPED),
        ("failover", "1 x x spot in a (c) skipped: no image", EventKind.PLACE_SKIPPED),
        ("failover", "1 x x spot in a (c): no answer; asked often enough", EventKind.CALL_FAILED),
        ("failover", "no place outside a (c) and b (d) is left to ask: waiting for a clear answer there",
         EventKind.LAST_PLACES),
        ("decision", "stay (on spot): 3.0 h of work left", EventKind.DECISION),
        ("decision", "hold no machines (no spot is open): 3.0 h of work left, -1.2 h to the deadline, 0.5 h to spare "
         "before on-demand must start, on-demand is 3.00 USD for an hour of work, expected to the end 3.00 USD by spot "
         "now, 9.50 USD by on-demand now and 4.25 USD by waiting", EventKind.DECISION),
        ("told", "a sentence of an older version", EventKind.NOTE),
    ],
)  # fmt: skip
def test_a_recorded_sentence_becomes_a_kind_that_says_the_same(kind: str, message: str, now: EventKind) -> None:
    event = read_event(kind, message)
    assert (event.kind, describe_event(event)) == (now, reword(message))
    json.dumps(event.data)


@pytest.mark.parametrize(
    ("sentence", "outcome"),
    [
        ("succeeded", Outcome(kind=OutcomeKind.SUCCEEDED)),
        ("failed with exit code -9", Outcome(kind=OutcomeKind.PROGRAM_FAILED, exit_code=-9)),
        ("stalled at step 12", Outcome(kind=OutcomeKind.STALLED, step=12)),
        ("fell apart at step 0", Outcome(kind=OutcomeKind.GANG_BROKEN, step=0)),
        ("refused: no image", Outcome(kind=OutcomeKind.REFUSED, detail="no image")),
        ("not started: no answer", Outcome(kind=OutcomeKind.LAUNCH_FAILED, detail="no answer")),
        ("files did not arrive", Outcome(kind=OutcomeKind.FILES_LOST)),
        ("moved", Outcome(kind=OutcomeKind.MOVED)),
        ("moved: spot is open", Outcome(kind=OutcomeKind.MOVED, detail="spot is open")),
        ("its unattended allowance of up to 12 h ran out after step 7",
         Outcome(kind=OutcomeKind.LEASE_EXPIRED, detail="up to 12 h", step=7)),
        ("preempted: node 0 and 1 gone after step 40",
         Outcome(kind=OutcomeKind.PREEMPTED, detail="node 0 and 1 gone", step=40)),
        ("the state was restored", Outcome(kind=OutcomeKind.SUPERSEDED)),
        ("the state was restored, and nodes of its gang were missing", Outcome(kind=OutcomeKind.GANG_INCOMPLETE)),
        ("a sentence of an older version",
         Outcome(kind=OutcomeKind.OTHER, detail="a sentence of an older version")),
        ("", None),
    ],
)  # fmt: skip
def test_a_recorded_outcome_becomes_a_kind_that_says_the_same(sentence: str, outcome: Outcome | None) -> None:
    assert read_outcome(sentence) == outcome and describe_outcome(outcome) == reword(sentence)


def test_takedowns_and_on_demand_losses_are_not_preemptions() -> None:
    taken, lost = read_outcome("preempted: its cluster was taken down"), read_outcome("preempted: gone", is_spot=False)
    assert taken == Outcome(kind=OutcomeKind.TAKEN_DOWN) and lost == Outcome(kind=OutcomeKind.NODE_LOST, detail="gone")


@pytest.mark.parametrize(
    ("status", "failure", "kind"),
    [
        ("RUNNING", "", None),
        ("CANCELLED", "", OutcomeKind.CANCELLED),
        ("CANCELLED", "job 2 (a), which it needs, is FAILED", OutcomeKind.DEPENDENCY_FAILED),
        ("FAILED", "no new step for 60 s, 3 times at step 15", OutcomeKind.STALLED),
        ("FAILED", "the gang fell apart (a reason), 3 times at step 7", OutcomeKind.GANG_BROKEN),
        ("FAILED", "the program succeeded, but 2 files did not arrive; they are lost", OutcomeKind.FILES_LOST),
        ("FAILED", "a sentence of an older version", OutcomeKind.OTHER),
        ("FAILED_PRECHECKS", "the program could not be started on 3 clusters: x", OutcomeKind.LAUNCH_FAILED),
        ("FAILED_NO_RESOURCE", "nothing", OutcomeKind.NO_OFFER),
    ],
)
def test_a_recorded_end_of_a_job_becomes_a_kind(status: str, failure: str, kind: OutcomeKind | None) -> None:
    assert read_end(status, failure) is kind


def test_an_outcome_is_kept_in_columns_and_comes_back_as_it_was(tmp_path: Path) -> None:
    store = Store(tmp_path / "state.db", clock=Hands())
    job = store.jobs.add("j", Task())
    outcomes = [
        None,
        Outcome(kind=OutcomeKind.PROGRAM_FAILED, detail="why", step=0, exit_code=0),
        Outcome(kind=OutcomeKind.MOVED),
    ]
    placement = Placement(offer=make_offer("east1a"), is_spot=True, node_count=1)
    for number, outcome in enumerate(outcomes, start=1):
        store.jobs.put_attempt(
            Attempt(job_id=job.id, number=number, cluster="c", placement=placement, started_s=0.0, outcome=outcome)
        )
    assert [attempt.outcome for attempt in store.jobs.list_attempts(job.id)] == outcomes
    assert [attempt.returncode for attempt in store.jobs.list_attempts(job.id)] == [None, 0, None]
    rows = store.rows("SELECT outcome_kind, outcome_detail, outcome_step, exit_code FROM attempts ORDER BY number")
    assert [tuple(row) for row in rows] == [
        (None, "", None, None), ("program_failed", "why", 0, 0), ("moved", "", None, None)
    ]  # fmt: skip


def test_an_event_is_kept_as_kind_and_data(tmp_path: Path) -> None:
    store = Store(tmp_path / "state.db", clock=Hands())
    store.events.add(make_event(EventKind.SHRUNK, rank=1, left=3, node_count=4), job_id=7)
    (row,) = store.rows("SELECT kind, data, job_id FROM events")
    assert (row["kind"], json.loads(row["data"]), row["job_id"]) == (
        "shrunk", {"rank": 1, "left": 3, "node_count": 4}, 7,
    )  # fmt: skip
    assert store.events.list()[0].message == "node 1 gone; continuing on 3 of 4 nodes"


@pytest.mark.parametrize(("kind", "data"), [("shrunk", "{"), ("shrunk", "[1]"), ("no such kind", "{}")])
def test_an_event_that_cannot_be_read_is_shown_as_far_as_it_can_be(tmp_path: Path, kind: str, data: str) -> None:
    store = Store(tmp_path / "state.db", clock=Hands())
    store.write("INSERT INTO events (time_s, kind, data) VALUES (1.0, ?, ?)", (kind, data))
    (event,) = store.events.list()
    assert event.kind is EventKind.NOTE and kind in event.message and data in event.message
    store.write("INSERT INTO events (time_s, kind, data) VALUES (2.0, 'shrunk', '{\"rank\": 1}')")
    assert "rank" in store.events.list()[-1].message, "data that lacks something"
