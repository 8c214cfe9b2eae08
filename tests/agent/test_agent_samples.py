"""Samples of a node, from made-up kernel files and a fake nvidia-smi; and their file of bounded size."""

from __future__ import annotations

import importlib
import json
import os
import stat
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from broker.agent import FILES, FOLDER, agent_ring

sys.path.insert(0, str(FOLDER))  # as on a node: siblings by bare names
agent_samples: Any = importlib.import_module("agent_samples")
agent_gpus: Any = importlib.import_module("agent_gpus")
agent_limits: Any = importlib.import_module("agent_limits")
agent_environment: Any = importlib.import_module("agent_environment")
sys.path.remove(str(FOLDER))

GIB = 1 << 30
UNIFIED = "0::/box/inner\n"
SPLIT = "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/\n"
SMI = """\
#!/bin/sh
echo "$*" >> "$(dirname "$0")/calls"
cat "$(dirname "$0")/answer"
exit $(cat "$(dirname "$0")/code")
"""


class Host:
    """Made-up /proc and /sys/fs/cgroup of a host with four processors and 64 GiB, and the time."""

    def __init__(self, root: Path) -> None:
        self.proc, self.groups = root / "proc", root / "cgroup"
        self.now_s = 100.0
        self.cpus = {0, 1, 2, 3}
        self.write("proc/meminfo", "MemTotal: 67108864 kB\nMemFree: 1 kB\nMemAvailable: 50331648 kB\n")
        self.write("proc/self/cgroup", "0::/\n")
        self.tick(busy=[0, 0, 0, 0])
        self.move_bytes(0)

    def write(self, path: str, text: str) -> None:
        file = self.proc.parent / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def tick(self, *, busy: list[int]) -> None:
        """Set the busy time of each processor, in hundredths of a second."""
        rows = [
            f"cpu{number} {ticks // 2} 0 {ticks - ticks // 2} 9000 {3 * ticks} 0 0 0 0 0"
            for number, ticks in enumerate(busy)
        ]
        self.write("proc/stat", "\n".join(["cpu  1 2 3 4 5 6 7 8 9 10", *rows, "intr 1", "ctxt 2"]))

    def move_bytes(self, count: int) -> None:
        """Set the bytes that were received, read and written; twice as many were sent."""
        head = "Inter-| Receive | Transmit\n face |bytes | bytes\n"
        self.write(
            "proc/net/dev",
            f"{head}  lo: {count} 1 0 0 0 0 0 0 {count} 1\n  eth9: {count} 1 0 0 0 0 0 0 {2 * count} 1\n",
        )
        sectors = count // 512
        disk = f"8 0 sda 1 0 {sectors} 0 1 0 {sectors} 0 0 0 0\n"
        self.write("proc/diskstats", f"7 0 loop0 9 0 999 0 9 0 999 0 0 0 0\n{disk}{disk.replace('sda', 'sda1')}")

    def make_sampler(self) -> Any:
        return agent_samples.Sampler(
            proc=self.proc, groups=self.groups, disk=self.proc, cpus=self.cpus, now_s=lambda: self.now_s
        )


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    return Host(tmp_path / "root")


def test_sample_has_the_share_of_all_processors_and_means_of_what_moved(host: Host) -> None:
    sampler = host.make_sampler()
    host.now_s += 10
    host.tick(busy=[1000, 500, 0, 0])
    host.move_bytes(5_120_000)
    sample = sampler.take()
    assert sample["cpu_ratio"] == pytest.approx(15 / 40) and sample["cpu_count"] == 4
    assert (sample["memory_used_bytes"], sample["memory_bytes"]) == (16 * GIB, 64 * GIB)
    assert (sample["network_received_bytes_s"], sample["network_sent_bytes_s"]) == (512_000, 1_024_000)
    assert (sample["disk_read_bytes_s"], sample["disk_written_bytes_s"]) == (512_000, 512_000)  # partition included
    assert 0 < sample["disk_used_bytes"] < sample["disk_bytes"]
    assert abs(sample["time_s"] - time.time()) < 60 and "gpus" not in sample


