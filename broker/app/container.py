"""The wiring of the application. Each object is created on first use, so a command only loads what it needs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from broker.app import moving
from broker.app.known_starts import plan_with_known_starts
from broker.app.lazy_clouds import LazyClouds
from broker.app.market import Market, find_cache
from broker.app.permissions import Permissions
from broker.clock import Clock, SystemClock
from broker.config import Config, find_admin_policy, find_home, find_state_url, load_config
from broker.errors import BrokerError, StateError, UsageError

if TYPE_CHECKING:
    from broker.access.granting import Grants
    from broker.app.consoles import Console
    from broker.catalog.book import Book
    from broker.clouds.base import Cloud, MakeCloud
    from broker.jobs.controller import JobController
    from broker.jobs.daemon_parts import Controller
    from broker.jobs.scheduler import Scheduler
    from broker.jobs.slots import JobQueue
    from broker.notify.notifier import Notifier
    from broker.optimizer.rating import History
    from broker.provision.access import AccessRenewer
    from broker.provision.lifecycle import Provisioner
    from broker.runtime.base import Transport
    from broker.runtime.gang import Gang
    from broker.state.store import Store
    from broker.types import (
        Autostop,
        Cluster,
        Event,
        NodeRequest,
        Objective,
        PipelinePlan,
        Placement,
        Plan,
        Task,
    )

T = TypeVar("T")
INTERVAL_FACTOR = "interval_factor"  # key in the store: factor that widens forecast intervals
DAEMON = (sys.executable, "-m", "broker", "daemon")


class Context(Permissions):
    """The objects of one command, or of one client of the Python API; `on_note` receives notes and warnings."""

    def __init__(self, home: Path | None = None, *, on_note: Callable[[str], None] = lambda text: None) -> None:
        self._home = home
        self.note = on_note
        self.clock: Clock = SystemClock()

    @cached_property
    def config(self) -> Config:
        """The settings; creates the state folder if it is missing. Raises StateError."""
        return load_config(self._home)

    @cached_property
    def market(self) -> Market:
        """The planner, with one open price book for all plans of this context."""
        return Market(find_cache(), home=find_home(self._home), find_interval_factor=self.find_interval_factor)

    @cached_property
    def console(self) -> Console:
        """The input of a remote user's terminal, for `open_shell`; a server has one for each request."""
        from broker.app.consoles import Console

        return Console()

    @cached_property
    def store(self) -> Store:
        """The store, opened on first use. Raises StateError if it cannot be opened."""
        from broker.state.opening import open_store

        store = open_store(self.config, clock=self.clock)
        moving.guard(store, self.config, clock=self.clock, note=self.note)
        return store

    @cached_property
    def clouds(self) -> Mapping[str, Cloud]:
        """Every cloud that is set up to launch nodes."""
        from broker.clouds import CLOUDS

        def make(name: str) -> Cloud | None:
            make_cloud: MakeCloud = load_entry(CLOUDS[name])
            return make_cloud(self.config, clock=self.clock)

        return LazyClouds(tuple(CLOUDS), make)

    def close(self) -> None:
        """Close the store, if it was opened."""
        if "store" in self.__dict__:
            self.store.close()

    def prepare(self, plan: Plan) -> None:
        """Load the library of the chosen cloud while the user reads the plan."""
        from broker.clouds.base import CanPrepare

        cloud = self.clouds.get(plan.choice.placement.offer.cloud)
        if isinstance(cloud, CanPrepare):
            cloud.prepare()

    @cached_property
    def provisioner(self) -> Provisioner:
        """The only object that creates and terminates nodes of the configured clouds."""
        from broker.provision.lifecycle import Provisioner

        return Provisioner(
            self.clouds, self.store, clock=self.clock, owner=self.config.owner, write_boot=self._write_boot
        )

    def _write_boot(self, request: NodeRequest) -> str:
        from broker.app.first_boot import write_boot

        return write_boot(self, request)

    @cached_property
    def transport(self) -> Transport:
        """The transport, which routes each node's commands by its cloud."""
        from broker.runtime.base import AsksForAccess
        from broker.runtime.transports import TRANSPORTS
        from broker.runtime.transports.routed import RoutedTransport

        def make(path: str) -> Transport:
            transport: Transport = load_entry(path)(self.config, clock=self.clock)
            if isinstance(transport, AsksForAccess):
                transport.renew_access = lambda node: self._access.renew(node)
            return transport

        return RoutedTransport({way: partial(make, path) for way, path in TRANSPORTS.items()})

    @cached_property
    def _access(self) -> AccessRenewer:
        from broker.provision.access import AccessRenewer

        return AccessRenewer(self.clouds, clock=self.clock)

    @cached_property
    def gang(self) -> Gang:
        """The object that starts and observes programs on clusters."""
        from broker.app.backups import read_epoch_number
        from broker.runtime.gang import Gang

        find_epoch = partial(read_epoch_number, self.config.home)
        return Gang(self.transport, clock=self.clock, access=self.grants, find_epoch=find_epoch)

    @cached_property
    def grants(self) -> Grants:
        """Grants that give nodes access to the buckets of their tasks."""
        from broker.access.granting import Grants

        def find_task(cluster: Cluster) -> Task | None:
            job = None if cluster.job_id is None else self.store.jobs.get(cluster.job_id)
            return None if job is None else job.task

        def record_event(cluster: Cluster, event: Event) -> None:
            if cluster.job_id is not None:
                self.store.events.add(event, job_id=cluster.job_id)

        return Grants(self.config, clock=self.clock, find_task=find_task, record_event=record_event)

    def make_controller(self, job_id: int) -> JobController:
        """Return a controller for one managed job, wired to this context's store and clouds."""
        from broker.jobs.controller import JobController

        return JobController(
            job_id,
            store=self.store,
            provisioner=self.provisioner,
            gang=self.gang,
            planner=self.plan_for_controller,
            clock=self.clock,
            config=self.config,
            queue=self.job_queue,
        )

    def plan_for_controller(self, task: Task, avoid: Callable[[Placement], bool] | None) -> Plan:
        """Rank placements at the newest prices: a controller plans again days after its process has started."""
        from broker.state.history import SHARED_S_MAX

        self.market.renew()
        return self.market.rank(
            task,
            usable_clouds=frozenset(self.clouds),
            avoid=avoid,
            history=self.store.history.read(age_s_max=SHARED_S_MAX),
        )

    @cached_property
    def job_queue(self) -> JobQueue:
        """The queue of this store's jobs, which its controllers share."""
        from broker.jobs.slot_limits import read_slot_limits
        from broker.jobs.slots import JobQueue

        return JobQueue(self.store, self.clock, read_limits=partial(read_slot_limits, self.config))

    def make_any_controller(self, key: int | str) -> Controller:
        """Make the controller of a job, by its ID, or of a service, by its name."""
        if isinstance(key, int):
            return self.make_controller(key)
        from broker.app.services import make_service_controller

        return make_service_controller(self, key)

    async def run_paid(self, work: Coroutine[object, object, T]) -> T:
        """Await a call that starts machines. Ctrl-C cancels it; a server cancels it at its client's request."""
        return await work

    def check_notify(self, tasks: Sequence[Task]) -> None:
        """Raise UsageError if the settings do not allow these notifications of managed jobs."""
        specs = [each.notify for each in tasks if each.notify is not None]
        if specs:
            from broker.notify.settings import check_mail, read_settings

            settings = read_settings(self.config)
            for spec in specs:
                check_mail(spec, settings)

    @cached_property
    def notifier(self) -> Notifier:
        """The object that delivers notifications of this store in the daemon."""
        from broker.notify.notifier import Notifier
        from broker.notify.sending import send
        from broker.notify.settings import read_settings

        return Notifier(
            self.store, self.clock, read_settings=partial(read_settings, self.config), send=partial(send, self.config)
        )

    @cached_property
    def scheduler(self) -> Scheduler:
        """The object that starts the jobs of this store's schedules in the daemon."""
        from broker.app.schedules import RunLauncher
        from broker.jobs.scheduler import Scheduler

        return Scheduler(self.store, launches=RunLauncher(self))

    def ensure_daemon(self) -> None:
        """Start the daemon of this state folder unless it is running."""
        from broker.jobs.daemon_process import ensure_daemon

        if moving.read_moved(self.config.home) is not None:
            return  # a server controls the jobs now
        if self.store.is_read_only:
            self.note("note: the state folder is read-only, so no daemon runs its jobs from here")
            return
        ensure_daemon(self.config, self.store, DAEMON)

    def revive_daemon(self) -> None:
        """Start the daemon for a read-only command; a failure to start becomes a warning."""
        try:
            self.ensure_daemon()
        except StateError as error:
            self.warn(error)

    def restart_daemon_if_needed(self) -> None:
        """Restart a dead daemon if it has work left.

        That is a live job, service or schedule, machines of an ended job, a termination or surplus launch whose command
        was killed, or a notification. Commands that show jobs or clusters call this.
        """
        store = self.store
        if (
            store.jobs.has_unfinished()
            or store.services.list_names()
            or store.schedules.has_active()
            or store.clusters.has_terminating()
            or store.intents.has_surplus()
            or self._has_undelivered()
        ):
            self.revive_daemon()

    def _has_undelivered(self) -> bool:
        from broker.notify.notifier import has_undelivered

        return has_undelivered(self.store, now_s=self.clock.now_s())

    def warn(self, error: BrokerError) -> None:
        """Report an error that does not end the command."""
        self.note(f"warning: {error.message}")
        for hint in error.hints:
            self.note(f"hint: {hint}")

    def check_autostop(self, autostop: Autostop | None, cloud_names: Iterable[str]) -> None:
        """Raise UsageError if autostop would terminate nodes, with their disks, instead of stopping them."""
        from broker.clouds.base import CanStop, ProvidesSshHosts

        if autostop is None or autostop.is_down:
            return
        for cloud in (self.clouds.get(name) for name in cloud_names):
            if cloud is not None and (isinstance(cloud, ProvidesSshHosts) or not isinstance(cloud, CanStop)):
                raise UsageError(
                    f"nodes on {cloud.name} cannot stop themselves: a shutdown deletes them and their disks",
                    hints=[
                        "terminate idle clusters: pass `--down`, or write `autostop: {idle_minutes: 30, down: true}`"
                    ],
                )

    def find_cluster(self, name: str) -> Cluster:
        """Find a cluster by name. Raises UsageError with the known names."""
        cluster = self.store.clusters.get(name)
        if cluster is None:
            raise self.explain_missing(name)
        return cluster

    def explain_missing(self, name: str, *, but: Collection[str] = ()) -> UsageError:
        """Make the error for an unknown cluster, with the known names or the closest one, except those in `but`."""
        import difflib

        known = [each.name for each in self.store.clusters.list(on_damage=self.warn)]
        names = [each for each in known if each not in but]
        hint = "list them with `broker status`" if known else "start one with `broker launch TASK.yaml`"
        if names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = (
                f"did you mean `{near[0]}`?" if near else f"known clusters: {', '.join(f'`{each}`' for each in names)}"
            )
        return UsageError(f"unknown cluster `{name}`", hints=[hint])

    def resolve(self, task: Task) -> Task:
        """Apply the administrator's policy, and use the catalog's accelerator names. Raises PolicyError, StateError."""
        home = find_home(self._home)
        if find_admin_policy(home) is not None:
            from broker.app.admin_policy import govern

            task = govern(home, task, self.payee, note=self.note)
        return self.market.resolve(task)

    @property
    def book(self) -> Book:
        """The price book. Raises StateError if it cannot be opened."""
        return self.market.book

    def plan(
        self,
        task: Task,
        *,
        usable_clouds: frozenset[str] | None = None,
        avoid: Callable[[Placement], bool] | None = None,
    ) -> Plan:
        """Rank placements. Raises NoOfferError, with hints that were verified by planning."""
        history, is_refused = self.read_history(), self.find_refused()
        plan = partial(
            self.market.plan, usable_clouds=usable_clouds, avoid=avoid, history=history, is_refused=is_refused
        )
        return plan_with_known_starts(self, task, plan)

    @property
    def has_store(self) -> bool:
        """Whether a store exists. Planning does not create one."""
        home = find_home(self._home)
        return (home / "state.db").exists() or find_state_url(home) is not None

    def read_history(self) -> History | None:
        """Read the preemption history of own spot nodes; None without a state folder. Planning creates none."""
        try:
            return self.store.history.read() if self.has_store else None
        except StateError:
            return None  # a plan does not depend on it

    def find_interval_factor(self) -> float:
        """Return the factor that widens forecast intervals, from the last scoring of own jobs."""
        try:
            return float(self.store.meta.get(INTERVAL_FACTOR) or 1.0) if self.has_store else 1.0
        except (StateError, ValueError):
            return 1.0

    def find_refused(self) -> Callable[[Placement], bool] | None:
        """Return a test for recently refused placements; None without refusals or a state folder."""
        try:
            found = self.store.refusals.list_active(self.clock.now_s()) if self.has_store else ()
        except StateError:
            return None
        return (lambda placement: any(each.covers(placement) for each in found)) if found else None

    def plan_pipeline(
        self, plans: Sequence[Plan], *, objective: Objective = "cost", deadline_hours: float | None = None
    ) -> PipelinePlan:
        """Place the tasks of a pipeline jointly, taking the catalog's egress prices into account."""
        from broker.pipelines.planner import plan_pipeline

        tasks, egress = [each.task for each in plans], self.book.read_egress()
        return plan_pipeline(tasks, plans, egress, objective=objective, deadline_hours=deadline_hours)


def load_entry(path: str) -> Any:
    """Import a registry entry, `module:attribute`."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)
