"""Real hosts over real ssh: reached, found dead, run on, given notice, and ended by their own lease."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from broker.clock import SystemClock
from broker.errors import TransientError
from broker.runtime.bootstrap import make_boot
from broker.runtime.gang import Gang
from broker.runtime.keys import HOST, LOGIN, Keys
from broker.runtime.transports.ssh import SshTransport
from broker.types import Cluster, ClusterStatus, Node, NodeRequest, Offer, Placement, Resources, RunStatus, Task
from tests.testbed.cloud import HostCloud
from tests.testbed.host import Host
from tests.testbed.metadata import MetadataServer


class Bed:
    """Hosts of one simulated cloud and the broker's transport to them."""

    def __init__(self, folder: Path, metadata: MetadataServer, *, kind: str = "aws", shared: Path) -> None:
        self.keys = Keys(folder / "keys")
        self.cloud = HostCloud(folder / "hosts", metadata, kind=kind, shared=[shared])
        self.transport = SshTransport(self.keys, clock=SystemClock())
        self.gang = Gang(self.transport, clock=SystemClock())
        self._tokens = 0

    def make_request(self, node_count: int, *, unclaimed_minutes: float = 30) -> NodeRequest:
        self._tokens += 1
        token = f"token-{self._tokens}"
        offer = Offer(
            cloud=self.cloud.name, region="r", zone="z", instance_type="t", vcpus=2, memory_gib=4,
            ondemand_usd_hour=1.0, spot_usd_hour=0.3,
        )  # fmt: skip
        keys = self.keys.ensure("c", token)
        boot = make_boot(
            cloud=self.cloud.name, login=keys.read(LOGIN).public, host=keys.read(HOST),
            unclaimed_minutes=unclaimed_minutes,
        )  # fmt: skip
        return NodeRequest(
            owner="me", cluster="c", attempt=1, token=token, boot=boot,
            placement=Placement(offer=offer, is_spot=True, node_count=node_count),
        )  # fmt: skip

    def is_watched(self, cluster: Cluster) -> bool:
        channels = self.gang._channels
        return channels is not None and all(channels.keep(node, 1).is_heard() for node in cluster.nodes)

    async def make_cluster(self, node_count: int = 1) -> Cluster:
        request = self.make_request(node_count)
        nodes = tuple(await self.cloud.create_nodes(request))
        return Cluster(name="c", status=ClusterStatus.UP, placement=request.placement, attempt=1, nodes=nodes)


@pytest.fixture(params=["aws"])
def bed(request: pytest.FixtureRequest, tmp_path: Path, metadata: MetadataServer, shared: Path) -> Iterator[Bed]:
    bed = Bed(tmp_path, metadata, kind=request.param, shared=shared)
    yield bed
    bed.cloud.end_all()


def test_eight_hosts_are_reached_concurrently_and_separately(bed: Bed) -> None:
    async def act() -> None:
        cluster = await bed.make_cluster(8)
        names = await asyncio.gather(
            *(bed.transport.run(node, ["sh", "-c", "hostname; whoami"], timeout_s=300) for node in cluster.nodes)
        )
        assert [done.stdout.decode().split() for done in names] == [[node.id, "ubuntu"] for node in cluster.nodes]

    start_s = time.monotonic()
    asyncio.run(act())
    print(f"8 hosts up and reached in {time.monotonic() - start_s:.2f} s")


def test_command_on_a_host_that_dies_silently_fails_within_seconds(bed: Bed) -> None:
    """A host that loses its power sends no final packet; without keepalives, ssh would wait forever."""

    async def act() -> float:
        node = (await bed.make_cluster()).nodes[0]
        await bed.transport.run(node, ["true"], timeout_s=300)
        command = asyncio.ensure_future(bed.transport.run(node, ["sleep", "600"], timeout_s=600))
        await bed.transport.run(node, ["true"], timeout_s=300)
        bed.cloud.end(node.id, "preempted", is_silent=True)
        start_s = time.monotonic()
        with pytest.raises(TransientError):
            await command
        return time.monotonic() - start_s

    print(f"silent death noticed after {asyncio.run(act()):.2f} s")


