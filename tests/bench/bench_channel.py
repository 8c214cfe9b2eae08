"""The cost of watching a job: polled every half second, and over one kept session per node.

    python -m tests.bench.bench_channel [--polled 3] [--kept 20] [--seconds 40] [--jobs 1000]

First real nodes: each is a real sshd on the loopback with a home of its own, a real agent and a program that prints a
line and a step every two seconds; the gang is asked as a controller asks it. Processor time is that of this process
and all its ssh (the broker's side), and of all that hangs on the sshd (the node's side; the program is not counted).
Then the real daemon and store with simulated nodes in virtual time: what controllers and SQLite cost by themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from broker.clock import SystemClock
from broker.config import Config
from broker.jobs.daemon import run_daemon
from broker.provision.lifecycle import Provisioner
from broker.runtime import channels
from broker.runtime.gang import Gang
from broker.runtime.keys import Keys
from broker.runtime.transports.ssh import SshTransport
from broker.types import Cluster, ClusterStatus, JobStatus
from tests.bench.bench_jobs import MEMORY
from tests.simulation.world import OWNER, Report, SimulatedGang, World, make_plan

sys.path.insert(0, str(Path(__file__).parent.parent / "runtime"))
from local_gang import make_request, make_task
from sshd import Sshd

TICKS_S = os.sysconf("SC_CLK_TCK")
PROGRAM = 'i=0; while :; do i=$((i + 1)); echo step $i; echo "{\\"step\\": $i}" >> $BROKER_PROGRESS_FILE; sleep 2; done'
POLL_S, NEWS_S, LEASE_EVERY_S = 0.5, 5.0, 60.0
SETTLE_S = 15.0  # after which every channel is open
VIRTUAL_S = 60.0


class Bed:
    """Real sshds, one a node."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.sshds: list[Sshd] = []
        self.clusters: list[Cluster] = []
        for number in range(count):
            keys = Keys(folder / "keys")
            sshd = Sshd(folder / f"node-{number}", keys, token=f"token-{number}")
            sshd.start()
            sshd.wait()
            self.sshds.append(sshd)
            node = replace(sshd.node, id=f"n{number}")
            self.clusters.append(
                Cluster(name="c", status=ClusterStatus.UP, placement=make_request().placement, attempt=1, nodes=(node,))
            )
        self.transport = SshTransport(Keys(folder / "keys"), clock=SystemClock())
        self.gang = Gang(self.transport, clock=SystemClock())

    def end(self) -> None:
        for pid in [*list_with(str(self.folder), "environ")]:
            if pid != os.getpid():
                kill(pid)
        for sshd in self.sshds:
            sshd.stop()

    def list_ssh(self) -> list[int]:
        """List local ssh processes by the sockets of their connections."""
        controls = {str(self.transport._find(cluster.nodes[0]).control) for cluster in self.clusters}
        return [pid for control in controls for pid in list_with(control, "cmdline")]

    def list_node_side(self) -> list[int]:
        roots = [sshd._process.pid for sshd in self.sshds if sshd._process]
        return [pid for root in roots for pid in list_tree(root)]

    def measure_others_s(self) -> tuple[float, float]:
        """Return the processor time so far: of the live ssh processes, and of the nodes."""
        ssh_s = sum(measure_cpu_s(pid) for pid in self.list_ssh())
        return ssh_s, sum(measure_cpu_s(pid) for pid in self.list_node_side())


