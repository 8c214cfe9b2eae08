"""Where a server may run, and the machine that a cloud gives it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from broker.app.container import Context
from broker.errors import BrokerError, StateError, TransientError, UsageError
from broker.hosting.finding import CLUSTER, MachineFinder, check_infra, make_task
from broker.hosting.lifecycle import WorkCounts
from broker.hosting.machines import call, parse_ssh
from broker.hosting.record import HostedServer, HostedStatus
from broker.sites.openssh import Completed
from broker.task.loader import load_tasks_text
from tests.state.samples import CLUSTER as SAMPLE


def test_machine_of_a_server_is_on_demand_with_its_port_open() -> None:
    server = HostedServer(
        infra="gcp/europe-west4", folder="~/s", port=9000, status=HostedStatus.STARTING, cluster="broker-server"
    )
    (task,) = load_tasks_text(make_task(server), CLUSTER)
    (resources,) = task.resources
    assert (resources.cloud, resources.region, resources.use_spot) == ("gcp", "europe-west4", False)
    assert [str(each) for each in resources.ports] == ["9000"]
    assert resources.cpus is not None and resources.memory_gib is not None


@pytest.mark.parametrize(
    ("infra", "cluster"),
    [("local", None), ("ssh://host", None), ("aws", CLUSTER), ("aws/us-east-1", CLUSTER), ("gcp", CLUSTER)],
)
def test_only_a_cloud_needs_a_cluster(infra: str, cluster: str | None) -> None:
    assert check_infra(infra) == cluster


@pytest.mark.parametrize("infra", ["azure", "loca", "", "ssh://", "kubernetes"])
def test_other_locations_are_refused(infra: str) -> None:
    with pytest.raises(UsageError):
        check_infra(infra)


def test_parts_of_an_ssh_location_are_read() -> None:
    found = parse_ssh("ssh://ada@host.example:2222")
    assert (found.user, found.host, found.port) == ("ada", "host.example", 2222)
    assert (parse_ssh("ssh://host").user, parse_ssh("ssh://host/").port) == (None, None)


@pytest.mark.parametrize(
    "infra", ["ssh://", "ssh://host/path", "ssh://ada:secret@host", "http://host", "ssh://host:port", "host"]
)
def test_invalid_ssh_locations_are_refused_without_showing_more_than_was_given(infra: str) -> None:
    with pytest.raises(UsageError, match="invalid machine"):
        parse_ssh(infra)


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        (WorkCounts(jobs=2, clusters=1, services=0, schedules=0, usd_hour=0.0), "2 jobs, 1 cluster"),
        (WorkCounts(jobs=0, clusters=0, services=1, schedules=3, usd_hour=0.0), "1 service, 3 schedules"),
        (WorkCounts(jobs=0, clusters=0, services=0, schedules=0, usd_hour=2.5), "machines for 2.50 USD/h"),
        (WorkCounts(jobs=0, clusters=0, services=0, schedules=0, usd_hour=0.0), ""),
    ],
)
def test_each_kind_of_work_keeps_a_server(counts: WorkCounts, text: str) -> None:
    assert counts.is_busy == bool(text)
    if text:
        assert counts.describe().startswith(text)


@dataclass
class ScriptedMachine:
    """A machine whose Python prints this."""

    done: Completed
    listens_on: str = "127.0.0.1"
    address: str = "127.0.0.1"
    requests: list[tuple[Sequence[str], bytes]] = field(default_factory=list)

    async def run(self, argv: Sequence[str], *, stdin: bytes) -> Completed:
        self.requests.append((argv, stdin))
        return self.done


def ask(stdout: bytes, *, returncode: int = 0, stderr: bytes = b"") -> tuple[object, ScriptedMachine]:
    machine = ScriptedMachine(Completed(returncode=returncode, stdout=stdout, stderr=stderr))
    return asyncio.run(call(machine, {"verb": "status", "folder": "f"}, b"content")), machine


def test_request_follows_the_programs_of_the_sizes_that_are_announced() -> None:
    answer, machine = ask(b'{"answer": {"a": 1}}')
    assert answer == {"a": 1}
    ((argv, stdin),) = machine.requests
    assert list(argv[:3]) == ["python3", "-I", "-S"], "nothing in the folder or the environment of the user is imported"
    sizes = [int(word) for word in argv if word.isdigit()]
    request, _, content = stdin[sum(sizes) :].partition(b"\n")
    assert json.loads(request) == {"verb": "status", "folder": "f"} and content == b"content"


def test_refusal_and_silence_of_the_machine_differ() -> None:
    with pytest.raises(StateError, match="no room") as refused:
        ask(json.dumps({"error": "no room", "hint": "make some"}).encode())
    assert list(refused.value.hints) == ["make some"]
    with pytest.raises(StateError) as plain:
        ask(json.dumps({"error": "no room", "hint": ""}).encode())
    assert not plain.value.hints
    with pytest.raises(TransientError, match=r"`status` failed on the server's machine: python3: not found"):
        ask(b"", returncode=127, stderr=b"sh: 1\npython3: not found\n")
    with pytest.raises(TransientError, match="exit code 9"):
        ask(b"", returncode=9)


def test_machine_that_cannot_be_terminated_keeps_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It still costs money: `broker server down` must not end as if it were gone."""
    asked: list[tuple[object, object]] = []
    refusals: list[BrokerError] = [TransientError("aws does not respond")]

    def terminate(context: object, *, names: object, on_down: object, is_immediate: object) -> list[BrokerError]:
        asked.append((names, is_immediate))
        return refusals

    monkeypatch.setattr("broker.hosting.finding.terminate_clusters", terminate)
    context = Context(tmp_path)
    finder = MachineFinder(context=context, show=lambda plans: None, confirm=lambda plans: None)
    server = HostedServer(infra="aws", folder="~/s", port=1, status=HostedStatus.ENDING, cluster=CLUSTER)
    finder.end(server)
    assert not asked, "no cluster of that name is left"
    context.store.clusters.put(replace(SAMPLE, name=CLUSTER))
    with pytest.raises(TransientError, match="does not respond"):
        finder.end(server)
    refusals.clear()
    finder.end(server)
    assert asked == [((CLUSTER,), True)] * 2, "its state is removed, so no file has to be uploaded first"
    context.close()
