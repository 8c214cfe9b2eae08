"""The daemon: when it leads, when it leaves, and its work meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from broker.config import Config
from broker.errors import CapacityError, StateError, TransientError
from broker.jobs.daemon import COLLECT_EVERY_S, STALE_S, _Daemon, run_daemon
from broker.jobs.daemon_parts import Notifies, StartsSchedules
from broker.jobs.daemon_process import ensure_daemon, hold_lock
from broker.jobs.lease_keeper import SILENT_S
from broker.jobs.node_samples import get_folder, list_jobs
from broker.jobs.workload import BEAT_EVERY_S, SharedWorkload
from broker.notify.notification import Notification, Sink
from broker.notify.notifier import LINGER_S, Notifier
from broker.notify.settings import NotifySettings
from broker.state.claims import Claims
from broker.state.copies import list_copies
from broker.state.daemon_stats import DaemonStats
from broker.state.leader import LeaderRow
from broker.state.store import Store
from broker.types import EventKind, JobStatus, NotifySpec, Task, make_event
from tests.simulation.virtual import VirtualClock
from tests.simulation.world import OWNER
from tests.state.samples import Hands


class Provisioner:
    """A collector that counts its runs; the first one fails."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.collected_s: list[float] = []

    async def collect(self) -> int:
        self.collected_s.append(self._clock.now_s())
        if len(self.collected_s) == 1:
            raise RuntimeError("a bug")
        return 0


class Controller:
    """A controller that follows a script, one entry per step, and ends its job after the last."""

    def __init__(self, stage: Stage, job_id: int, *steps: float | Exception) -> None:
        self._stage, self._job_id = stage, job_id
        self.steps = list(steps)
        self.stepped_s: list[float] = []
        self.woken_s: list[float] = []

    async def step(self) -> float:
        self.stepped_s.append(self._stage.clock.now_s())
        if not self.steps:
            self._stage.store.jobs.set_status(self._job_id, JobStatus.SUCCEEDED)
            return math.inf
        step = self.steps.pop(0)
        if isinstance(step, Exception):
            raise step
        return step

    async def rest(self, wait_s: float, wake: asyncio.Event) -> None:
        if wake.is_set():
            self.woken_s.append(self._stage.clock.now_s())
        await self._stage.clock.sleep(wait_s)


class Stage:
    def __init__(self, folder: Path) -> None:
        self.clock = VirtualClock()
        self.store = Store(folder / "state.db", clock=self.clock)
        self.config = Config(home=folder, owner=OWNER)
        self.provisioner = Provisioner(self.clock)
        self.controllers: dict[int, Controller] = {}
        self.made: list[int] = []
        self.notifier: Notifies | None = None
        self.scheduler: StartsSchedules | None = None
        self.open_store: Callable[[], Store] | None = None

    def add_job(self, *steps: float | Exception) -> Controller:
        job_id = self.store.jobs.add("j", Task()).id
        self.controllers[job_id] = Controller(self, job_id, *steps)
        return self.controllers[job_id]

    def make(self, job_id: int) -> Any:
        self.made.append(job_id)
        return self.controllers[job_id]

    def run(self, beside: Callable[[], Any] | None = None, *, idle_s: float = 60.0) -> float:
        """Run the daemon; return how long it stayed."""
        begun_s = self.clock.now_s()
        provisioner: Any = self.provisioner

        async def work() -> None:
            other = asyncio.ensure_future(beside()) if beside else None
            await run_daemon(
                store=self.store, make_controller=self.make, provisioner=provisioner, clock=self.clock,
                config=self.config, notifier=self.notifier, scheduler=self.scheduler, open_store=self.open_store,
                idle_s=idle_s,
            )  # fmt: skip
            if other:
                await other

        self.clock.run(work)
        return self.clock.now_s() - begun_s


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_an_idle_daemon_exits(stage: Stage) -> None:
    assert 60.0 <= stage.run() < 62.0
    stage.add_job(500.0)
    assert 560.0 <= stage.run() < 563.0, "it counts from when the last job ended"
    assert stage.run(idle_s=0.0) < 2.0


