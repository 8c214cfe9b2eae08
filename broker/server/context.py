"""The context of one request: its own store connection, the clouds that the operator allows, and its own clock."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from broker.app.consoles import Console
from broker.app.container import Context
from broker.app.lazy_clouds import LazyClouds
from broker.app.limits import LaunchSize, admit
from broker.clock import SystemClock
from broker.errors import DeniedError, UsageError
from broker.frozen import frozen
from broker.server.authorisation import check_owner, is_in_use
from broker.state.people import Owned, Role
from broker.types import Payee

if TYPE_CHECKING:
    from broker.clouds.base import Cloud
    from broker.server.proxy import TrustedProxy
    from broker.state.people import Token
    from broker.types import Cluster, Estimate, Job, Task

T = TypeVar("T")
LOCAL = "local"


class DisconnectedError(Exception):
    """The client of a reading verb has disconnected."""


class RequestClock(SystemClock):
    """A clock whose sleeps end once the client of a request has disconnected."""

    def __init__(self, gone: threading.Event) -> None:
        self._gone = gone

    async def sleep(self, duration_s: float) -> None:
        """Wait in real time. Raises DisconnectedError if the client has disconnected."""
        if self._gone.is_set():
            raise DisconnectedError
        await super().sleep(duration_s)


class Interruption:
    """Cancels the work of a verb in its event loop, from another thread: the equivalent of Ctrl-C on a server."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_interrupted = False
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[object]] | None = None

    def interrupt(self) -> None:
        """Cancel the running call, and any that starts later; callable from any thread."""
        with self._lock:
            self._is_interrupted = True
            if self._running is not None:
                loop, task = self._running
                loop.call_soon_threadsafe(task.cancel)

    def check(self) -> None:
        """Raise CancelledError after an interruption."""
        if self._is_interrupted:
            raise asyncio.CancelledError

    async def guard(self, work: Coroutine[object, object, T]) -> T:
        """Await `work` so that `interrupt` cancels it, even if the interrupt came first. Raises CancelledError."""
        task = asyncio.current_task()
        assert task is not None
        with self._lock:
            if self._is_interrupted:
                work.close()
                raise asyncio.CancelledError
            self._running = (asyncio.get_running_loop(), task)
        try:
            return await work
        finally:
            with self._lock:
                self._running = None


@frozen
class Policy:
    """The operator's choices: the process that runs the controllers, and whether tasks may run on the server itself."""

    has_controller: bool = True
    has_local_cloud: bool = False
    proxy: TrustedProxy | None = None


