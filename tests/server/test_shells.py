"""`broker ssh` through a server: the program runs on the server, and only the owner of the cluster types in it."""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.app.consoles import Console, ScreenSize
from broker.app.verbs.shells import ShellInput, ShellOutput, UserTerminal, find_node, open_shell, run_on_node
from broker.client.login import save_login
from broker.client.remote import RemoteSession
from broker.client.shell import InputSender
from broker.config import LOGIN
from broker.errors import DeniedError, InvalidRequestError, RunFailedError, UsageError
from broker.runtime.base import Shell
from broker.runtime.streams import Stream, open_program
from broker.server.context import Policy, ServerContext
from broker.server.tokens import create_token
from broker.state.people import Owned, Role
from broker.types import Cluster, ClusterStatus, Node, Placement, Task
from tests.clouds.beds import make_node
from tests.server.conftest import Hosted
from tests.simulation.world import make_offer

TERMINAL = UserTerminal(term="xterm", size=ScreenSize(rows=40, columns=120))
PROGRAM = 'echo "as $TERM, flags $-"; stty size; while read line; do eval "$line"; done'


class NearTransport:
    """A node whose programs run here; `options` precede the script, as those of a server precede ssh's."""

    options: tuple[str, ...] = ("-e",)

    async def open_stream(self, node: Node, argv: Sequence[str], *, carries_calls: bool = True) -> Stream:
        return await open_program([sys.executable, *argv[1:]])

    async def open_shell(self, node: Node) -> Shell:
        return Shell(argv=("sh", "-c", PROGRAM), env={}, folder="/", relayed_options=self.options)