def test_watched_host_that_dies_silently_is_missed_within_seconds(bed: Bed) -> None:
    """No request is made meanwhile: the kept session itself ends, and the call after it fails."""

    async def act() -> float:
        cluster = await bed.make_cluster()
        await start(bed, cluster, "sleep 600")
        while not bed.is_watched(cluster):
            await bed.gang.poll(cluster, 1)
            await bed.gang.wait_news(cluster, 1, wake=asyncio.Event(), timeout_s=0.1)
        await bed.gang.poll(cluster, 1)
        bed.cloud.end(cluster.nodes[0].id, "preempted", is_silent=True)
        start_s = time.monotonic()
        while bed.is_watched(cluster):  # the start of the program may be news, too
            await bed.gang.wait_news(cluster, 1, wake=asyncio.Event(), timeout_s=60)
            await asyncio.sleep(0.01)
        missed_s = time.monotonic() - start_s
        assert (await bed.gang.poll(cluster, 1)).unreachable == (0,)
        return missed_s

    print(f"silent death of a watched host missed after {asyncio.run(act()):.2f} s")


def test_short_partition_is_survived(bed: Bed) -> None:
    async def act() -> None:
        node = (await bed.make_cluster()).nodes[0]
        await bed.transport.run(node, ["true"], timeout_s=300)
        bed.cloud.hosts[node.id].cut_off()
        command = asyncio.ensure_future(bed.transport.run(node, ["echo", "still here"], timeout_s=60))
        await asyncio.sleep(1)
        bed.cloud.hosts[node.id].reconnect()
        assert (await command).stdout == b"still here\n"

    asyncio.run(act())


def test_command_right_after_the_start_does_not_change_this_machine(tmp_path: Path, metadata: MetadataServer) -> None:
    """It would, before the host has a root folder of its own."""
    mark = f"/etc/broker-testbed-{tmp_path.name}"
    host = Host(tmp_path / "hosts", "early", ["10.77.9.9"]).start()
    try:
        host.execute("touch", mark)
        assert host.execute("ls", mark).strip() == mark
        assert not Path(mark).exists()
    finally:
        Path(mark).unlink(missing_ok=True)
        host.power_off()


def test_host_that_shows_another_key_is_refused(bed: Bed, tmp_path: Path) -> None:
    """Another host may have got the address: nothing is sent to it."""

    async def act() -> None:
        stranger = Keys(tmp_path / "strangers").ensure("c", "x")
        request = bed.make_request(1)
        login = bed.keys.ensure("c", request.token).read(LOGIN).public
        boot = make_boot(cloud="aws", login=login, host=stranger.read(HOST))
        node = (await bed.cloud.create_nodes(replace(request, boot=boot)))[0]
        transport = SshTransport(bed.keys, clock=SystemClock(), patience_s=2)
        while True:  # until its sshd is up
            with pytest.raises(TransientError) as caught:
                await transport.run(node, ["true"], timeout_s=300)
            if "host key" in str(caught.value):
                break

    asyncio.run(act())


async def follow(bed: Bed, cluster: Cluster) -> tuple[RunStatus, str]:
    """Follow run 1 to its end; return its status and its log."""
    while True:
        report = await bed.gang.poll(cluster, 1)
        if report.status.is_terminal:
            return report.status, (await bed.gang.read_log(cluster, 1, offset=0))[0].decode()
        await asyncio.sleep(0.1)


async def start(bed: Bed, cluster: Cluster, run: str, *, lease_s: float | None = None, **fields: object) -> None:
    task = Task(name="t", resources=(Resources(),), num_nodes=len(cluster.nodes), run=run, **fields)  # type: ignore[arg-type]
    await bed.gang.prepare(cluster, task)
    await bed.gang.start(cluster, task, run_id=1, envs={}, lease_s=lease_s)


def test_gang_of_two_hosts_runs_with_its_workdir_and_talks_over_the_network(bed: Bed, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "greet.py").write_text("import socket; print('hello from', socket.gethostname())")
    run = """
        python3 greet.py
        head=$(echo "$SKYPILOT_NODE_IPS" | head -1)
        if [ "$SKYPILOT_NODE_RANK" = 0 ]; then
          python3 -c 'import socket; s = socket.create_server(("", 4000)); print("got", s.accept()[0].recv(9).decode())'
        else
          until python3 -c "import socket; socket.create_connection(('$head', 4000)).sendall(b'peer')"
          do sleep 0.1; done
        fi 2>/dev/null
    """

    async def act() -> None:
        cluster = await bed.make_cluster(2)
        await start(bed, cluster, run, workdir=str(work))
        status, log = await follow(bed, cluster)
        assert status is RunStatus.SUCCEEDED, log
        ids = [node.id for node in cluster.nodes]
        assert {f"hello from {ids[0]}", f"(rank1) hello from {ids[1]}", "got peer"} <= set(log.splitlines())

    asyncio.run(act())


