"""Move the jobs of this state folder to the server, without restarting their programs (decision 0383).

    fence this folder (moved.json) -> its daemon stops -> send files -> send the state -> start the server -> complete

The server takes over the whole installation: its ID, so that it finds the machines, its keys, so that it reaches them,
and every row, so that names, attempts and intents stay as they are. Every step may be repeated after an interruption.
"""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from broker.app.backups import DATABASE, FOLDERS, pack_state
from broker.app.container import Context
from broker.app.moving import MoveDestination, forget_moved, read_moved, write_moved
from broker.client.files import upload_files
from broker.clock import SystemClock
from broker.dashboard.verbs import show_overview
from broker.errors import StateError, UsageError
from broker.frozen import frozen
from broker.hosting.lifecycle import Hosting
from broker.hosting.machines import HostMachine, call
from broker.hosting.record import HostedServer
from broker.jobs.daemon_process import hold_lock
from broker.state.database import BUSY_TIMEOUT_MS
from broker.state.faults import explain_fault
from broker.state.schedules import name_secrets
from broker.state.secret_rows import KNOWN_KEY, SecretBox, load_key, read_key
from broker.task.codec import encode_task
from broker.types import Task

STOP_S, POLL_S = 60.0, 0.2
MOVING = "moving/"  # prefix of the keys in `meta` that hold tasks with the server's paths
SCHEDULE = "schedule/"  # follows MOVING in the key of a schedule, before its name
LOGS = "logs/jobs"
SEEN_HERE = ("local", "checkpoints")  # folders that a server on this machine uses in place, through links
EMPTIED = ("tokens", "owners", "audit", "commitments", "limits")


@frozen
class LocalWork:
    """The work of this state folder: live jobs as `ID NAME STATUS`, and names of the rest."""

    jobs: tuple[str, ...]
    clusters: tuple[str, ...]
    services: tuple[str, ...]
    schedules: tuple[str, ...]


def list_work(context: Context) -> LocalWork:
    """List live jobs, clusters, schedules and services; a move takes all but the services."""
    lines = [line for line in context.store.jobs.list_lines(0) if not line.status.is_terminal]
    return LocalWork(
        jobs=tuple(f"{line.id} {line.name} {line.status.value}" for line in lines),
        clusters=tuple(each.name for each in context.store.clusters.list()),
        services=tuple(context.store.services.list_names()),
        schedules=tuple(each.name for each in context.store.schedules.list()),
    )


def check_movable(context: Context, hosting: Hosting, server: HostedServer, work: LocalWork) -> None:
    """Raise UsageError if the work cannot move, or if the server has work of its own."""
    if context.store.is_shared:
        raise UsageError(
            "this state is in PostgreSQL, which servers can share", hints=["start a server with `--state URL`"]
        )
    if work.services:
        raise UsageError(
            f"services listen on this machine and do not move: {', '.join(work.services)}",
            hints=["end them first: `broker serve down --all`"],
        )
    if server.cluster in work.clusters:
        raise UsageError(
            f"the server runs on cluster `{server.cluster}` of this installation, which cannot move to itself",
            hints=["move to a server on `ssh://HOST`"],
        )
    overview = hosting.open(server).call(show_overview)
    if overview.job_count or overview.clusters:
        raise explain_busy(server)


def explain_busy(server: HostedServer) -> UsageError:
    """Make the error for a server that has work of its own."""
    return UsageError(
        f"the server at {server.url} has jobs or clusters of its own; only an empty one can take over",
        hints=["set up another one from another `BROKER_HOME`"],
    )


def move(context: Context, hosting: Hosting) -> HostedServer:
    """Move everything to the server of this installation; repeatable. Raises UsageError, StateError.

    If the server has got work since it was checked, for example while a move was interrupted, nothing moves, and the
    jobs continue here.
    """
    home = context.config.home
    server = hosting.get()
    machine = hosting.find_machine(server)
    moved = read_moved(home)
    if moved is None or not moved.url:
        check_movable(context, hosting, server, list_work(context))
        moved = MoveDestination(url=server.url, word=secrets.token_hex(16))
        _send_and_fence(context, moved, lambda tasks: _send_files(context, hosting, server, machine, tasks))
    elif moved.is_complete:
        raise UsageError(f"everything has already been moved to {moved.url}")
    with _stop_daemon(context):
        links = {name: str(home / name) for name in SEEN_HERE} if server.infra == "local" else {}
        request = {**hosting.make_request(server), "verb": "adopt", "word": moved.word, "links": links}
        status = asyncio.run(call(machine, {**hosting.make_request(server), "verb": "status"}))

        def edit(connection: sqlite3.Connection) -> None:
            _empty(connection)
            if status["key"]:  # the server keeps its key; if it has none, it gets ours
                _seal_again(
                    connection, SecretBox(load_key(home)), SecretBox(read_key(status["key"], "the server's key"))
                )

        _await_writers(home)  # again: the fence may be from a move that was interrupted
        content = pack_state(home, edit=edit, folders=(*FOLDERS, LOGS, "secret.key"))
        answer = asyncio.run(call(machine, request, content))
        up = hosting.bring_up(server)
        if answer.get("has_work"):
            forget_moved(home)
        else:
            write_moved(home, replace(moved, is_complete=True))
    if answer.get("has_work"):
        context.restart_daemon_if_needed()
        raise explain_busy(server)
    return up