def test_processors_that_the_node_may_not_use_do_not_count(host: Host) -> None:
    host.cpus = {2, 3}
    sampler = host.make_sampler()
    host.now_s += 10
    host.tick(busy=[1000, 1000, 500, 0])
    sample = sampler.take()
    assert (sample["cpu_ratio"], sample["cpu_count"]) == (pytest.approx(0.25), 2)


def test_container_whose_processors_are_renumbered_has_samples(host: Host) -> None:
    """LXC shows two processors as 0 and 1 that the kernel calls 6 and 7; every sample used to fail on a division."""
    host.cpus = {6, 7}
    sampler = host.make_sampler()
    host.tick(busy=[100, 100, 100, 100])
    host.now_s += 10.0
    sample = sampler.take()
    assert (sample["cpu_count"], sample["cpu_ratio"]) == (4, 0.1)


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_a_container_count_and_not_those_of_its_host(host: Host, version: int) -> None:
    use_cpu = put_in_container(host, version)
    sampler = host.make_sampler()
    host.now_s += 10
    host.tick(busy=[1000, 1000, 1000, 1000])  # by other containers
    use_cpu(7.5)
    sample = sampler.take()
    assert (sample["cpu_ratio"], sample["cpu_count"]) == (pytest.approx(0.5), 1.5)
    assert (sample["memory_used_bytes"], sample["memory_bytes"]) == (3 * GIB, 8 * GIB)  # without 1 GiB of caches


@pytest.mark.parametrize(
    ("address", "gpus", "want"), [("10.0.0.1", 0, None), ("127.0.0.2", 0, "1"), ("10.0.0.1", 1, None)]
)
def test_programs_use_all_processors_of_their_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, gpus: int, want: str | None
) -> None:
    """With one thread, `make -j$(nproc)` and NumPy used one processor of the 64 that were paid for."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    spec = {
        "run_id": 1, "rank": 0, "num_nodes": 1, "node_ips": [address], "gpus_per_node": gpus, "envs": {}, "secrets": {},
        "head": {"master_port": 1},
    }  # fmt: skip
    counted = agent_environment.count_threads
    nothing = {"proc": tmp_path, "groups": tmp_path}  # as on a machine: no control group has a limit
    monkeypatch.setattr(agent_environment, "count_threads", lambda **named: counted(**named, **nothing))
    envs = agent_environment.make_envs(spec, tmp_path, mark="BROKER_RUN=x", held=None, container=None)
    assert envs.get("OMP_NUM_THREADS") == want


@pytest.mark.parametrize("version", [1, 2])
def test_programs_use_as_many_threads_as_the_limit_of_their_pod(
    host: Host, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    put_in_container(host, version)
    assert agent_environment.count_threads(is_local=False, proc=host.proc, groups=host.groups) == "1"
    host.write("cgroup/box/inner/cpu.max", "800000 100000\n")
    host.write("cgroup/cpu/cpu.cfs_quota_us", "800000")
    assert agent_environment.count_threads(is_local=False, proc=host.proc, groups=host.groups) == "8"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert agent_environment.count_threads(is_local=False, proc=host.proc, groups=host.groups) == "3"


def put_in_container(host: Host, version: int) -> Any:
    """Limit our group to 1.5 processors and 8 GiB, the latter by the group above; return what sets the CPU's use."""
    if version == 2:
        host.write("cgroup/cgroup.controllers", "cpu memory")
        host.write("proc/self/cgroup", UNIFIED)
        for name, limit in (("cgroup/box", str(8 * GIB)), ("cgroup/box/inner", "max")):
            host.write(f"{name}/memory.max", limit)
            host.write(f"{name}/memory.current", str(4 * GIB))
            host.write(f"{name}/memory.stat", f"anon 1\ninactive_file {GIB}\n")
        host.write("cgroup/box/inner/cpu.max", "150000 100000\n")
        return use_unified(host)
    host.write("proc/self/cgroup", SPLIT)  # the path of the host: in the container, only the root exists
    host.write("cgroup/memory/memory.limit_in_bytes", str(8 * GIB))
    host.write("cgroup/memory/memory.usage_in_bytes", str(4 * GIB))
    host.write("cgroup/memory/memory.stat", f"inactive_file 5\ntotal_inactive_file {GIB}\n")
    host.write("cgroup/cpu/cpu.cfs_quota_us", "150000")
    host.write("cgroup/cpu/cpu.cfs_period_us", "100000")
    return use_split(host)


