"""Two thousand idle managed jobs under the real daemon: its processor time, memory, `jobs queue`, a newcomer's wait.

    python -m tests.bench.bench_daemon [--jobs 2000] [--seconds 20]

One job runs on the local cloud for as long as is measured; all others need it, so that the daemon looks at each of
them once a second and has nothing to do. SQLite lies on the disk of the temporary folder.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from broker.clock import SystemClock
from broker.state.store import Store
from broker.types import Task
from tests.bench.bench_jobs import measure_process, report

TICKS_S = os.sysconf("SC_CLK_TCK")
START_S_MAX = 60.0
HEAD = "name: head\nresources: {infra: local}\nrun: sleep 3600\n"
NEWCOMER = "name: newcomer\nresources: {infra: local}\nrun: echo done\n"


class Bench:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "BROKER_HOME": str(folder), "HOME": str(folder)}
        self.daemon: subprocess.Popen[bytes] | None = None

    def run(self, *arguments: str) -> float:
        """Return the seconds of the whole process."""
        start_s = time.perf_counter()
        command = [sys.executable, "-m", "broker", *arguments]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return time.perf_counter() - start_s

    def start_daemon(self) -> None:
        command = [sys.executable, "-m", "broker", "daemon", "--idle", "60"]
        self.daemon = subprocess.Popen(command, env=self.environment, stderr=(self.folder / "daemon.txt").open("wb"))

    def write(self, name: str, text: str) -> str:
        path = self.folder / name
        path.write_text(text)
        return str(path)

    def measure_cpu_s(self) -> float:
        """Return the daemon's user and system time so far."""
        assert self.daemon is not None
        fields = Path(f"/proc/{self.daemon.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_S

    def measure_rss_mib(self) -> float:
        assert self.daemon is not None
        lines = Path(f"/proc/{self.daemon.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        try:
            measure(bench, options.jobs, options.seconds)
        finally:
            if bench.daemon is not None:
                bench.daemon.terminate()
                bench.daemon.wait()


def measure(bench: Bench, count: int, seconds: float) -> None:
    bench.run("status")  # makes the state folder
    bench.start_daemon()
    bench.run("jobs", "launch", bench.write("head.yaml", HEAD), "--yes", "--detach-run")
    bench.run("jobs", "wait", "1", "--for", "RUNNING", "--timeout", str(START_S_MAX))
    alone_mib = bench.measure_rss_mib()
    store = Store(bench.folder / "state.db", clock=SystemClock())
    with store.transaction():
        for number in range(count):
            store.jobs.add(f"idle-{number}", Task(name="idle", run="true"), needs=(1,))
    begun_s = bench.measure_cpu_s()
    time.sleep(5.0)  # it finds them all
    report(f"the daemon finds {count:,} new jobs, cpu", bench.measure_cpu_s() - begun_s, "s")
    begun_s, wall_s = bench.measure_cpu_s(), time.perf_counter()
    time.sleep(seconds)
    passed_s = time.perf_counter() - wall_s
    report("... then its cpu, each second", (bench.measure_cpu_s() - begun_s) / passed_s, "s", bar=0.5)
    report("memory of the daemon", bench.measure_rss_mib(), "MiB")
    report("... for each idle job", (bench.measure_rss_mib() - alone_mib) * 1024 / count, "KiB")
    report("the state's files", sum(path.stat().st_size for path in bench.folder.glob("state.db*")) / 2**20, "MiB")
    wall_s, cpu_s = measure_process(bench.environment, "-m", "broker", "jobs", "queue")
    report("`broker jobs queue`, whole process", wall_s, "s", bar=0.5)
    report("... its processor time", cpu_s, "s", bar=0.5)
    newcomer = bench.write("newcomer.yaml", NEWCOMER)
    start_s = time.perf_counter()
    bench.run("jobs", "launch", newcomer, "--yes", "--detach-run")
    bench.run("jobs", "wait", str(count + 2), "--timeout", str(START_S_MAX))
    report("a newcomer from launch to its success", time.perf_counter() - start_s, "s")
    start_s = time.perf_counter()
    bench.run("jobs", "cancel", "--all")
    while store.jobs.list_unfinished_ids():
        time.sleep(0.2)
    report("all are cancelled and their machines gone", time.perf_counter() - start_s, "s")
    store.close()


if __name__ == "__main__":
    main()