@pytest.mark.parametrize(("rows", "is_shared"), [(LeaderRow, False), (Claims, True)])
def test_a_daemon_keeps_its_lease_while_a_step_blocks_its_loop(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: Any, is_shared: bool
) -> None:
    extended, waits = threading.Event(), list[bool]()
    extend = rows.extend

    def note(*given: Any) -> bool:
        if is_done := bool(extend(*given)):
            extended.set()
        return is_done

    class Blocking(Controller):
        async def step(self) -> float:
            loop = self._stage.clock.loop
            assert loop is not None
            loop._virtual.skipped_s += SILENT_S
            waits.append(extended.wait(60.0))
            return await super().step()

    monkeypatch.setattr(rows, "extend", note)
    monkeypatch.setattr(stage.store, "is_shared", is_shared)
    stage.open_store = lambda: Store(tmp_path / "state.db", clock=stage.clock)
    job_id = stage.store.jobs.add("j", Task()).id
    stage.controllers[job_id] = Blocking(stage, job_id)
    stage.run()
    assert waits == [True], "by another thread"
    assert not stage.store.claims.has_controller() and stage.store.leader.measure_beat_age_s() > STALE_S, "resigned"


class Deliveries:
    """Notifications by a sink that fails until a point in time; each job's end is one."""

    def __init__(self, stage: Stage, *, works_from_s: float = 0.0, takes_s: float = 0.0) -> None:
        self._stage, self._works_from_s, self._takes_s = stage, works_from_s, takes_s
        self.begun = 0
        self.sent_s: list[float] = []
        settings = NotifySettings(spec=NotifySpec(webhook="https://x.example/"))
        stage.notifier = Notifier(stage.store, stage.clock, read_settings=lambda: settings, send=self.send)

    async def send(self, settings: NotifySettings, sink: Sink, notification: Notification) -> None:
        self.begun += 1
        await self._stage.clock.sleep(self._takes_s)
        if self._stage.clock.now_s() < self._works_from_s:
            raise TransientError("down")
        self.sent_s.append(self._stage.clock.now_s())


def end(stage: Stage) -> None:
    event = make_event(EventKind.ENDED, status="SUCCEEDED", failure="", outcome=None)
    stage.store.events.add(event, job_id=stage.store.jobs.list()[-1].id)


def test_daemon_delivers_the_end_of_its_last_job_before_it_leaves(stage: Stage) -> None:
    deliveries = Deliveries(stage, works_from_s=stage.clock.now_s() + 120.0)
    stage.add_job(5.0)

    async def submit() -> None:
        await stage.clock.sleep(5.0)
        end(stage)

    assert 120.0 <= stage.run(submit, idle_s=0.0) < 120.0 + LINGER_S
    assert len(deliveries.sent_s) == 1


def test_daemon_does_not_wait_for_a_dead_sink_for_long(stage: Stage) -> None:
    deliveries = Deliveries(stage, works_from_s=math.inf)
    stage.add_job(5.0)

    async def submit() -> None:
        await stage.clock.sleep(5.0)
        end(stage)

    assert stage.run(submit, idle_s=0.0) < 10.0 + LINGER_S
    assert deliveries.sent_s == []


def test_delivery_that_hangs_delays_no_job(stage: Stage) -> None:
    deliveries = Deliveries(stage, takes_s=10_000.0)
    assert stage.notifier is not None
    stage.notifier.step()  # events are reported from now on
    controller = stage.add_job(*[1.0] * 50)
    end(stage)
    stage.run(idle_s=0.0)
    waits = [later - earlier for earlier, later in pairwise(controller.stepped_s)]
    assert len(waits) == 50 and max(waits) < 1.5
    assert deliveries.begun == 1


def test_notifier_that_fails_stops_no_job(stage: Stage) -> None:
    class Broken:
        is_busy = False

        def step(self) -> float:
            raise RuntimeError("a bug")

        async def rest(self) -> None:
            pass

    stage.notifier = Broken()
    stage.add_job(20.0)
    stage.run(idle_s=0.0)
    assert [job.status for job in stage.store.jobs.list()] == [JobStatus.SUCCEEDED]


