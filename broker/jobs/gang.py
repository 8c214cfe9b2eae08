"""What the controller needs of the runtime's Gang, as a Protocol, so that a simulation can stand in for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from broker.types import Cluster, Progress, RunStatus, Task


class GangReport(Protocol):
    @property
    def status(self) -> RunStatus: ...
    @property
    def returncode(self) -> int | None: ...
    @property
    def unreachable(self) -> tuple[int, ...]: ...
    @property
    def progress(self) -> Progress | None: ...
    @property
    def reason(self) -> str: ...


class Gang(Protocol):
    """`prepare`, `start`, `cancel` and `read_log` raise TransientError for a node that does not answer."""

    async def prepare(self, cluster: Cluster, task: Task) -> None: ...

    async def start(
        self, cluster: Cluster, task: Task, *, run_id: int, envs: Mapping[str, str], lease_s: float | None = None
    ) -> None: ...

    async def poll(self, cluster: Cluster, run_id: int) -> GangReport: ...

    async def cancel(self, cluster: Cluster, run_id: int) -> None: ...

    async def read_log(self, cluster: Cluster, run_id: int, *, offset: int) -> tuple[bytes, int]: ...

    async def renew_lease(self, cluster: Cluster, *, lease_s: float) -> None: ...
