"""The test-bed's bed: hosts of their own behind a fake AWS and a fake Google. It must run in the sealed network."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.testbed.ec2_account import LIVING
from tests.testbed.host import Host
from tests.testbed.metadata import MetadataServer
from tests.testbed.s3 import BUCKET
from tests.testbed.stage import BUCKET_LOGIN, PLACES, Stage, open_stage
from tests.torture.bed import LocalBed
from tests.torture.history import History
from tests.torture.killer import SHORT_S_MAX, Acts, Killer
from tests.torture.processes import Process, list_processes, name_kind, read_command, read_process, send_signal
from tests.torture.workloads import HERE, Setting

# A cloud that lists a machine without power as running costs its job ten minutes of silence, so it is drawn rarely.
ACTS: Acts = (
    *(("daemon-kill", 4.0), ("daemon-stop", 2.0), ("daemon-term", 1.0)),
    *(("runner-kill", 1.0), ("runner-stop", 1.0), ("watcher-kill", 1.0), ("watcher-stop", 1.0)),
    *(("trainer-kill", 1.5), ("trainer-stop", 1.0), ("witness-kill", 1.0)),
    *(("preempt", 2.0), ("preempt-notice", 2.0), ("power-loss", 0.15), ("shutdown", 1.0), ("partition", 2.0)),
    *(("zone-full", 1.0), ("api-fault", 2.0), ("answer-lost", 1.0), ("clock-jump", 1.0)),
)
KINDS = (("plain", 2.0), ("gang", 2.0), ("solo", 1.5), ("ddp", 1.5), ("cancelled", 0.7), ("fails-twice", 0.7))
PLACES_FULL = (("us-east-1a", "m5.large"), ("us-east-1b", "m5.large"), ("us-west-2a", "m5.large"))
CALLS = ("CreateFleet", "RunInstances", "DescribeInstances", "TerminateInstances")
API_FAULTS = (("InternalError", 500), ("RequestLimitExceeded", 503), ("Unavailable", 503))
CUT_S_MAX = 40.0  # shorter than the silence that makes a loss (120 s), longer than any one call


class HostsBed(LocalBed):
    """The same commands in front of two clouds. Disks are not filled: hosts have this machine's."""

    name = "testbed"

    def __init__(self, folder: Path, history: History, metadata: MetadataServer) -> None:
        super().__init__(folder, history)
        self._metadata = metadata
        self._context = contextlib.ExitStack()
        self.stage: Stage

    @property
    def setting(self) -> Setting:
        work = self.folder / "small" / "work"
        lines = (
            f"workdir: {work}\ncheckpoint: {{to: s3://{BUCKET}/runs}}\n"
            "secrets: {AWS_ACCESS_KEY_ID: null, AWS_SECRET_ACCESS_KEY: null}\n"
            "envs: {AWS_ENDPOINT_URL_S3: null, AWS_REGION: us-east-1}\n"
        )
        return Setting(
            evidence=self.evidence, resources="use_spot: true, " + one_line(PLACES), header=lines, pace="$PWD/pace",
            witness="witness.py", root="$PWD", state="EVIDENCE/state", kinds=KINDS,
        )  # fmt: skip

    @property
    def launch_flags(self) -> tuple[str, ...]:
        return BUCKET_LOGIN

    def open(self) -> None:
        self.skipped.append("full disk: hosts of the test-bed have this machine's; the local bed fills its own")
        self.evidence.chmod(0o777)
        self.stage = self._context.enter_context(
            open_stage(self.folder / "small", self._metadata, shared=[self.evidence])
        )
        self.home.chmod(0o700)
        (self.home / "aws.toml").chmod(0o600)
        work = self.folder / "small" / "work"
        shutil.copy(HERE / "witness.py", work)
        shutil.copytree(HERE / "pace", work / "pace", ignore=shutil.ignore_patterns("__pycache__"))
        self.environment |= {**self.stage.environment, "TMPDIR": self.environment["TMPDIR"]}
        self.load_clock()

    def close(self) -> None:
        self._context.close()
        super().close()

    @property
    def can_fill(self) -> bool:
        return False

    def list_processes(self) -> list[Process]:
        """List the broker's own processes, and those on living hosts, found by the host's process namespace."""
        return list_processes(self.mark) + [each for host in self.list_hosts() for each in list_host_processes(host)]

    def list_hosts(self) -> list[Host]:
        return [host for host in list(self.stage.bridge.hosts.values()) if host.is_alive]

    def signal(self, process: Process, number: int) -> bool:
        def read(pid: int) -> Process | None:
            host = next((each for each in self.list_hosts() if each.name == process.node), None)
            return read_host_process(host, pid) if host else read_process(pid, self.mark)

        return send_signal(process, number, read)

    def find_checkpoints(self, folder: str) -> str:
        """Find checkpoints with the login that a program has, in this process's environment of commands."""
        return f"s3://{BUCKET}/runs/{self.stage.owner}-{folder}"

    def check_nodes(self) -> None:
        """Check that no machine is left in either cloud, and no host runs."""
        with self.stage.aws.lock:
            self.stage.account.tick()
            left = [each.id for each in self.stage.account.instances.values() if each.state in LIVING]
        left += self.stage.gce.list_names()
        if left:
            self.history.violate(f"machines are left in the clouds: {left}")
        if hosts := [host.name for host in self.list_hosts()]:
            self.history.violate(f"hosts are left: {hosts}")