def test_a_job_submitted_while_the_daemon_is_idle_is_run(stage: Stage) -> None:
    async def submit() -> None:
        await stage.clock.sleep(50.0)
        stage.add_job(5.0)

    assert 115.0 <= stage.run(submit) < 118.0
    assert [job.status for job in stage.store.jobs.list()] == [JobStatus.SUCCEEDED]


def test_it_collects_once_a_minute_whatever_the_result(stage: Stage) -> None:
    stage.add_job(200.0)
    stage.run(idle_s=0.0)
    times = [each - stage.provisioner.collected_s[0] for each in stage.provisioner.collected_s]
    assert times == pytest.approx([0.0, COLLECT_EVERY_S, 2 * COLLECT_EVERY_S, 3 * COLLECT_EVERY_S], abs=0.01)


def test_daemon_shows_that_it_is_alive(stage: Stage) -> None:
    ages: list[float] = []

    async def look() -> None:
        await stage.clock.sleep(1.0)
        for _ in range(50):
            ages.append(stage.store.leader.measure_beat_age_s())
            await stage.clock.sleep(1.0)

    stage.run(look)
    assert max(ages) <= BEAT_EVERY_S + 0.5 and BEAT_EVERY_S < STALE_S / 5


def test_an_error_of_one_job_costs_it_a_pause_and_a_bug_its_controller(stage: Stage) -> None:
    known = stage.add_job(CapacityError("full"), 1.0)
    other = stage.add_job(*[1.0] * 20)
    buggy = stage.add_job(RuntimeError("a bug"), 1.0)
    stage.run(idle_s=0.0)
    assert [job.status for job in stage.store.jobs.list()] == [JobStatus.SUCCEEDED] * 3
    assert (len(known.stepped_s), len(buggy.stepped_s), len(other.stepped_s)) == (3, 3, 21)
    assert sorted(stage.made) == [1, 2, 3, 3], "the memory of one with a bug is not trusted"
    assert other.stepped_s[-1] - other.stepped_s[0] < 21.0