def use_unified(host: Host) -> Any:
    def use(seconds: float) -> None:
        host.write("cgroup/box/inner/cpu.stat", f"usage_usec {int(seconds * 1e6)}\nuser_usec 1\n")

    use(0.0)
    return use


def use_split(host: Host) -> Any:
    def use(seconds: float) -> None:
        host.write("cgroup/cpuacct/cpuacct.usage", str(int(seconds * 1e9)))

    use(0.0)
    return use


@pytest.mark.parametrize(
    "limits", [{"memory.max": "max", "cpu.max": "max 100000"}, {"memory.max": str(2**62)}, {"memory.max": "?"}, {}]
)
def test_group_without_a_limit_has_that_of_the_host(host: Host, limits: Mapping[str, str]) -> None:
    host.write("cgroup/cgroup.controllers", "cpu memory")
    host.write("cgroup/memory.current", "1")
    for name, text in limits.items():
        host.write(f"cgroup/{name}", text)
    sample = host.make_sampler().take()
    assert (sample["memory_bytes"], sample["cpu_count"]) == (64 * GIB, 4)


@pytest.mark.parametrize(("inner", "outer"), [(6, 8), (8, 6)])
def test_tightest_of_several_limits_counts(host: Host, inner: int, outer: int) -> None:
    use_cpu = put_in_container(host, 2)
    host.write("cgroup/box/memory.max", str(outer * GIB))
    host.write("cgroup/box/inner/memory.max", str(inner * GIB))
    host.write("cgroup/box/cpu.max", "300000 100000\n")
    host.write("cgroup/box/cpu.stat", "usage_usec 0\n")
    use_cpu(0.0)
    sample = host.make_sampler().take()
    assert (sample["memory_bytes"], sample["cpu_count"]) == (6 * GIB, 1.5)