def one_line(places: str) -> str:
    """Return the list of places as it stands in a mapping on one line."""
    lines = [line.strip().removeprefix("- ") for line in places.strip().splitlines()]
    return f"{lines[0]} [{', '.join(lines[1:])}]"


def list_host_processes(host: Host) -> Iterator[Process]:
    for entry in Path("/proc").glob("[0-9]*"):
        if found := read_host_process(host, int(entry.name)):
            yield found


def read_host_process(host: Host, pid: int) -> Process | None:
    """Read a process; return None if it is gone, the kernel's, a zombie, or not of this host."""
    try:
        is_inside = Path(f"/proc/{pid}/ns/pid").readlink() == Path(f"/proc/{host.pid}/ns/pid").readlink()
    except OSError:
        return None
    command = read_command(pid).strip()
    if not is_inside or not command:
        return None
    return Process(pid=pid, kind=name_kind(pid, command), node=host.name, command=command)


class HostsKiller(Killer):
    """A killer that also acts on clouds and networks."""

    def __init__(self, bed: HostsBed, history: History, *, seed: int, every_s: float, acts: Acts = ACTS) -> None:
        super().__init__(bed, history, seed=seed, every_s=every_s, acts=acts)
        self._hosts = bed
        self._cut: set[str] = set()

    def _list_special(self) -> dict[str, Callable[[str], dict[str, object] | None]]:
        return {
            "preempt": self._take, "preempt-notice": self._take, "power-loss": self._lose_power,
            "shutdown": self._shut_down, "partition": self._part, "zone-full": self._fill_place,
            "api-fault": self._fail_calls, "answer-lost": self._lose_answers, "clock-jump": self._jump,
        }  # fmt: skip

    def _name_job(self, node: str) -> str:
        """Return the job's name from the tags of the cloud's machine."""
        stage = self._hosts.stage
        machines: list[object] = [stage.account.instances.get(node)]
        machines += [machine for (_, name), machine in list(stage.gce.instances.items()) if name == node]
        found = re.search(r"\bjob-\d+", str(machines))
        return found[0] if found else node

    def _draw_host(self) -> Host | None:
        hosts = sorted(self._hosts.list_hosts(), key=lambda host: host.name)
        return self._draw.choice(hosts) if hosts else None

    def _take(self, kind: str) -> dict[str, object] | None:
        """Preempt one machine as the market does, with a shortened notice."""
        if (host := self._draw_host()) is None:
            return None
        notice_s = self._draw.uniform(2, 10) if kind == "preempt-notice" else 0.0
        self._hosts.stage.bridge.preempt(host.name, notice_s=notice_s)
        return {"host": host.name, "notice_s": round(notice_s, 1)}

    def _lose_power(self, kind: str) -> dict[str, object] | None:
        """Cut the power silently, while the cloud's list still shows the machine as running."""
        if (host := self._draw_host()) is None:
            return None
        host.power_off(is_silent=True)
        return {"host": host.name}

    def _shut_down(self, kind: str) -> dict[str, object] | None:
        if (host := self._draw_host()) is None:
            return None
        host.shut_down()
        return {"host": host.name}

    def _part(self, kind: str) -> dict[str, object] | None:
        """Partition a host for a while: it reaches neither the broker nor a peer, and continues to work."""
        host = self._draw_host()
        if host is None or host.name in self._cut:
            return None
        seconds = self._draw.uniform(2, CUT_S_MAX)
        if seconds > SHORT_S_MAX and not self._may_break_apart(self._name_job(host.name)):
            seconds = SHORT_S_MAX
        with contextlib.suppress(AssertionError):  # it may be ending just now
            host.cut_off()
        self._cut.add(host.name)
        self._later(seconds, f"{kind} {host.name}", lambda: self._join(host))
        return {"host": host.name, "for_s": round(seconds, 1)}

    def _join(self, host: Host) -> None:
        self._cut.discard(host.name)
        with contextlib.suppress(AssertionError):  # its cable is gone with it
            if host.is_alive:
                host.reconnect()

    def _fill_place(self, kind: str) -> dict[str, object] | None:
        place = self._draw.choice(PLACES_FULL)
        full, lock = self._hosts.stage.account.full, self._hosts.stage.aws.lock
        if place in full:
            return None
        with lock:
            full.add(place)
        seconds = self._draw.uniform(5, 60)
        self._later(seconds, kind, lambda: full.discard(place))
        return {"place": place, "for_s": round(seconds, 1)}

    def _fail_calls(self, kind: str) -> dict[str, object] | None:
        (code, status), call = self._draw.choice(API_FAULTS), self._draw.choice(CALLS)
        times = self._draw.randint(1, 4)
        with self._hosts.stage.aws.lock:
            self._hosts.stage.account.fail(call, code, status=status, times=times)
        return {"call": call, "code": code, "times": times}

    def _lose_answers(self, kind: str) -> dict[str, object] | None:
        """Carry out calls, and lose their answers."""
        call = self._draw.choice(("CreateFleet", "RunInstances", "TerminateInstances"))
        with self._hosts.stage.aws.lock:
            self._hosts.stage.account.lose_answer(call)
        return {"call": call}

    def heal(self) -> None:
        super().heal()
        with self._hosts.stage.aws.lock:
            self._hosts.stage.account.faults.clear()