def _send_and_fence(
    context: Context, moved: MoveDestination, send: Callable[[Mapping[str, Task]], Mapping[str, Task]]
) -> None:
    """Send the files of all tasks, and end writing here.

    Sending may take long: schedules and commands may submit jobs meanwhile, whose files follow.
    """
    sent: dict[str, Task] = {}
    while True:
        found = send({key: task for key, task in _list_tasks(context).items() if key not in sent})
        _write_tasks(context, found)
        sent.update(found)
        write_moved(context.config.home, moved)
        _await_writers(context.config.home)
        if _list_tasks(context).keys() <= sent.keys():
            return
        forget_moved(context.config.home)


def _await_writers(home: Path) -> None:
    """Wait until transactions have ended that began before there was a fence. Raises StateError."""
    path = home / DATABASE
    try:
        with closing(sqlite3.connect(path, isolation_level=None, timeout=BUSY_TIMEOUT_MS / 1000)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
    except sqlite3.Error as error:
        raise explain_fault(path, error) from error


def _list_tasks(context: Context) -> Mapping[str, Task]:
    """List the tasks of live jobs by ID, and of schedules by `schedule/` with the name."""
    tasks = {
        f"{SCHEDULE}{each.name}": context.store.schedules.get_task(each) for each in context.store.schedules.list()
    }
    for job_id in context.store.jobs.list_live_ids():
        job = context.store.jobs.get(job_id)
        if job is not None and not job.status.is_terminal:
            tasks[str(job_id)] = job.task
    return tasks


def _send_files(
    context: Context, hosting: Hosting, server: HostedServer, machine: HostMachine, tasks: Mapping[str, Task]
) -> Mapping[str, Task]:
    """Upload the local files of tasks; return the tasks with the server's paths."""
    session = hosting.open(server)
    state = asyncio.run(call(machine, {**hosting.make_request(server), "verb": "status"}))["state"]

    def send(digest: str, archive: IO[bytes]) -> None:
        session.send_file(digest, archive)

    def place(path: str) -> str:
        return path.replace("upload:", f"{state}/uploads/", 1) if path.startswith("upload:") else path

    found = {}
    for key, task in tasks.items():
        sent = upload_files(task, send, note=context.note)
        found[key] = replace(
            sent,
            workdir=place(sent.workdir) if sent.workdir else None,
            file_mounts={target: place(source) for target, source in sent.file_mounts.items()},
            storage_mounts=tuple(
                replace(each, source=tuple(place(source) for source in each.source)) for each in sent.storage_mounts
            ),
        )
    return found


def _write_tasks(context: Context, tasks: Mapping[str, Task]) -> None:
    """Store the tasks with the server's paths for the copy, under keys of `meta` that only the move reads."""
    for key, task in tasks.items():
        context.store.meta.put(f"{MOVING}{key}", encode_task(task))


def _empty(connection: sqlite3.Connection) -> None:
    """Give the copy the server's paths, and delete its rows about people, their tokens and their limits."""
    rows: list[Any] = connection.execute("SELECT key, value FROM meta WHERE key LIKE 'moving/%'").fetchall()
    for key, task in rows:
        name = key.removeprefix(MOVING)
        if name.startswith(SCHEDULE):
            connection.execute("UPDATE schedules SET task = ? WHERE name = ?", (task, name.removeprefix(SCHEDULE)))
        else:
            connection.execute("UPDATE jobs SET task = ? WHERE id = ? AND NOT is_terminal", (task, int(name)))
    connection.execute("DELETE FROM meta WHERE key LIKE 'moving/%'")
    for table in EMPTIED:
        connection.execute(f"DELETE FROM {table}")


def _seal_again(connection: sqlite3.Connection, ours: SecretBox, theirs: SecretBox) -> None:
    """Encrypt the secrets of schedules with the server's key."""
    for name, uid, text in connection.execute(
        "SELECT name, uid, secrets FROM schedules WHERE secrets IS NOT NULL"
    ).fetchall():
        about = name_secrets(name, uid)
        connection.execute(
            "UPDATE schedules SET secrets = ? WHERE name = ?", (theirs.seal(about, ours.open(about, text)), name)
        )
    connection.execute("UPDATE meta SET value = ? WHERE key = ?", (theirs.fingerprint, KNOWN_KEY))


@contextmanager
def _stop_daemon(context: Context) -> Iterator[None]:
    """Wait for the daemon's lock and hold it: the fenced daemon releases it at its next heartbeat."""
    end_s = context.clock.now_s() + STOP_S
    while True:
        with hold_lock(context.config) as is_held:
            if is_held:
                yield
                return
        if context.clock.now_s() > end_s:
            raise StateError(
                "the jobs daemon of this machine did not stop, although it can no longer write",
                hints=("repeat `broker server import-local`",),
            )
        asyncio.run(SystemClock().sleep(POLL_S))