def list_with(text: str, name: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and text.encode() in (entry / name).read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def list_tree(root: int) -> Iterator[int]:
    yield root
    for child in Path(f"/proc/{root}/task/{root}/children").read_text().split():
        yield from list_tree(int(child))


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass


def measure_cpu_s(pid: int) -> float:
    """Return the processor time of a process and of its children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(int(field) for field in fields[11:15]) / TICKS_S


def measure_memory_mib(pid: int) -> tuple[float, float]:
    """Return the resident memory, and its proportional share of it (PSS)."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    values = {line.split(":")[0]: int(line.split()[1]) for line in lines[1:]}
    return values["Rss"] / 1024, values["Pss"] / 1024


async def watch(bed: Bed, cluster: Cluster, *, is_kept: bool) -> None:
    """Watch as a controller does, without its store."""
    offset, leased_s, wake = 0, 0.0, asyncio.Event()
    while True:
        report = await bed.gang.poll(cluster, 1)
        assert not report.status.is_terminal and not report.unreachable
        while chunk := (await bed.gang.read_log(cluster, 1, offset=offset))[0]:
            offset += len(chunk)
        if time.monotonic() - leased_s >= LEASE_EVERY_S:
            await bed.gang.renew_lease(cluster, lease_s=900.0)
            leased_s = time.monotonic()
        if is_kept:
            await bed.gang.wait_news(cluster, 1, wake=wake, timeout_s=NEWS_S)
        else:
            await asyncio.sleep(POLL_S)


async def measure_nodes(bed: Bed, seconds: float, *, is_kept: bool) -> list[float]:
    """Return CPU seconds per job-hour: of the broker's process, of its ssh, of a node."""
    for cluster in bed.clusters:
        task = make_task(PROGRAM)
        await bed.gang.prepare(cluster, task)
        await bed.gang.start(cluster, task, run_id=1, envs={}, lease_s=900.0)
    watches = [asyncio.ensure_future(watch(bed, cluster, is_kept=is_kept)) for cluster in bed.clusters]
    await asyncio.sleep(SETTLE_S)
    before, own_before, start_s = bed.measure_others_s(), os.times(), time.monotonic()
    await asyncio.wait(watches, timeout=seconds)
    own, passed_s = os.times(), time.monotonic() - start_s  # first: to look at all processes takes time too
    after = bed.measure_others_s()
    job_hours = len(watches) * passed_s / 3600
    own_s, ended_s = ((sum(own[at : at + 2]) - sum(own_before[at : at + 2])) for at in (0, 2))
    used = (own_s, ended_s + after[0] - before[0], after[1] - before[1])
    if is_kept:
        show_processes(bed)
    for each in watches:
        each.cancel()
    ended = await asyncio.gather(*watches, return_exceptions=True)
    assert all(isinstance(error, asyncio.CancelledError) for error in ended), ended
    return [used_s / job_hours for used_s in used]


def show_processes(bed: Bed) -> None:
    count = len(bed.clusters)
    ssh = [measure_memory_mib(pid) for pid in bed.list_ssh()]
    agents = [measure_memory_mib(pid) for pid in bed.list_node_side() if pid in set(list_with("follow", "cmdline"))]
    print(f"local ssh processes a node: {len(ssh) / count:.2f}; memory of one: {mean(ssh)}")
    print(f"agent's sessions a node: {len(agents) / count:.2f}; memory of one: {mean(agents)}")


def mean(pairs: list[tuple[float, float]]) -> str:
    resident, share = (sum(values) / len(pairs) for values in zip(*pairs, strict=True))
    return f"{resident:.1f} MiB resident, {share:.1f} MiB its own share"


class CountedGang(SimulatedGang):
    polls = 0

    async def poll(self, cluster: Cluster, run_id: int) -> Report:
        self.polls += 1
        return await super().poll(cluster, run_id)


class PushedGang(CountedGang):
    """Its nodes report a step every `pace_s`."""

    pace_s = 2.0

    async def wait_news(self, cluster: Cluster, run_id: int, *, wake: asyncio.Event, timeout_s: float) -> None:
        await self._clock.sleep(min(self.pace_s, timeout_s))


def measure_daemon(folder: Path, count: int, pace_s: float | None) -> tuple[float, float]:
    """Return CPU seconds per job-hour of the daemon with this many running jobs, and of a step; None: poll them."""
    world = World(folder)
    gang = CountedGang(world.cloud, world.clock, steps=100_000)
    if pace_s is not None:
        gang = PushedGang(world.cloud, world.clock, steps=100_000)
        gang.pace_s = pace_s
    world.gang = gang
    with world.store.transaction():
        ids = [world.store.jobs.add(f"job-{number}", world.task).id for number in range(count)]
    provisioner = world.make_provisioner()

    def make(job_id: int) -> object:
        world.job_id = job_id
        return world.make_controller(provisioner, planner=lambda task, avoid: make_plan(task))

    async def work() -> tuple[float, float]:
        daemon = asyncio.ensure_future(start(world, make, provisioner, folder))
        while any(world.store.jobs.get(id).status is not JobStatus.RUNNING for id in ids):  # type: ignore[union-attr]
            await world.clock.sleep(10.0)
        await world.clock.sleep(10.0)
        start_s, polls = time.process_time(), gang.polls
        await world.clock.sleep(VIRTUAL_S)
        used_s = time.process_time() - start_s
        assert not daemon.done() and gang.starts == count + 1, gang.starts  # the world brings one job itself
        daemon.cancel()
        return used_s / (count * VIRTUAL_S / 3600), used_s / (gang.polls - polls)

    used: tuple[float, float] = world.clock.run(work)
    world.store.close()
    return used


async def start(world: World, make: object, provisioner: Provisioner, folder: Path) -> None:
    await run_daemon(
        store=world.store,
        make_controller=make,  # type: ignore[arg-type]
        provisioner=provisioner,
        clock=world.clock,
        config=Config(home=folder, owner=OWNER),
        idle_s=1e9,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--polled", type=int, default=3, help="nodes; each costs a good part of a core")
    parser.add_argument("--kept", type=int, default=20)
    parser.add_argument(
        "--pace", type=float, default=1.0, help="seconds between news, as with a thousand times as many"
    )
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--jobs", type=int, default=1000)
    options = parser.parse_args()
    channels.PACE_S_MIN = options.pace
    results = []
    for count, is_kept in ((options.polled, False), (options.kept, True)):
        with tempfile.TemporaryDirectory() as folder:
            bed = Bed(Path(folder), count)
            try:
                results.append(asyncio.run(measure_nodes(bed, options.seconds, is_kept=is_kept)))
            finally:
                bed.end()
    print(f"{'CPU seconds a job-hour':<28}{'polled':>10}{'kept':>10}{'ratio':>8}{'cores for 1,000':>17}")
    for name, polled, kept in zip(("broker's process", "its ssh", "node"), *results, strict=True):
        cores = f"{kept * 1000 / 3600:.2f}" if name != "node" else "-"
        print(f"{name:<28}{polled:>10.2f}{kept:>10.2f}{polled / kept:>8.1f}{cores:>17}")
    if not options.jobs:
        return
    title = f"controllers and store, {options.jobs} jobs"
    print(f"\n{title:<40}{'CPU s a job-hour':>18}{'cores':>8}{'ms a step':>12}")
    for name, pace_s in (("polled each 0.5 s", None), ("news each 1 s", 1.0), ("each 2 s", 2.0), ("each 5 s", 5.0)):
        with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
            used, step_s = measure_daemon(Path(folder), options.jobs, pace_s)
            print(f"{name:<40}{used:>18.2f}{used * options.jobs / 3600:>8.2f}{step_s * 1000:>12.2f}")


if __name__ == "__main__":
    main()
