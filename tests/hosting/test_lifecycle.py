"""Up and down of a server's machine, with a machine that does not answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from broker.app.container import Context
from broker.errors import StateError, TransientError, UsageError
from broker.hosting.lifecycle import Hosting
from broker.hosting.record import HostedRecord, HostedServer, HostedStatus
from broker.sites.openssh import Completed
from broker.types import Node, NodeState, Payee, ScheduleSpec, Task


@dataclass
class SilentMachine:
    """A machine that accepts no connection."""

    listens_on: str = "0.0.0.0"
    address: str = "192.0.2.1"

    async def run(self, argv: Sequence[str], *, stdin: bytes) -> Completed:
        raise TransientError("no answer from 192.0.2.1")


class Machines:
    """Records whether the machine was terminated."""

    def __init__(self) -> None:
        self.has_ended = False

    def ensure(self, server: HostedServer) -> SilentMachine:
        return SilentMachine()

    def find(self, server: HostedServer) -> SilentMachine:
        return SilentMachine()

    def end(self, server: HostedServer) -> None:
        self.has_ended = True


def make(home: Path, *, cluster: str | None) -> tuple[Hosting, Machines, HostedRecord, list[str]]:
    record, machines, notes = HostedRecord(home), Machines(), list[str]()
    server = HostedServer(
        infra="aws" if cluster else "ssh://host", folder="~/server", port=8471, status=HostedStatus.STARTING,
        cluster=cluster,
    )  # fmt: skip
    record.write(server)
    return Hosting(record, machines, owner="me", note=notes.append), machines, record, notes


def test_paid_machine_that_does_not_answer_is_terminated(tmp_path: Path) -> None:
    hosting, machines, record, notes = make(tmp_path, cluster="broker-server")
    hosting.take_down(is_forced=False)
    assert machines.has_ended
    assert record.read() is None
    assert "no answer" in notes[-1]


def test_own_host_that_does_not_answer_is_given_up_only_by_force(tmp_path: Path) -> None:
    hosting, _, record, notes = make(tmp_path, cluster=None)
    with pytest.raises(StateError, match="no answer") as caught:
        hosting.take_down(is_forced=False)
    assert "--force" in caught.value.hints[-1]
    left = record.read()
    assert left is not None and left.status is HostedStatus.ENDING, "the next `down` continues"
    hosting.take_down(is_forced=True)
    assert record.read() is None
    assert "no answer" in notes[-1]


def test_server_that_is_being_removed_is_not_upgraded(tmp_path: Path) -> None:
    """Its state may be gone: the upgrade would install an empty server, and forget that `down` was requested."""
    hosting, _, record, _ = make(tmp_path, cluster=None)
    with pytest.raises(StateError):
        hosting.take_down(is_forced=False)
    with pytest.raises(UsageError, match="is being removed"):
        hosting.upgrade()
    left = record.read()
    assert left is not None and left.status is HostedStatus.ENDING


def test_location_of_backups_is_added_to_a_server_that_has_none(tmp_path: Path) -> None:
    """`broker server status` says that `up --backup URL` does."""
    hosting, _, record, _ = make(tmp_path, cluster=None)
    known = record.read()
    assert known is not None
    with pytest.raises(TransientError):
        hosting.bring_up(replace(known, config='backup = "s3://b"\n'))
    left = record.read()
    assert left is not None and left.config == 'backup = "s3://b"\n'
    with pytest.raises(UsageError, match="another location for its backups"):
        hosting.bring_up(replace(known, config='backup = "s3://other"\n'))
    with pytest.raises(TransientError):
        hosting.bring_up(replace(known, config=""))
    left = record.read()
    assert left is not None and left.config == 'backup = "s3://b"\n'


class OwnSession:
    """Runs the verbs of a server on a state folder of this machine."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def call(self, verb: Callable[..., object], **named: object) -> object:
        return verb(self._context, **named)


@pytest.mark.parametrize("what", ["schedule", "machines"])
def test_server_with_a_schedule_or_with_paid_machines_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Neither is a live job or a cluster: the job runs tonight, and the machines of an ended job are still ending."""
    monkeypatch.setattr(Context, "ensure_daemon", lambda context: None)
    hosting, machines, record, _ = make(tmp_path / "laptop", cluster="broker-server")
    server = record.read()
    assert server is not None
    record.write(replace(server, status=HostedStatus.UP))
    context = Context(tmp_path / "server")
    monkeypatch.setattr(hosting, "open", lambda server: OwnSession(context))
    if what == "schedule":
        context.store.schedules.add(
            "nightly", Task(run="true"), ScheduleSpec(cron="0 2 * * *"), next_s=2e9, request_id=None, hedge=1,
            payee=Payee(),
        )  # fmt: skip
    else:
        node = Node(
            id="i-1", cloud="aws", owner="me", cluster="job-1", attempt=1, rank=0, state=NodeState.RUNNING,
            usd_hour=2.5, created_s=1.0,
        )  # fmt: skip
        context.store.bills.record(node)
    with pytest.raises(UsageError, match="1 schedule" if what == "schedule" else r"machines for 2\.50 USD/h"):
        hosting.take_down(is_forced=False)
    assert not machines.has_ended and record.read() is not None
    hosting.take_down(is_forced=True)
    assert machines.has_ended
    context.close()