def test_disk_is_measured_as_df_does(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 blocks, 40 hold data and 5 are reserved for root: 40 of 95 are in use."""
    found = os.statvfs_result((4096, 4096, 100, 60, 55, 1, 1, 1, 0, 255))
    sampler = host.make_sampler()
    monkeypatch.setattr(os, "statvfs", lambda path: found)
    sample = sampler.take()
    assert (sample["disk_used_bytes"], sample["disk_bytes"]) == (40 * 4096, 95 * 4096)


def test_counter_reset_does_not_give_a_negative_rate(host: Host) -> None:
    host.move_bytes(10_000_000)
    sampler = host.make_sampler()
    host.now_s += 10
    host.move_bytes(0)
    assert sampler.take()["network_received_bytes_s"] == 0


def test_missing_kernel_files_are_left_out_of_a_sample(host: Host) -> None:
    for name in ("meminfo", "diskstats", "net/dev"):
        (host.proc / name).unlink()
    assert set(host.make_sampler().take()) == {"time_s", "cpu_ratio", "cpu_count", "disk_used_bytes", "disk_bytes"}


class FakeSmi:
    """A fake `nvidia-smi` with a fixed answer, and a kernel log."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        program = folder / "nvidia-smi"
        program.write_text(SMI)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        (folder / "calls").touch()
        self.answer("0, 0, 0, 0, 0\n")

    def answer(self, text: str, code: int = 0) -> None:
        (self.folder / "answer").write_text(text)
        (self.folder / "code").write_text(str(code))

    @property
    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSmi:
    fake = FakeSmi(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{fake.folder}:/usr/bin:/bin")
    monkeypatch.setattr(agent_gpus, "KERNEL_LOG", str(tmp_path / "kmsg"))
    return fake


def test_gpus_are_read_in_base_units_and_what_one_does_not_report_is_none(smi: FakeSmi) -> None:
    smi.answer("97, 71424, 81559, 64, 688.31\n0, 4, 81559, [N/A], [Not Supported]\nnot a line\n")
    assert agent_gpus.Gpus().read() == [
        [0.97, 71424 << 20, 81559 << 20, 64.0, 688.31], [0.0, 4 << 20, 81559 << 20, None, None]
    ]  # fmt: skip
    assert smi.calls == [
        "--query-gpu=utilization.gpu,memory.used,memory.total,temperature.gpu,power.draw --format=csv,noheader,nounits"
    ]


def test_failing_program_is_called_at_growing_intervals(smi: FakeSmi) -> None:
    smi.answer("NVIDIA-SMI has failed\n", code=9)
    gpus = agent_gpus.Gpus()
    for _ in range(20):
        assert gpus.read() == []
    assert len(smi.calls) == 4  # samples 1, 4, 9 and 18
    for _ in range(240):
        assert gpus.read() == []
    assert len(smi.calls) == 9  # and 35, 68, then every 61st
    smi.answer("1, 2, 3, 4, 5\n")
    while not gpus.read():
        pass
    calls = len(smi.calls)
    assert gpus.read() and gpus.read() and len(smi.calls) == calls + 2


def test_hanging_program_costs_a_sample_its_gpus_only(smi: FakeSmi, monkeypatch: pytest.MonkeyPatch) -> None:
    (smi.folder / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 3600\n")
    monkeypatch.setattr(agent_gpus, "ANSWER_S", 0.2)
    assert agent_gpus.Gpus().read() == []


def test_xid_errors_are_counted_by_their_number_as_the_log_grows(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text(
        "6,1,2,-;usb 1-1: new device\n"
        "3,2,3,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.\n"
        "3,3,4,-;NVRM: Xid (PCI:0000:3b:00): 48, pid='<unknown>', name=<unknown>, DBE\n"
    )
    xids = agent_gpus.Xids(str(path))
    assert xids.count() == {"48": 1, "79": 1}
    with path.open("a") as file:
        file.write("3,4,5,-;NVRM: Xid (PCI:0000:86:00): 79, pid=1, again\n")
    assert xids.count() == {"48": 1, "79": 2}


def test_the_kernel_log_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampler takes a sample every ten seconds, for months."""
    opened: list[str] = []

    class Counted(agent_gpus.Xids):  # type: ignore[misc]
        def __init__(self, path: str) -> None:
            opened.append(path)
            super().__init__(path)

    (tmp_path / "kmsg").write_text("3,2,3,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1\n")
    monkeypatch.setattr(agent_gpus, "KERNEL_LOG", str(tmp_path / "kmsg"))
    monkeypatch.setattr(agent_gpus, "Xids", Counted)
    gpus = agent_gpus.Gpus()
    assert gpus.count_xids() == gpus.count_xids() == {"79": 1} and len(opened) == 1


def test_a_kernel_log_for_root_only_is_read_by_sudo_until_it_refuses(smi: FakeSmi) -> None:
    sudo = smi.folder / "sudo"
    sudo.write_text('#!/bin/sh\n[ "$*" = "-n dmesg" ] && echo "[1.0] NVRM: Xid (PCI:0000:3b:00): 31, pid=7" \n')
    sudo.chmod(0o700)
    xids = agent_gpus.Xids(str(smi.folder / "missing"))
    assert xids.count() == {"31": 1} and xids.count() == {"31": 1}
    sudo.write_text("#!/bin/sh\nexit 1\n")
    assert xids.count() == {} and not xids.is_read
    sudo.write_text(f"#!/bin/sh\ntouch {smi.folder}/asked-again\n")
    assert xids.count() == {} and not (smi.folder / "asked-again").exists()


def test_sample_of_a_node_with_gpus_has_them_and_their_errors(host: Host, smi: FakeSmi, tmp_path: Path) -> None:
    (tmp_path / "kmsg").write_text("3,2,3,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1\n")
    smi.answer("50, 1, 2, 3, 4\n")
    sampler = host.make_sampler()
    sample = sampler.take()
    assert sample["gpus"][0][0] == 0.5 and sample["xids"] == {"79": 1}


def make_sample(number: int, gpus: int = 0) -> dict[str, Any]:
    gpu = [0.9712, 74893492224, 85520809984, 64.0, 688.31]
    return {"time_s": float(number), "cpu_ratio": 0.5, "gpus": [gpu] * gpus}


def test_file_keeps_the_newest_samples_and_never_grows_beyond_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    for number in range(3000):
        agent_ring.append(path, [make_sample(number, gpus=8)])
        assert path.stat().st_size <= agent_ring.BYTES_MAX
    kept = agent_ring.read(path)
    assert [sample["time_s"] for sample in kept] == list(range(3000 - len(kept), 3000))
    assert len(kept) >= 110  # 18 minutes with eight GPUs
    assert agent_ring.read_newest(path) == make_sample(2999, gpus=8)
    assert [sample["time_s"] for sample in agent_ring.read(path, after_s=2996.5)] == [2997, 2998, 2999]
    assert path.stat().st_mode & 0o777 == 0o600


def test_damaged_and_incomplete_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    assert agent_ring.read(path) == [] and agent_ring.read_newest(path) is None
    agent_ring.append(path, [make_sample(1)])
    with path.open("ab") as file:
        file.write(b'\xff\xfe\n[1]\n{"time_s": "soon"}\n' + b"[" * 2000 + b"\n" + b'{"time_s": 2.0, "cpu')
    assert [sample["time_s"] for sample in agent_ring.read(path)] == [1.0]
    assert agent_ring.read_newest(path) == make_sample(1)


def test_sample_that_was_read_before_is_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    agent_ring.append(path, [make_sample(number) for number in (1, 2, 3)])
    assert [each["time_s"] for each in agent_ring.read(path, after_s=2.0)] == [3.0]


def test_sample_that_is_too_long_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    agent_ring.append(path, [make_sample(1), {"time_s": 2.0, "text": "x" * agent_ring.LINE_BYTES_MAX}])
    assert len(path.read_text().splitlines()) == 1 and json.loads(path.read_text())["time_s"] == 1.0


def test_a_sample_that_fails_does_not_end_the_sampling(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The disk is full once: the next sample is written."""
    taken: list[Path] = []

    def append(path: Path, samples: list[object]) -> None:
        taken.append(path)
        if len(taken) == 3:
            raise KeyboardInterrupt
        raise OSError("No space left on device")

    monkeypatch.setattr(agent_samples.agent_files, "STATE", tmp_path)
    monkeypatch.setattr(agent_samples.agent_ring, "append", append)
    monkeypatch.setattr(agent_samples.time, "sleep", lambda wait_s: None)
    with pytest.raises(KeyboardInterrupt):
        agent_samples.sample_forever()
    assert len(taken) == 3


def test_agent_sends_the_new_files() -> None:
    assert {"agent_samples.py", "agent_limits.py", "agent_gpus.py", "agent_ring.py"} <= set(FILES)


@pytest.mark.parametrize(
    ("returncode", "before", "after", "expected"),
    [
        (137, 4, 5, "ended 1 process on"),
        (-9, 4, 6, "ended 2 processes on"),
        (1, 4, 5, "ended 1 process on"),  # a launcher such as torchrun exits with 1
        (137, 4, 4, "SIGKILL came from another process"),
        (1, 4, 4, ""),
        (0, 4, 5, ""),
        (137, None, 5, ""),
        (137, 4, None, ""),
    ],
)
def test_a_kill_is_attributed_to_a_lack_of_memory_or_to_another_process(
    tmp_path: Path, returncode: int, before: int | None, after: int | None, expected: str
) -> None:
    if before is not None:
        (tmp_path / "vmstat").write_text(f"nr_free_pages 71\noom_kill {before}\n")
    first = agent_limits.count_oom_kills(tmp_path)
    assert first == before
    (tmp_path / "vmstat").write_text("nr_free_pages 70\n" + ("" if after is None else f"oom_kill {after}\n"))
    told = agent_limits.explain_kill(returncode, first, tmp_path)
    assert expected in told and bool(told) == bool(expected)