@pytest.fixture
def cluster(hosted: Hosted, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    store = hosted.context.store
    placement = Placement(offer=make_offer("east1a"), is_spot=False, node_count=2)
    nodes = tuple(replace(make_node(f"n{rank}"), rank=rank) for rank in range(2))
    store.clusters.put(Cluster(name="dev", placement=placement, status=ClusterStatus.UP, attempt=1, nodes=nodes))
    store.owners.put(Owned.CLUSTER, "dev", "user")
    monkeypatch.setattr(ServerContext, "transport", NearTransport())
    monkeypatch.setattr("broker.server.http.BEAT_S", 0.05)  # between looks at whether the user has gone
    yield "dev"
    store.clusters.delete("dev")


class Typing:
    """A user at a shell, who types each line once the output has the text before it."""

    def __init__(self, session: RemoteSession, lines: Sequence[tuple[str, str]]) -> None:
        self.session, self.lines = session, list(lines)
        self.sender = InputSender(session)
        self.seen = b""
        self.on_line: Callable[[], None] = lambda: None

    def note(self, output: ShellOutput) -> None:
        self.seen += output.read()
        while self.lines and self.lines[0][0].encode() in self.seen:
            self.on_line()
            assert self.sender.send(self.lines.pop(0)[1].encode() + b"\n", None)

    def open(self, **more: Any) -> int:
        arguments: dict[str, Any] = {"cluster": "dev", "rank": 0, "terminal": TERMINAL, **more}
        try:
            return self.session.call(open_shell, **arguments, on_output=self.note)
        finally:
            self.sender.close()


def test_owner_types_in_a_shell_of_the_node_and_both_ends_are_audited(hosted: Hosted, cluster: str) -> None:
    typing = Typing(hosted.open("user"), [("40 120", "echo $((20 + 22))"), ("42", "exit 5")])
    assert typing.open() == 5
    assert "as xterm, flags e" in typing.seen.decode(), "with the options for users of a server"
    found = [(each.verb, each.target, each.outcome) for each in hosted.context.store.audit.list(newest=2)]
    target = "cluster dev, node dev-0"
    assert found == [("open_shell", target, "started"), ("open_shell", target, "done")]


def test_only_the_user_of_a_shell_types_in_it(hosted: Hosted, cluster: str) -> None:
    typing = Typing(hosted.open("user"), [("40 120", "exit 0")])
    refused: list[int] = []

    def type_as_others() -> None:
        path = f"/v1/input/{typing.session.request_id}"
        body = {"data": base64.b64encode(b"exit 9\n").decode()}
        refused.extend(hosted.ask(path, body, token=hosted.tokens[user])[0] for user in ("other", "viewer", "admin"))
        reading = create_token(hosted.context.store, user="user", role=Role.VIEWER, days=1).value.value
        refused.append(hosted.ask(path, body, token=reading)[0])
        refused.append(hosted.ask(path, body)[0])
        refused.append(hosted.ask(path, {"data": "%"}, token=hosted.tokens["user"])[0])
        refused.append(hosted.ask(path, {"size": {"rows": 0, "columns": 1}}, token=hosted.tokens["user"])[0])

    typing.on_line = type_as_others
    assert typing.open() == 0 and refused == [403, 403, 403, 403, 401, 400, 400]
    status, answer = hosted.ask(f"/v1/input/{'0' * 32}", {}, token=hosted.tokens["user"])
    assert status == 422 and "has ended" in answer["error"]["message"]


@pytest.mark.parametrize("user", ["other", "viewer"])
def test_others_get_neither_a_shell_nor_a_command(hosted: Hosted, cluster: str, user: str) -> None:
    session = hosted.open(user)
    with pytest.raises(DeniedError):
        Typing(session, []).open()
    with pytest.raises(DeniedError):
        session.call(run_on_node, cluster="dev", rank=0, command=("id",), on_output=lambda output: None)


def test_owner_is_compared_again_after_the_cluster_was_found(hosted: Hosted, cluster: str) -> None:
    """Between the first check and the command, the cluster may have been replaced by one of another user."""
    token = next(each for each in hosted.context.store.tokens.list() if each.user == "other")
    context = ServerContext(hosted.home, policy=Policy(), token=token)
    with pytest.raises(DeniedError, match="belongs to user"):
        run_on_node(context, cluster="dev", rank=0, command=("id",), on_output=lambda output: None)
    with pytest.raises(DeniedError, match="belongs to user"):
        open_shell(context, cluster="dev", rank=0, terminal=TERMINAL, on_output=lambda output: None)
    context.close()


def test_owner_of_a_managed_job_enters_its_nodes_and_others_do_not(hosted: Hosted, cluster: str) -> None:
    store = hosted.context.store
    job = store.jobs.add("train", Task(run="true"))
    store.owners.put(Owned.JOB, str(job.id), "other")
    own = store.clusters.get(cluster)
    assert own is not None
    store.clusters.put(replace(own, job_id=job.id))  # the owner of the job decides, not that of the name
    found: list[ShellOutput] = []
    arguments = {"cluster": cluster, "rank": 0, "command": ("hostname",), "on_output": found.append}
    assert hosted.open("other").call(run_on_node, **arguments) == 0 and found
    with pytest.raises(DeniedError, match=f"job `{job.id}` belongs to other"):
        hosted.open("user").call(run_on_node, **arguments)
    token = next(each for each in store.tokens.list() if each.user == "user")
    context = ServerContext(hosted.home, policy=Policy(), token=token)
    with pytest.raises(DeniedError, match="belongs to other"):
        open_shell(context, cluster=cluster, rank=0, terminal=TERMINAL, on_output=lambda output: None)
    context.close()


def test_command_returns_its_output_as_bytes_and_its_exit_code(hosted: Hosted, cluster: str) -> None:
    session = hosted.open("user")
    found: list[ShellOutput] = []
    node = session.call(find_node, node="dev-1")
    command = ("sh", "-c", r"printf 'out\377'; printf err >&2; exit 7")
    code = session.call(run_on_node, cluster=node.cluster, rank=node.rank, command=command, on_output=found.append)
    assert code == 7 and {(each.read(), each.is_error) for each in found} == {(b"out\xff", False), (b"err", True)}
    with pytest.raises(UsageError, match="has no node 2"):
        session.call(find_node, node="dev-2")
    with pytest.raises(UsageError, match="unknown cluster"):
        session.call(find_node, node="nope-1")


@pytest.mark.parametrize("wrong", [UserTerminal(term="x y", size=ScreenSize()),
                                   UserTerminal(term="x", size=ScreenSize(rows=70_000))])  # fmt: skip
def test_invalid_terminal_size_is_refused(hosted: Hosted, cluster: str, wrong: UserTerminal) -> None:
    with pytest.raises(UsageError, match=r"invalid .* of (the )?terminal"):
        Typing(hosted.open("user"), []).open(terminal=wrong)
    with pytest.raises(InvalidRequestError):
        ShellInput(data="?").read()


def test_shell_ends_when_its_user_has_gone(hosted: Hosted, cluster: str) -> None:
    typing = Typing(hosted.open("user"), [("40 120", "echo $((30 + 1))")])

    class Gone(Exception):
        pass

    def leave(output: ShellOutput) -> None:
        Typing.note(typing, output)
        if b"31" in typing.seen:
            raise Gone

    with pytest.raises(Gone):
        typing.session.call(open_shell, cluster="dev", rank=0, terminal=TERMINAL, on_output=leave)
    typing.sender.close()
    while [each.outcome for each in hosted.context.store.audit.list(newest=1)] != ["done"]:
        pass  # recorded once the program has ended


def test_shell_on_the_servers_own_machine_is_refused_unless_it_is_allowed(tmp_path: Path) -> None:
    placement = Placement(offer=replace(make_offer("east1a"), cloud="local"), is_spot=False, node_count=1)
    here = Cluster(name="dev", placement=placement, status=ClusterStatus.UP, attempt=1)
    ServerContext(tmp_path, policy=Policy(has_local_cloud=True)).check_shell(here)
    with pytest.raises(UsageError, match="as the server's own user"):
        ServerContext(tmp_path, policy=Policy()).check_shell(here)


def test_command_line_connects_the_terminal_and_returns_the_exit_code(
    hosted: Hosted, cluster: str, tmp_path: Path
) -> None:
    save_login(tmp_path / LOGIN, hosted.login("user"))
    console, lines, seen = Console(), [("30 99", "echo $((20 + 22))"), ("42", "exit 5")], bytearray()

    def note(data: bytes) -> None:
        seen.extend(data)
        if lines and lines[0][0].encode() in seen:
            console.put(lines.pop(0)[1].encode() + b"\n", None)

    code = console.run(
        [sys.executable, "-m", "broker", "ssh", "dev"],
        env={"BROKER_HOME": str(tmp_path), "TERM": "vt100"}, folder=str(Path.cwd()),
        size=ScreenSize(rows=30, columns=99), on_output=note,
    )  # fmt: skip
    assert code == 5 and "as vt100" in seen.decode(), seen.decode()


def test_command_line_ends_when_the_token_is_revoked(hosted: Hosted, cluster: str, tmp_path: Path) -> None:
    """In a raw terminal, Ctrl-C is a key like any other: without a way to send it, the user would be locked in.

    Also where broker was started with Ctrl-C ignored, as by `broker ssh dev &` in a script.
    """
    store = hosted.context.store
    made = create_token(store, user="user", role=Role.USER, days=1)
    save_login(tmp_path / LOGIN, replace(hosted.login("user"), token=made.value))
    console, seen = Console(), bytearray()

    def note(data: bytes) -> None:
        seen.extend(data)
        if b"30 99" in seen and store.tokens.revoke(made.id):
            console.put(b"\x03", None)

    code = console.run(
        ["sh", "-c", f"trap '' INT; exec {sys.executable} -m broker ssh dev"],
        env={"BROKER_HOME": str(tmp_path)}, folder=str(Path.cwd()), size=ScreenSize(rows=30, columns=99),
        on_output=note,
    )  # fmt: skip
    assert code == 5 and "expired or revoked" in seen.decode(), seen.decode()


def test_exit_code_of_a_command_is_that_of_the_command_line(
    hosted: Hosted, cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: Any
) -> None:
    from broker.cli.lifecycle import ssh

    monkeypatch.setenv("BROKER_HOME", str(tmp_path))
    save_login(tmp_path / LOGIN, hosted.login("user"))
    with pytest.raises(RunFailedError) as failed:
        ssh("dev", ["sh", "-c", r"printf 'a\377'; printf e >&2; exit 2"])
    assert failed.value.returncode == 2 and capfdbinary.readouterr() == (b"a\xff", b"e")