class ServerContext(Context):
    """A context in the thread of one request."""

    def __init__(
        self,
        home: Path | None,
        *,
        policy: Policy,
        on_note: Callable[[str], None] = lambda text: None,
        gone: threading.Event | None = None,
        interruption: Interruption | None = None,
        console: Console | None = None,
        token: Token | None = None,
    ) -> None:
        super().__init__(home, on_note=on_note)
        self._policy = policy
        self._interruption = interruption or Interruption()
        self.console = console or Console()
        self._token = token
        self.is_administrator = token is None or token.role is Role.ADMIN
        self._commitment: int | None = None
        self._kind = Owned.JOB
        self._names: tuple[str, ...] = ()
        if gone is not None:
            self.clock = RequestClock(gone)

    def admit(self, choices: Sequence[Estimate], demand: LaunchSize) -> None:
        """Reserve the resources that a launch of this context's user may use. Raises LimitError."""
        if self._token is not None:
            token = self._token
            if demand.kind is not Owned.JOB:
                for name in demand.names[:1]:  # before its reservation is replaced
                    self.check_owner(demand.kind, name)
            self._commitment = admit(self.store, choices, demand, user=token.user, project=token.project)
            self._kind, self._names = demand.kind, demand.names

    @property
    def payee(self) -> Payee:
        """The user and project of this request."""
        return Payee() if self._token is None else Payee(user=self._token.user, project=self._token.project)

    def check_notify(self, tasks: Sequence[Task]) -> None:
        """Refuse settings that would act as the server's own user, as the local cloud does.

        These are commands, and pods that choose their own accounts and volumes.
        """
        if not self._policy.has_local_cloud and any(each.pod_config for each in tasks):
            raise UsageError(
                "`pod_config` would use the server's own access to Kubernetes, which this server does not allow",
                hints=["remove `pod_config`; the server's operator sets volumes and tolerations in `kubernetes.yaml`"],
            )
        if not self._policy.has_local_cloud and any(each.event_callback for each in tasks):
            raise UsageError(
                "`event_callback` would run on the server's machine as the server's own user, which this server "
                "does not allow",
                hints=["use `notify: {webhook: https://...}`, or remove `event_callback`"],
            )
        super().check_notify(tasks)
        self._check_webhooks(tasks)

    def _check_webhooks(self, tasks: Sequence[Task]) -> None:
        """Refuse at once what the daemon would refuse when it sends a notification (decision 0437)."""
        urls = [
            url for each in tasks if each.notify is not None for url in (each.notify.webhook, each.notify.slack) if url
        ]  # fmt: skip
        if urls:
            from broker.notify.posting import check_host
            from broker.notify.settings import read_settings

            allowed = read_settings(self.config).allowed_networks
            for url in urls:
                check_host(url, allowed=allowed)

    def check_owner(self, kind: Owned, name: str) -> None:
        """Raise DeniedError if this belongs to another user; administrators may change everything."""
        if self._token is not None and not self.is_administrator:
            check_owner(self.store, kind, name, user=self._token.user)

    def check_shell(self, cluster: Cluster) -> None:
        """Refuse a shell of the server's own user, as for the local cloud."""
        if not self._policy.has_local_cloud and cluster.placement.offer.cloud == LOCAL:
            raise UsageError(
                f"cluster `{cluster.name}` runs on the server's machine as the server's own user",
                hints=["use `broker ssh` on that machine"],
            )

    def check_requests(self, request_ids: Iterable[str]) -> None:
        """Raise DeniedError if one of these request IDs is of another user's job."""
        if self._token is None or self.is_administrator:
            return
        for request_id in request_ids:
            job = self.store.jobs.find_request(request_id)
            if job is not None and self.store.owners.get(Owned.JOB, str(job.id)) != self._token.user:
                raise DeniedError(
                    f"the request ID `{request_id}` was used by another user, for job {job.id}",
                    hints=["choose another one, for example with your name in it"],
                )

    def own(self, kind: Owned, name: str) -> None:
        """Record the owner of a cluster or service that does not exist yet. Raises DeniedError for another user's."""
        if self._token is None:
            return
        with self.store.transaction():
            self.check_owner(kind, name)
            if not is_in_use(self.store, kind, name):
                self.store.owners.put(kind, name, self._token.user)

    def own_jobs(self, jobs: Sequence[Job]) -> None:
        """Record the owner and project of jobs as they are added: the limit of a project counts them at once."""
        if self._token is None:
            return
        new = [job for job in jobs if self.store.owners.get(Owned.JOB, str(job.id)) is None]
        for job in new:
            self.store.owners.put(Owned.JOB, str(job.id), self._token.user)
        if new and self._kind is Owned.JOB:  # the others count in the launch that submitted them
            self.bind(tuple(dict.fromkeys((*self._names, *(str(each.id) for each in new)))))

    def bind(self, names: Sequence[str]) -> None:
        """Record the jobs or the service started by the admitted launch."""
        if self._commitment is not None and tuple(names) != self._names:
            self._names = tuple(names)
            self.store.commitments.bind(self._commitment, names)

    def settle(self) -> None:
        """Record that the launch has ended, so that only the resources that it has started count."""
        if self._commitment is not None:
            self.store.commitments.settle(self._commitment)

    async def run_paid(self, work: Coroutine[object, object, T]) -> T:
        """Await `work` until it ends or the client interrupts it."""
        return await self._interruption.guard(work)

    @cached_property
    def clouds(self) -> Mapping[str, Cloud]:
        """The clouds that are set up here. Programs on the local cloud would run as the server's own user."""
        found = super().clouds
        if self._policy.has_local_cloud:
            return found
        from broker.clouds import CLOUDS

        return LazyClouds([name for name in CLOUDS if name != LOCAL], found.get)

    def ensure_daemon(self) -> None:
        """Start the controllers unless they run elsewhere, started by `broker server controller`."""
        if self._policy.has_controller:
            super().ensure_daemon()
