"""Run the jobs daemon: one controller per live job or service, and the collector, while no command runs.

One daemon leads a state folder. A flock elects it, and an epoch fences every write of a leader that was replaced while
it slept. In a shared store, any number of daemons claim individual jobs; see `workload.py`. A daemon may be killed or
stopped at any instant: jobs keep running, and another daemon takes over.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from broker.clock import Clock
from broker.config import Config, read_keep_days
from broker.errors import BrokerError, FencedError
from broker.jobs.daemon_meter import DaemonMeter
from broker.jobs.daemon_parts import Controller, Notifies, StartsSchedules
from broker.jobs.daemon_process import POLL_S, hold_lock
from broker.jobs.lease_keeper import keep_lease
from broker.jobs.log_files import forget_logs, rotate_log
from broker.jobs.monitor import is_due
from broker.jobs.node_samples import forget_samples
from broker.jobs.setup_archives import forget_archives, list_places
from broker.jobs.workload import Key, LeaderWorkload, SharedWorkload, Workload, list_keys
from broker.provision.lifecycle import Provisioner
from broker.provision.refusals import draw_backoff_s
from broker.state.claims import HOUSEKEEPING
from broker.state.leader import STALE_S
from broker.state.store import Store

log = logging.getLogger(__name__)

JOBS_POLL_S = 0.3
COLLECT_EVERY_S = 60.0
NOTIFY_RETRY_S = 5.0
COMPACT_EVERY_S = 86400.0
LOCK_TRIES = 100  # a command that tests the lock holds it briefly; a busy machine may suspend it there


MakeController = Callable[[Any], Controller]  # receives a Key; a caller without services accepts IDs only


@dataclass(frozen=True, kw_only=True)
class _DaemonContext:
    """The parts of a daemon. `idle_s`: seconds without live jobs after which it exits."""

    store: Store
    make_controller: MakeController
    provisioner: Provisioner
    clock: Clock
    config: Config
    notifier: Notifies | None
    scheduler: StartsSchedules | None
    open_store: Callable[[], Store] | None
    idle_s: float


async def run_daemon(
    *,
    store: Store,
    make_controller: MakeController,
    provisioner: Provisioner,
    clock: Clock,
    config: Config,
    notifier: Notifies | None = None,
    scheduler: StartsSchedules | None = None,
    open_store: Callable[[], Store] | None = None,
    idle_s: float = 60,
) -> None:
    """Lead until another daemon holds the lock, `idle_s` pass without live jobs or schedules, or SIGTERM arrives.

    In a shared store, drive a share of the jobs until `idle_s` pass without jobs, or SIGTERM arrives. With
    `open_store`, which opens the store again, a thread keeps the lease or the leadership while the event loop is
    blocked.
    """
    context = _DaemonContext(
        store=store,
        make_controller=make_controller,
        provisioner=provisioner,
        clock=clock,
        config=config,
        notifier=notifier,
        scheduler=scheduler,
        open_store=open_store,
        idle_s=idle_s,
    )
    is_needed = True
    while is_needed:
        if not await (_share_jobs(context) if store.is_shared else _lead(context)):
            return
        # A command that submitted a job while this daemon held the lock did not start another one, so this one must run
        # it.
        is_needed = bool(list_keys(store)) or (scheduler is not None and store.schedules.has_active())


async def _lead(context: _DaemonContext) -> bool:
    """Return whether this process led and stopped only because it was idle."""
    for _ in range(LOCK_TRIES):
        with hold_lock(context.config) as is_held:
            if is_held or context.store.leader.measure_beat_age_s() > STALE_S:  # its holder is suspended or hangs
                log.info("leading with epoch %s", context.store.leader.lead())
                return await _drive_workload(context, LeaderWorkload(context.store, context.clock))
        await context.clock.sleep(POLL_S)
    return False


async def _share_jobs(context: _DaemonContext) -> bool:
    """Return whether this process stopped only because it was idle."""
    workload = SharedWorkload(context.store, context.clock)
    log.info("sharing the jobs as %s", workload.name)
    try:
        return await _drive_workload(context, workload)
    finally:
        workload.resign()


async def _drive_workload(context: _DaemonContext, workload: LeaderWorkload | SharedWorkload) -> bool:
    """Drive the jobs, with a thread that keeps the lease; return whether it stopped only because it was idle."""
    main = asyncio.ensure_future(_Daemon(context, workload).run())
    open_store = context.open_store
    keeping = keep_lease(workload, context.clock, open_store) if open_store else nullcontext()
    with keeping, _cancel_on_sigterm(main):
        return await _wait_for(main)


async def _wait_for(main: asyncio.Future[None]) -> bool:
    try:
        await main
    except asyncio.CancelledError:
        log.info("stopped by SIGTERM; jobs keep running without a daemon until the next command")
        return False
    except FencedError as error:
        log.warning("%s; stopping", error.message)
        return False
    return True


class _Daemon:
    def __init__(self, context: _DaemonContext, workload: Workload) -> None:
        self._workload = workload
        self._config = context.config
        self._store = context.store
        self._make_controller = context.make_controller
        self._provisioner = context.provisioner
        self._clock = context.clock
        self._notifier = context.notifier
        self._scheduler = context.scheduler
        self._idle_s = context.idle_s
        self._drives: dict[Key, asyncio.Task[None]] = {}
        self._is_collecting = False
        self._wakes: dict[Key, asyncio.Event] = {}
        self._meter = DaemonMeter()

    async def run(self) -> None:
        collecting = asyncio.ensure_future(self._collect_forever())
        notifying = asyncio.ensure_future(self._notify_forever())
        scheduling = asyncio.ensure_future(self._schedule_forever())
        idle_since_s = self._clock.now_s()
        try:
            while True:
                self._start_controllers()
                if self._drives:
                    idle_since_s = self._clock.now_s()
                elif self._clock.now_s() - idle_since_s < self._idle_s or self._is_collecting:
                    pass
                elif self._store.clusters.has_terminating() or (
                    self._scheduler is not None and self._store.schedules.has_active()
                ):
                    idle_since_s = self._clock.now_s()
                else:
                    await self._notify()
                    if self._notifier is None or not self._notifier.is_busy:
                        self._workload.resign()
                        return
                begin_s = self._clock.now_s()
                await self._clock.sleep(JOBS_POLL_S)
                self._meter.set_lag(self._clock.now_s() - begin_s - JOBS_POLL_S)
        finally:
            tasks = [collecting, notifying, scheduling, *self._drives.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._notifier is not None:
                await self._notifier.rest()

    def _start_controllers(self) -> None:
        for key in [key for key, task in self._drives.items() if task.done()]:
            del self._drives[key], self._wakes[key]
            self._workload.finish(key)
        for key in self._workload.refresh(self._meter.read()):
            if key not in self._drives:
                self._wakes[key] = asyncio.Event()
                self._drives[key] = asyncio.ensure_future(self._drive(key, self._wakes[key]))
        for job_id in self._workload.list_cancelled():  # one query instead of one per job
            if job_id in self._wakes:
                self._wakes[job_id].set()
        for key, drive in self._drives.items():
            if self._workload.is_lost(key):
                drive.cancel()
            elif not self._workload.is_mine(key):
                self._wakes[key].set()  # its controller gives the job up after this step

    async def _drive(self, key: Key, wake: asyncio.Event) -> None:
        """Step one job or service until it ends; an unexpected error delays only this one."""
        try:
            with self._workload.hold(key):
                await self._step_until_ended(key, wake)
        except FencedError:
            return  # another daemon drives it now; the main loop detects it too

    async def _step_until_ended(self, key: Key, wake: asyncio.Event) -> None:
        controller: Controller | None = None
        failures = 0
        while self._workload.is_mine(key):
            try:
                controller = controller or self._make_controller(key)
                begin_s = self._clock.now_s()
                wait_s = await controller.step()
                self._meter.add_step(self._clock.now_s() - begin_s)
                failures = 0
                if math.isinf(wait_s):
                    return
                await controller.rest(wait_s, wake)
            except FencedError:
                raise
            except Exception as error:  # the outermost edge of one job
                failures += 1
                self._meter.add_failure()
                wait_s = draw_backoff_s(failures, cap_s=60.0)
                text = error.message if isinstance(error, BrokerError) else repr(error)
                noun = "job" if isinstance(key, int) else "service"
                log.warning(
                    "%s %s: %s; next try in %.1f s",
                    noun,
                    key,
                    text,
                    wait_s,
                    exc_info=error,
                    extra={"about": {noun: key}},
                )
                if not isinstance(error, BrokerError):
                    controller = None  # discard the controller's memory after a bug; the store remains valid
                await self._clock.sleep(wait_s)

    async def _notify_forever(self) -> None:
        while self._notifier is not None:
            await self._clock.sleep(await self._notify())

    async def _notify(self) -> float:
        """Step the notifier if this process does housekeeping; return the seconds until the next step."""
        if self._notifier is None:
            return NOTIFY_RETRY_S
        try:
            if self._workload.does_housekeeping():
                with self._workload.hold(HOUSEKEEPING):
                    return self._notifier.step()
            await self._notifier.rest()  # another process delivers them now
        except FencedError as error:
            log.info("%s", error.message)  # the main loop detects it too
            await self._notifier.rest()
        except BrokerError as error:
            log.warning("notifications wait: %s", error.message)
        except Exception as error:  # the outermost edge of the notifier
            log.warning("notifying failed", exc_info=error)
        return NOTIFY_RETRY_S

    async def _schedule_forever(self) -> None:
        while self._scheduler is not None:
            wait_s = NOTIFY_RETRY_S
            try:
                if self._workload.does_housekeeping():
                    with self._workload.hold(HOUSEKEEPING):
                        wait_s = self._scheduler.step()
            except FencedError as error:
                log.info("%s", error.message)  # the main loop detects it too
            except BrokerError as error:
                log.warning("schedules wait: %s", error.message)
            except Exception as error:  # the outermost edge of the scheduler
                log.warning("scheduling failed", exc_info=error)
            await self._clock.sleep(wait_s)

    async def _collect_forever(self) -> None:
        compacted_s = float("-inf")
        while True:
            try:
                rotate_log(self._config.daemon_log)
                if self._workload.does_housekeeping():
                    with self._workload.hold(HOUSEKEEPING):
                        await self._collect()
                    if is_due(compacted_s, COMPACT_EVERY_S, self._clock.now_s()):
                        compacted_s = self._clock.now_s()
                        with self._workload.hold(HOUSEKEEPING):
                            self._compact(compacted_s)
                            await self._forget_archives(compacted_s)
            except FencedError as error:
                log.info("%s", error.message)  # the main loop detects it too
            except Exception as error:  # the outermost edge of the collector
                log.warning("collecting failed", exc_info=error)
            await self._clock.sleep(COLLECT_EVERY_S)

    async def _collect(self) -> None:
        self._is_collecting = True  # confirming that a cluster is gone takes minutes
        try:
            await self._provisioner.collect()
        finally:
            self._is_collecting = False

    async def _forget_archives(self, now_s: float) -> None:
        if not (places := list_places(self._store)):
            return
        for place, error in (await asyncio.to_thread(forget_archives, places, now_s=now_s)).items():
            log.warning("setup archives at %s were not checked: %s", place, error)

    def _compact(self, now_s: float) -> None:
        self._store.copy_if_due()  # first, so that the copy keeps pruned rows for another week
        keep_days = read_keep_days(self._config)
        self._store.retention.compact(keep_days=keep_days)
        forget_logs(self._store, self._config.logs, older_than_s=now_s - keep_days * 86400)
        forget_samples(self._store, self._config.logs, older_than_s=now_s - keep_days * 86400)


@contextmanager
def _cancel_on_sigterm(main: asyncio.Future[None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, main.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