def test_errors_in_a_row_cost_longer_and_longer_pauses_and_a_step_that_works_ends_the_row(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("random.uniform", lambda low, high: high)
    full = CapacityError("full")
    job = stage.add_job(*[full] * 7, 1.0, full)
    stage.run(idle_s=0.0)
    pauses = [later - earlier for earlier, later in pairwise(job.stepped_s)]
    assert pauses == pytest.approx([2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 1.0, 2.0], abs=0.01)


def test_daemon_reports_its_steps_and_failures_with_its_heartbeat(stage: Stage) -> None:
    stage.add_job(3.0, CapacityError("full"), 3.0, 3.0)
    found: list[DaemonStats | None] = []

    async def look() -> None:
        while stage.store.jobs.list_live_ids():
            found.append(stage.store.leader.read_stats())
            await stage.clock.sleep(1.0)

    stage.run(look, idle_s=0.0)
    reported = [each for each in found if each is not None]
    assert reported[-1].failures == 1 and 1 <= sum(reported[-1].step_counts) <= 4
    assert reported == sorted(reported, key=lambda each: sum(each.step_counts))


def test_a_cancel_wakes_its_own_job_only(stage: Stage) -> None:
    first, second = stage.add_job(2.0, 2.0, 2.0), stage.add_job(2.0, 2.0, 2.0)
    stage.store.jobs.request_cancel(1)
    stage.run(idle_s=0.0)
    assert first.woken_s and not second.woken_s


def test_a_second_daemon_leaves_while_the_first_shows_that_it_lives(stage: Stage) -> None:
    stage.store.leader.lead()
    stage.store.leader.beat()
    with hold_lock(stage.config) as is_held:
        assert is_held
        assert stage.run() < STALE_S and not stage.provisioner.collected_s


def test_daemon_that_holds_the_lock_without_signs_of_life_is_replaced(stage: Stage) -> None:
    other = Store(stage.store.path, clock=stage.clock)
    other.leader.lead()
    with hold_lock(stage.config):
        stage.clock.run(lambda: stage.clock.sleep(STALE_S + 1.0))
        assert stage.run() >= 60.0 and stage.provisioner.collected_s


def test_a_controller_that_is_stopped_leaves_its_jobs_unchanged(stage: Stage) -> None:
    job = stage.add_job(*[1.0] * 500)

    async def ask() -> None:
        await stage.clock.sleep(50.0)
        os.kill(os.getpid(), signal.SIGTERM)

    assert 50.0 <= stage.run(ask) < 53.0
    assert stage.store.jobs.list_unfinished_ids() == [1] and 45 < len(job.stepped_s) < 55


def test_a_stopped_controller_of_a_shared_store_leaves_its_jobs_to_others_at_once(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage.store, "is_shared", True)
    monkeypatch.setattr(Store, "read_time_s", lambda self: stage.clock.now_s())
    stage.add_job(*[1.0] * 500)

    async def ask() -> None:
        await stage.clock.sleep(50.0)
        os.kill(os.getpid(), signal.SIGTERM)

    stage.run(ask)
    assert not stage.store.claims.has_controller()
    assert SharedWorkload(stage.store, stage.clock, name="next").refresh() == [1]


def test_a_controller_stops_a_step_of_a_job_that_it_lost(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise two of them would act on the job's machines until the step ends."""
    monkeypatch.setattr(stage.store, "is_shared", True)
    monkeypatch.setattr(Store, "read_time_s", lambda self: stage.clock.now_s())
    stopped_s = list[float]()

    class Hanging(Controller):
        async def step(self) -> float:
            if self.stepped_s:
                return await super().step()
            self.stepped_s.append(self._stage.clock.now_s())
            try:
                await self._stage.clock.sleep(300.0)
            except asyncio.CancelledError:
                stopped_s.append(self._stage.clock.now_s())
                raise
            return 1.0

    job_id = stage.store.jobs.add("j", Task()).id
    stage.controllers[job_id] = Hanging(stage, job_id)
    begun_s = stage.clock.now_s()

    async def take() -> None:
        await stage.clock.sleep(100.0)
        (holder,) = {row[0] for row in stage.store.rows("SELECT holder FROM claims WHERE job_id = ?", (job_id,))}
        stage.store.claims.release(holder, [job_id])
        stage.store.claims.renew("other")
        assert stage.store.claims.claim("other", [job_id])

    stage.run(take)
    assert len(stopped_s) == 1 and stopped_s[0] - begun_s < 110.0


def test_state_is_copied_before_old_jobs_become_totals(stage: Stage) -> None:
    """The copy of the day still has what is pruned from the state itself a moment later."""
    job = stage.store.jobs.add("old", Task())
    stage.store.jobs.set_status(job.id, JobStatus.SUCCEEDED)
    stage.clock.run(lambda: stage.clock.sleep(100 * 86400.0))
    stage.provisioner.collected_s.append(0.0)  # so that this time it does not fail
    stage.run(idle_s=1.0)
    assert stage.store.jobs.get(job.id) is None
    (copy,) = list_copies(stage.store.path)
    with closing(sqlite3.connect(copy.path)) as kept:
        assert kept.execute("SELECT id FROM jobs").fetchall() == [(job.id,)]


def test_logs_of_ended_jobs_are_kept_as_long_as_the_jobs(stage: Stage) -> None:
    stage.store.jobs.set_status(stage.store.jobs.add("k", Task()).id, JobStatus.SUCCEEDED)
    folder = stage.config.logs / "jobs"
    folder.mkdir(parents=True)
    for name, days in (("1.log", 89.0), ("2.log", 91.0)):
        (folder / name).touch()
        age_s = days * 86400.0
        os.utime(folder / name, (stage.clock.now_s() - age_s, stage.clock.now_s() - age_s))
    stage.provisioner.collected_s.append(0.0)  # so that this time it does not fail
    stage.run(idle_s=1.0)
    assert [path.name for path in folder.iterdir()] == ["1.log"]


def test_a_store_that_cannot_be_written_ends_the_daemon_with_the_reason(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(stats: DaemonStats) -> None:
        raise StateError("the disk is full")

    monkeypatch.setattr(stage.store.leader, "beat", fail)
    with pytest.raises(StateError, match="the disk is full"):
        stage.run()


# -- commands that need one -----------------------------------------------------------------------------------------


def start(tmp_path: Path, code: str, *, is_held: bool, age_s: float) -> bool:
    """Return whether `ensure_daemon` started a program, with a lock that is held or not and a beat this long ago."""
    clock = Hands()
    store = Store(tmp_path / "state.db", clock=clock)
    config = Config(home=tmp_path, owner=OWNER)
    store.leader.lead()
    clock.time_s += age_s
    mark = tmp_path / "started"
    mark.unlink(missing_ok=True)
    program = [sys.executable, "-c", f"open({str(mark)!r}, 'w').close(); {code}"]
    try:
        if is_held:
            with hold_lock(config):
                ensure_daemon(config, store, program)
        else:
            ensure_daemon(config, store, program)
    finally:
        store.close()
    return mark.exists()


def test_a_daemon_is_started_unless_one_holds_the_lock_and_lives(tmp_path: Path) -> None:
    assert not start(tmp_path, "", is_held=True, age_s=STALE_S)
    assert start(tmp_path, "", is_held=True, age_s=STALE_S + 1.0)
    assert start(tmp_path, "", is_held=False, age_s=0.0)


@pytest.mark.parametrize(("start_s", "is_awaited"), [(0.0, True), (100.0, True), (math.inf, False)])
def test_a_daemon_that_starts_slowly_is_awaited_for_two_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_s: float, is_awaited: bool
) -> None:
    with contextlib.ExitStack() as locks:

        class SlowProcess:
            def __init__(self, *_: object, **__: object) -> None:
                self.waited_s = 0.0

            def wait(self, timeout: float) -> int:
                if self.waited_s <= start_s < self.waited_s + timeout:
                    assert locks.enter_context(hold_lock(Config(home=tmp_path, owner=OWNER)))
                self.waited_s += timeout
                raise subprocess.TimeoutExpired("daemon", timeout)

        monkeypatch.setattr(subprocess, "Popen", SlowProcess)
        if is_awaited:
            start(tmp_path, "", is_held=False, age_s=0.0)
        else:
            with pytest.raises(StateError, match="did not acquire its lock"):
                start(tmp_path, "", is_held=False, age_s=0.0)


def test_a_failed_daemon_is_reported_by_its_last_line(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="the last line") as caught:
        start(tmp_path, "import sys; print('first'); print('the last line'); sys.exit(3)", is_held=False, age_s=0.0)
    assert any("daemon.log" in hint for hint in caught.value.hints)
    log = Config(home=tmp_path, owner=OWNER).daemon_log
    assert log.stat().st_mode & 0o777 == 0o600 and log.read_text().startswith("first\n")


def test_a_failed_daemon_is_reported_even_if_its_last_line_is_not_utf8(tmp_path: Path) -> None:
    code = r"import sys; sys.stdout.buffer.write(b'caf\xe9 \xff is full\n'); sys.exit(3)"
    with pytest.raises(StateError, match="is full"):
        start(tmp_path, code, is_held=False, age_s=0.0)


def test_logs_and_samples_are_kept_for_as_many_days_as_the_settings_say(tmp_path: Path) -> None:
    config, clock = Config(home=tmp_path, owner=OWNER), Hands()
    (tmp_path / "config.toml").write_text("keep_days = 30\n")
    folder = config.logs / "jobs"
    for number, days in ((1, 40), (2, 20)):
        samples = get_folder(config.logs, number) / "0.jsonl"
        for path in (folder / f"{number}.log", samples):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            os.utime(path, (0, clock.time_s - days * 86400))
    store = Store(tmp_path / "state.db", clock=clock)
    _Daemon._compact(SimpleNamespace(_store=store, _config=config), clock.time_s)  # type: ignore[arg-type]
    assert [path.name for path in folder.glob("*.log")] == ["2.log"]
    assert list_jobs(config.logs) == {2}
