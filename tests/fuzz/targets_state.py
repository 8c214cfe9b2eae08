"""The state file as a damaged disk or another program leaves it: the store answers, or raises StateError."""

from __future__ import annotations

import atexit
import contextlib
import functools
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from broker.clock import SystemClock
from broker.errors import StateError
from broker.state.store import Store
from broker.types import (
    Attempt,
    Cluster,
    ClusterStatus,
    EventKind,
    JobStatus,
    Node,
    NodeRequest,
    NodeState,
    Placement,
    Progress,
    Secret,
    Task,
    make_event,
)
from tests.fuzz.registry import Target
from tests.simulation.world import make_offer

_ROOT = Path(tempfile.mkdtemp(prefix="fuzz-state-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
atexit.register(shutil.rmtree, _ROOT, ignore_errors=True)
_PLACEMENT = Placement(offer=make_offer("east1a"), is_spot=True, node_count=1)
_HEADER = 6  # bytes that say which kind of damage, and where


@functools.cache
def make_template() -> bytes:
    """Make a state file with a row in every table that a small installation fills."""
    folder = _ROOT / "template"
    store = Store(folder / "state.db", clock=SystemClock())
    request = NodeRequest(owner="me", cluster="c", attempt=1, token="t", placement=_PLACEMENT)
    node = Node(
        id="n", cloud="simulated", owner="me", cluster="c", attempt=1, rank=0, state=NodeState.RUNNING, token="t",
        address="10.0.0.1", handle="h",
    )  # fmt: skip
    job = store.jobs.add("train", Task(name="a", run="x", secrets={"TOKEN": Secret(value="s")}), "request")
    store.intents.put(request)
    store.clusters.put(
        Cluster(name="c", status=ClusterStatus.UP, placement=_PLACEMENT, attempt=1, nodes=(node,), job_id=job.id)
    )
    store.bills.record(node)
    store.jobs.put_attempt(Attempt(job_id=job.id, number=1, cluster="c", started_s=1.0, placement=_PLACEMENT))
    store.jobs.set_progress(job.id, Progress(step=1, total=2))
    store.events.add(make_event(EventKind.STARTED), job_id=job.id)
    store.close()
    with contextlib.closing(sqlite3.connect(folder / "state.db")) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return (folder / "state.db").read_bytes()


@functools.cache
def list_columns() -> list[tuple[str, str]]:
    make_template()
    with contextlib.closing(sqlite3.connect(_ROOT / "template" / "state.db")) as connection:
        tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        found = [(table, row[1]) for table in tables for row in connection.execute(f"PRAGMA table_info({table})")]
    return [each for each in found if not each[0].startswith("sqlite_")]


def damage(path: Path, data: bytes) -> None:
    """Flip bytes, cut the file, replace its beginning, or set one column of all rows to a text or a blob."""
    whole, header, rest = bytearray(make_template()), data[:_HEADER].ljust(_HEADER, b"\0"), data[_HEADER:]
    kind, place = header[0] % 5, int.from_bytes(header[1:4], "big") % len(whole)
    if kind == 0:
        for number, each in enumerate(rest[:64]):
            whole[(place + number * (header[4] + 1)) % len(whole)] ^= each
    elif kind == 1:
        del whole[place:]
    elif kind == 2:
        whole[: len(rest)] = rest
    path.write_bytes(whole)
    if kind >= 3:
        columns = list_columns()
        table, column = columns[place % len(columns)]
        with contextlib.closing(sqlite3.connect(path)) as connection, contextlib.suppress(sqlite3.Error):
            connection.execute("PRAGMA ignore_check_constraints=ON")
            value = rest.decode("utf-8", "replace") if kind == 3 else rest
            for name in [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type='trigger'")]:
                connection.execute(f"DROP TRIGGER {name}")
            connection.execute(f"UPDATE {table} SET {column} = ?", (value,))
            connection.commit()


def list_reads(store: Store) -> list[Callable[[], Any]]:
    return [
        store.jobs.list, lambda: store.jobs.get(1), store.jobs.list_lines, store.jobs.list_live_ids,
        store.jobs.list_unfinished_ids, store.clusters.list, lambda: store.clusters.get("c"), store.intents.list_open,
        lambda: store.intents.list_tokens("c"), store.bills.list, lambda: store.bills.spend_usd(now_s=1.0),
        lambda: store.bills.list_spend_usd(now_s=1.0), lambda: store.events.list(1),
        lambda: store.jobs.list_attempts(1),
        lambda: store.jobs.list_steps(1), lambda: store.jobs.get_log_offset(1), lambda: store.refusals.list_active(1.0),
        store.history.list_stays, lambda: store.history.read(), lambda: store.response_times.get("aws", "answer"),
        store.leader.measure_beat_age_s, lambda: store.clusters.newest_run_id("c"),
        lambda: store.jobs.find_request("request"),
        lambda: store.events.add(make_event(EventKind.LATE), job_id=1), lambda: store.jobs.add("b", Task(run="x")),
        lambda: store.jobs.request_cancel(1), lambda: store.jobs.set_status(1, JobStatus.FAILED, "x"),
        store.retention.compact,
    ]  # fmt: skip


def fuzz_store(data: bytes) -> None:
    folder = _ROOT / "home"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    path = folder / "state.db"
    damage(path, data)
    try:
        store = Store(path, clock=SystemClock())
    except StateError:
        return
    try:
        for read in list_reads(store):
            with contextlib.suppress(StateError):
                read()
    finally:
        store.close()


FUZZ_TARGETS: dict[str, Target] = {"store": fuzz_store}
# Found once: a broken schema that sqlite3 quotes, values of another kind than were written, an index that loses rows.
_FOUND = (
    b"\xbeD}\xbf\xb9\xe4\x087\x87\xe5w\xa8\x92\tn\xc0",
    b"^\xf6\xdd\xde;\xa0\xfa$\xc0P\t#w\x05\x96\xcf\x0e\xd6\xd9\xfe\xe4\xedkE?13\xc6\xf6\x88\x80,\x03\x00\x10Z{}",
    b"\x00\x00\xbc"
    + bytes(18)
    + b"\x04"
    + bytes(27)
    + b"\xed" * 15
    + bytes(6)
    + b"\x1c\x1c\x1c\x1c\x00\x00/"
    + bytes(25)
    + b'\xff\xff\x00\x80\x00\x00\x00\x00\x10\x01{*"}',
)
_VALUES = (b"\xff" * 8, b"{}", b"null", b'{"a": 1}', b"")
SEEDS = {
    "store": [
        *_FOUND,
        *[
            bytes([kind, 0, 16, place, 1, 0]) + each
            for kind in range(5)
            for place in (0, 7, 40, 90)
            for each in _VALUES
        ],
    ]
}
