"""Up and down of a server's machine, with a machine that does not answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from broker.app.container import Context
from broker.errors import AuthError, BrokerError, DeniedError, StateError, TransientError, UsageError
from broker.hosting.lifecycle import Hosting
from broker.hosting.record import HostedRecord, HostedServer, HostedStatus, MachineLogin
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
        self.is_found = True
        self.ended_logins = list[str]()
        self.allowed = list[str]()
        self.machine = SilentMachine()
        self.refusal: BrokerError | None = None
        self.expiry: BrokerError | None = None

    def ensure(self, server: HostedServer) -> SilentMachine:
        return self.machine

    def find(self, server: HostedServer) -> SilentMachine | None:
        return self.machine if self.is_found else None

    def end(self, server: HostedServer) -> None:
        self.has_ended = True

    def make_settings(self, server: HostedServer) -> Mapping[str, str]:
        if self.expiry is not None:
            raise self.expiry
        return {}

    def allow(self, server: HostedServer, owner: str) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.allowed.append(owner)

    def end_login(self, server: HostedServer) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.ended_logins.append(server.login.name)


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


@pytest.mark.parametrize("cluster", [None, "broker-server"])
def test_server_that_gets_work_while_it_is_removed_continues(tmp_path: Path, cluster: str | None) -> None:
    hosting, machines, record, _ = make(tmp_path, cluster=cluster)
    machines.machine = AnsweringMachine(answer={"is_installed": True, "has_work": True})
    with pytest.raises(UsageError, match="got work while it was being removed"):
        hosting.take_down(is_forced=False)
    left = record.read()
    assert left is not None and left.status is HostedStatus.UP and not machines.has_ended


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


def test_role_that_cannot_be_deleted_keeps_the_record_unless_forced(tmp_path: Path) -> None:
    hosting, machines, record, notes = make(tmp_path, cluster="broker-server")
    machines.refusal = DeniedError("not allowed: iam:DeleteRole")
    with pytest.raises(DeniedError):
        hosting.take_down(is_forced=False)
    left = record.read()
    assert machines.has_ended and left is not None and left.status is HostedStatus.ENDING
    hosting.take_down(is_forced=True)
    assert record.read() is None and "was not deleted: not allowed" in notes[-1]


def test_another_role_may_be_chosen_until_a_machine_exists(tmp_path: Path) -> None:
    """As after a refusal to create the first one, of which a part may exist."""
    hosting, machines, record, _ = make(tmp_path, cluster="broker-server")
    known = record.read()
    assert known is not None
    first = MachineLogin(name="broker-server-me", is_own=True)
    record.write(replace(known, login=first))
    with pytest.raises(TransientError):
        hosting.bring_up(known)
    left = record.read()
    assert left is not None and left.login == first and not machines.ended_logins, "the machine has it"
    machines.is_found = False
    with pytest.raises(TransientError):
        hosting.bring_up(known)
    left = record.read()
    assert left is not None and left.login == MachineLogin() and machines.ended_logins == ["broker-server-me"]


@dataclass
class AnsweringMachine(SilentMachine):
    """Carries out nothing; its server has an ID from its first start, or from the backup that was restored."""

    owner: str = ""
    on_start: Callable[[], None] = lambda: None
    answer: Mapping[str, object] | None = None

    async def run(self, argv: Sequence[str], *, stdin: bytes) -> Completed:
        sizes = [int(word) for word in argv if word.isdigit()]
        request = json.loads(stdin[sum(sizes) :].partition(b"\n")[0])
        if request["verb"] == "start":
            self.on_start()
            self.owner = self.owner or "server"
        listening = {"fingerprint": "aa", "version": "1"}
        answer = self.answer or {"owner": self.owner, "listening": listening, "token": "t", "key": ""}
        return Completed(returncode=0, stdout=json.dumps({"answer": answer}).encode(), stderr=b"")


@pytest.mark.parametrize("owner", ["", "restored"])
def test_role_is_limited_to_the_machines_of_the_server(tmp_path: Path, owner: str) -> None:
    """A restored server has its ID, and jobs to continue, before it starts."""
    hosting, machines, record, _ = make(tmp_path, cluster="broker-server")
    machines.machine = machine = AnsweringMachine(owner=owner)
    machine.on_start = lambda: allowed_before.extend(machines.allowed)
    allowed_before = list[str]()
    known = record.read()
    assert known is not None
    hosting.bring_up(known)
    assert machines.allowed == [owner or "server"]
    assert allowed_before == ([owner] if owner else [])


def test_upgrade_continues_if_the_permissions_cannot_be_updated(tmp_path: Path) -> None:
    hosting, machines, record, notes = make(tmp_path, cluster="broker-server")
    machines.machine = AnsweringMachine(owner="server")
    machines.refusal = DeniedError("not allowed: iam:PutRolePolicy")
    with pytest.raises(DeniedError):
        hosting.upgrade()
    known = record.read()
    assert known is not None
    record.write(replace(known, status=HostedStatus.UP))
    hosting.upgrade()
    assert "were not updated: not allowed: iam:PutRolePolicy" in notes[-1]


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


def test_upgrade_needs_no_login_to_the_cloud(tmp_path: Path) -> None:
    """The machine is reached over ssh, and has its settings since it was set up."""
    hosting, machines, record, notes = make(tmp_path, cluster="broker-server")
    machines.machine = AnsweringMachine(owner="server")
    machines.expiry = AuthError("ExpiredToken")
    with pytest.raises(AuthError):
        hosting.upgrade()
    known = record.read()
    assert known is not None
    record.write(replace(known, status=HostedStatus.UP))
    assert hosting.upgrade().status is HostedStatus.UP
    assert "were not sent again: ExpiredToken" in notes[-1]


@pytest.mark.parametrize("is_forced", [False, True])
def test_server_is_asked_to_stay_if_it_has_work_unless_its_removal_is_forced(tmp_path: Path, is_forced: bool) -> None:
    hosting, machines, record, _ = make(tmp_path, cluster="broker-server")
    asked: list[dict[str, object]] = []

    class Asked(AnsweringMachine):
        async def run(self, argv: Sequence[str], *, stdin: bytes) -> Completed:
            sizes = [int(word) for word in argv if word.isdigit()]
            asked.append(json.loads(stdin[sum(sizes) :].partition(b"\n")[0]))
            return Completed(returncode=0, stdout=b'{"answer": {}}', stderr=b"")

    machines.machine = Asked()
    hosting.take_down(is_forced=is_forced)
    assert [(each["verb"], each["is_idle_only"], each["owner"]) for each in asked] == [("remove", not is_forced, "me")]
    assert machines.has_ended and record.read() is None and machines.ended_logins == [""]


def test_status_shows_neither_the_token_nor_the_key(tmp_path: Path) -> None:
    hosting, machines, _, _ = make(tmp_path, cluster=None)
    machines.machine = AnsweringMachine(owner="o")
    _, found = hosting.read_status()
    assert found["owner"] == "o" and not {"token", "key"} & set(found)
    machines.is_found = False
    assert hosting.read_status()[1] == {"is_installed": False}