@pytest.mark.parametrize("bed", ["aws", "gcp"], indirect=True)
def test_notice_of_preemption_reaches_the_program(bed: Bed) -> None:
    run = """
        trap 'date "+told %s.%N"; test -e "$BROKER_PREEMPTION_FILE" && echo saved; exit 0' TERM
        echo ready; while :; do sleep 0.05; done
    """

    async def act() -> float:
        cluster = await bed.make_cluster()
        await start(bed, cluster, run)
        while "ready" not in (await bed.gang.read_log(cluster, 1, offset=0))[0].decode():
            await asyncio.sleep(0.05)
        given_s = time.time()
        bed.cloud.give_notice(cluster.nodes[0].id, in_s=120)
        _, log = await follow(bed, cluster)
        assert "saved" in log.splitlines()
        return float(next(line for line in log.splitlines() if line.startswith("told")).split()[1]) - given_s

    took_s = asyncio.run(act())
    print(f"notice to SIGTERM on {bed.cloud.name}: {took_s:.2f} s")


def test_rebalance_recommendation_is_news_of_its_node_and_ends_nothing(bed: Bed) -> None:
    async def act() -> None:
        cluster = await bed.make_cluster(2)
        await start(bed, cluster, "until [ -e go ]; do sleep 0.1; done; test ! -e $BROKER_PREEMPTION_FILE")
        assert (await bed.gang.poll(cluster, 1)).advised == ()
        bed.cloud.advise(cluster.nodes[1].id)
        while not (report := await bed.gang.poll(cluster, 1)).advised:
            assert not report.status.is_terminal
            await asyncio.sleep(0.1)
        assert report.advised == (1,)
        for node in cluster.nodes:
            bed.cloud.hosts[node.id].execute("touch", "/home/ubuntu/sky_workdir/go")
        assert (await follow(bed, cluster))[0] is RunStatus.SUCCEEDED

    asyncio.run(act())


def test_host_whose_lease_runs_out_ends_itself(bed: Bed) -> None:
    async def act() -> None:
        cluster = await bed.make_cluster()
        await start(bed, cluster, "sleep 600", lease_s=3600)
        with contextlib.suppress(TransientError):  # it may end before it answers
            await bed.gang.renew_lease(cluster, lease_s=3)
        await wait_until_ended(bed, cluster.nodes[0])

    asyncio.run(act())


def test_unclaimed_host_ends_itself(bed: Bed) -> None:
    async def act() -> None:
        node = (await bed.cloud.create_nodes(bed.make_request(1, unclaimed_minutes=0.02)))[0]
        await wait_until_ended(bed, node)

    asyncio.run(act())


def test_claimed_host_outlives_the_dead_mans_switch(bed: Bed) -> None:
    async def act() -> None:
        request = bed.make_request(1)
        nodes = tuple(await bed.cloud.create_nodes(request))
        cluster = Cluster(name="c", status=ClusterStatus.UP, placement=request.placement, attempt=1, nodes=nodes)
        # The test ends the sleep of the switch, as its time would.
        armed = "pgrep -f '[b]roker-unclaimed' >/dev/null && echo armed; touch armed"
        await start(
            bed, cluster, f"{armed}; while pgrep -f '[b]roker-unclaimed' >/dev/null; do sleep 0.1; done; echo alive"
        )
        host = bed.cloud.hosts[nodes[0].id]
        while host.try_execute("test", "-e", "/home/ubuntu/sky_workdir/armed").returncode:
            await asyncio.sleep(0.1)
        host.execute("pkill", "-x", "-f", "sleep 1800.000")
        status, log = await follow(bed, cluster)
        assert (status, log.splitlines()) == (RunStatus.SUCCEEDED, ["armed", "alive"])

    asyncio.run(act())


async def wait_until_ended(bed: Bed, node: Node) -> None:
    end_s = time.monotonic() + 300
    while (found := next(each for each in await bed.cloud.list_nodes("me") if each.id == node.id)).reason != "itself":
        assert time.monotonic() < end_s, f"{found} still runs: {bed.cloud.hosts[node.id].read_log()}"
        await asyncio.sleep(0.1)
