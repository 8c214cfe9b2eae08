"""The clock of a rehearsed service, and the reports of its balancer in simulated time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.clock import ScaledClock, SystemClock
from broker.locks import hold_lock
from broker.rehearsal.service_context import BOOT_SPEED, RehearsedLoads, ServicePace
from broker.serve.files import Load, ReplicaLoad, ServiceFolder, write_file


def test_the_clock_is_fast_only_while_no_program_starts() -> None:
    pace = ServicePace(ScaledClock(), wait_speed=BOOT_SPEED)
    pace.wait()
    assert pace.clock.rate == BOOT_SPEED
    pace.start("job-1")
    pace.start("job-2")
    assert pace.clock.rate == 1.0
    pace.keep(["job-2"])
    pace.wait()
    assert pace.clock.rate == 1.0, "the program of job 2 still starts"
    pace.keep([])
    pace.wait()
    assert pace.clock.rate == BOOT_SPEED
    pace.keep(["job-1"], running=["job-1"])
    assert pace.clock.rate == 1.0, "the program of job 1 was ready, and answers slowly now"
    pace.wait()
    assert pace.clock.rate == 1.0


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[ServiceFolder]:
    """The folder of a service whose balancer runs."""
    found = ServiceFolder(path=tmp_path)
    with hold_lock(found.lock):
        yield found


def report(folder: ServiceFolder, *, is_ready: bool = True, since_s: float, time_s: float | None = None) -> None:
    """Write what the balancer knows of replica 1; times are real, as those of a process without a simulated clock."""
    now_s = SystemClock().now_s() if time_s is None else time_s
    replica = ReplicaLoad(is_ready=is_ready, in_flight=0, since_s=since_s)
    write_file(folder.load, Load(generation=1, time_s=now_s, pid=1, replicas={1: replica}))


def read(loads: RehearsedLoads, folder: ServiceFolder, now_s: float) -> tuple[bool, float]:
    load = loads.read(folder, now_s)
    assert load is not None
    return load.replicas[1].is_ready, load.replicas[1].since_s


def test_readiness_counts_from_the_simulated_time_of_the_first_report(folder: ServiceFolder) -> None:
    started_s = SystemClock().now_s()
    loads = RehearsedLoads(lambda number: started_s, interval_s=1.0)
    report(folder, since_s=started_s + 1)
    assert read(loads, folder, 9e9) == (True, 9e9)
    assert read(loads, folder, 9e9 + 600) == (True, 9e9)
    report(folder, is_ready=False, since_s=started_s + 2)
    assert read(loads, folder, 9e9 + 700) == (False, 9e9 + 700)


def test_a_replica_is_not_ready_on_a_probe_of_its_lost_machine(folder: ServiceFolder) -> None:
    started_s = SystemClock().now_s()
    loads = RehearsedLoads(lambda number: started_s, interval_s=1.0)
    report(folder, since_s=started_s - 60, time_s=started_s + 0.5)
    assert read(loads, folder, 100.0) == (False, 100.0)
    report(folder, since_s=started_s - 60, time_s=started_s + 2.5)  # it has been probed since it started
    assert read(loads, folder, 103.0) == (True, 103.0)
    assert RehearsedLoads(lambda number: None, interval_s=1.0).read(folder, 0.0).replicas[1].is_ready is False  # type: ignore[union-attr]


def test_a_report_counts_until_the_balancer_ends_however_long_the_next_one_takes(tmp_path: Path) -> None:
    """Otherwise, a busy machine shows outages that the service does not have."""
    loads, folder = RehearsedLoads(lambda number: 0.0, interval_s=1.0), ServiceFolder(path=tmp_path)
    with hold_lock(folder.lock):
        assert loads.read(folder, 0.0) is None, "it has not written one"
        report(folder, since_s=1.0, time_s=SystemClock().now_s() - 60)
        assert read(loads, folder, 0.0) == (True, 0.0)
    assert loads.read(folder, 0.0) is None
