"""A trial launch on a real account within a spending limit: every step of a cluster's life cycle, in order.

Create, connect, run a command, write to a bucket, stop and start, terminate, check for leaks. The last two always run,
even after a failure or an interruption. The cluster is recorded like any other, so that `broker down` and `broker gc`
find the nodes of a killed trial.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any, TypeVar

from broker.agent.agent_bucket import SCHEMES, name_log, name_outcome
from broker.clock import Clock
from broker.clouds.base import CanStop, Cloud, HasAccounts, ProvidesSshHosts
from broker.errors import BrokerError, RunFailedError, TransientError, UnreachedError
from broker.formatting import format_usd
from broker.frozen import frozen
from broker.provision.launch import describe
from broker.provision.lifecycle import Provisioner
from broker.runtime.gang import Gang
from broker.state.store import Store
from broker.storage import open_bucket
from broker.types import Autostop, Cluster, Estimate, NodeState, Plan, RunStatus

MARK = "broker-check"
PROGRAM = f"echo {MARK}; uname -srm; python3 --version; nvidia-smi -L 2>/dev/null || true"
RUN_ID = 1
CONNECT_S_MAX = 900.0  # large GPU images take minutes to boot
RUN_S_MAX = 300.0
BUCKET_S_MAX = 180.0  # after a refusal, the node retries with a growing backoff
POLL_S = 1.0
IDLE_MINUTES = 10  # after which the node terminates itself if this machine dies

Result = TypeVar("Result")


class StepOutcome(StrEnum):
    """The outcome of one step of a trial."""

    OK = "ok"
    FAILED = "failed"
    SKIPPED = "skipped"


@frozen
class Step:
    """One step of a trial. `spent_usd`: cost of the trial at the end of the step."""

    name: str
    outcome: StepOutcome
    note: str
    took_s: float
    spent_usd: float
    hints: tuple[str, ...] = ()


class Skip(Exception):
    """Raised if the step does not apply; the message gives the reason."""


class SpendingLimitReached(Exception):
    """Raised once the trial has reached its spending limit."""


class Trial:
    """Bring one node up and take it down, as cluster `name`. `plan` lists the placements to try, cheapest first."""

    def __init__(
        self,
        name: str,
        plan: Plan,
        cloud: Cloud,
        *,
        provisioner: Provisioner,
        gang: Gang,
        store: Store,
        clock: Clock,
        owner: str,
        spend_usd_max: float,
        bucket_url: str = "",
        on_step: Callable[[Step], None] = lambda step: None,
    ) -> None:
        self._name, self._plan, self._cloud = name, plan, cloud
        self._provisioner, self._gang, self._store = provisioner, gang, store
        self._clock, self._owner, self._on_step = clock, owner, on_step
        self._spend_usd_max = spend_usd_max
        self._folder = f"{bucket_url.rstrip('/')}/{owner}-{MARK}-{uuid.uuid4().hex[:8]}" if bucket_url else ""
        self._cluster: Cluster | None = None
        self._begun_usd = store.bills.spend_usd(
            cluster=name, now_s=clock.now_s()
        )  # earlier trials have used the same name
        self._failed = ""  # name of the first failed step
        self.steps: list[Step] = []

    async def run(self) -> Sequence[Step]:
        """Run all steps in order. A failed step is reported, not raised; steps that depend on it are skipped."""
        try:
            await self._run_step("login", self._log_in)
            await self._run_step("bucket", self._write_from_here)  # before any money is spent
            await self._run_step("create", self._create)
            await self._run_step("connect", self._connect)
            await self._run_step("run", self._run)
            await self._run_step("bucket from the node", self._write_from_node)
            await self._run_step("stop", self._stop)
        finally:
            await self._run_step("terminate", self._terminate, is_last=True)
            await self._run_step("leaks", self._find_leaks, is_last=True)
        return self.steps

    async def _run_step(
        self, name: str, work: Callable[[], Coroutine[Any, Any, str]], *, is_last: bool = False
    ) -> None:
        """Run one step. `is_last`: run it even after a failure, without the spending limit."""
        begun_s = self._clock.now_s()
        outcome, note, hints = StepOutcome.OK, "", tuple[str, ...]()
        try:
            if self._failed and not is_last:
                raise Skip(f"`{self._failed}` failed")
            note = await (work() if is_last else self._within_limit(work()))
        except Skip as reason:
            outcome, note = StepOutcome.SKIPPED, str(reason)
        except SpendingLimitReached:
            outcome, note = (
                StepOutcome.FAILED,
                f"the spending limit of {format_usd(self._spend_usd_max)} USD is reached",
            )
            hints = ("`--spend USD` raises the limit",)
        except BrokerError as error:
            outcome, note = StepOutcome.FAILED, "; ".join([error.message, *error.details])
            hints = error.hints
        if outcome is StepOutcome.FAILED:
            self._failed = self._failed or name
        now_s = self._clock.now_s()
        spent_usd = self._measure_spend_usd()
        step = Step(name=name, outcome=outcome, note=note, took_s=now_s - begun_s, spent_usd=spent_usd, hints=hints)
        self.steps.append(step)
        self._on_step(step)

    async def _within_limit(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Return the result of the work. At the spending limit, cancel it and raise SpendingLimitReached."""
        doing = asyncio.ensure_future(work)
        watching = asyncio.ensure_future(self._wait_until_overspent())
        try:
            await asyncio.wait({doing, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                raise SpendingLimitReached
            return doing.result()
        finally:
            doing.cancel()
            watching.cancel()
            await asyncio.gather(doing, watching, return_exceptions=True)

    async def _wait_until_overspent(self) -> None:
        while self._measure_spend_usd() < self._spend_usd_max:
            await self._clock.sleep(POLL_S)

    def _measure_spend_usd(self) -> float:
        return self._store.bills.spend_usd(cluster=self._name, now_s=self._clock.now_s()) - self._begun_usd

    async def _log_in(self) -> str:
        await self._cloud.check()
        account = await self._cloud.find_account() if isinstance(self._cloud, HasAccounts) else ""
        return f"account {account}" if account else "accepted"

    async def _write_from_here(self) -> str:
        if not self._folder:
            raise Skip("no bucket given: pass `--bucket s3://BUCKET/FOLDER`")
        content = uuid.uuid4().hex.encode()

        def write_and_read() -> bytes | None:
            bucket = open_bucket(self._folder)
            bucket.write("from-here", content)
            try:
                return bucket.read("from-here")
            finally:
                bucket.delete("from-here")

        if await asyncio.to_thread(write_and_read) != content:
            raise TransientError(f"{self._folder} returned different content from what was written")
        return f"{self._folder}: written, read, deleted from this machine"

    async def _create(self) -> str:
        await self._provisioner.down(self._name)  # of an earlier, killed trial
        autostop = Autostop(idle_minutes=IDLE_MINUTES, is_down=True)
        self._cluster = await self._provisioner.up(self._name, self._plan, autostop=autostop)
        await self._provisioner.finish()
        (node,) = self._cluster.nodes
        return f"{describe(self._cluster.placement)}: node {node.id}"

    async def _connect(self) -> str:
        """Install the agent on the node once the node can be reached."""
        cluster = self._get_cluster()
        give_up_s = self._clock.now_s() + CONNECT_S_MAX
        while True:
            try:
                await self._gang.prepare(cluster, self._plan.task)
                break
            except TransientError as error:
                cluster = self._cluster = await self._provisioner.refresh(cluster)
                if cluster.nodes[0].state is NodeState.TERMINATED:
                    raise TransientError(f"the node ended while it booted: {cluster.nodes[0].reason}") from error
                if self._clock.now_s() >= give_up_s:
                    console = self._provisioner.hint_console(cluster, cluster.nodes[0].id)
                    raise TransientError(
                        error.message, hints=(*([console] if console else ()), *error.hints)
                    ) from error
                await self._clock.sleep(POLL_S * (3 if isinstance(error, UnreachedError) else 1))
        await self._gang.set_autostop(cluster, cluster.autostop)
        return f"the agent runs on {cluster.nodes[0].address}"

    async def _run(self) -> str:
        cluster = self._get_cluster()
        envs = {"BROKER_CHECKPOINT_DIR": self._folder, "BROKER_ATTEMPT": "1"} if self._folder else {}
        await self._gang.start(cluster, self._plan.task, run_id=RUN_ID, envs=envs)

        async def has_ended() -> bool:
            return (await self._gang.poll(cluster, RUN_ID)).status.is_terminal

        if not await self._wait_until(has_ended, RUN_S_MAX):
            raise TransientError(f"the command has not ended after {RUN_S_MAX:g} s")
        report = await self._gang.poll(cluster, RUN_ID)
        log, _ = await self._gang.read_log(cluster, RUN_ID, offset=0)
        lines = [line.strip() for line in log.decode(errors="replace").splitlines() if line.strip()]
        if report.status is not RunStatus.SUCCEEDED:
            last = f": {lines[-1]}" if lines else ""
            raise RunFailedError(
                f"the command ended with status {report.status.value}{last}", returncode=report.returncode or 1
            )
        if MARK not in " ".join(lines):
            raise TransientError("the command ran, but its output was not received")
        return ", ".join(line.rpartition(") ")[2] for line in lines if not line.endswith(MARK)) or "output received"

    async def _write_from_node(self) -> str:
        """Read and delete the outcome and the log of the run, which the node's agent writes to the bucket."""
        if not self._folder:
            raise Skip("no bucket given")
        if not self._folder.startswith(SCHEMES):
            raise Skip(f"nodes only write to {', '.join(SCHEMES)}")
        bucket = open_bucket(self._folder)
        keys = (name_outcome(1), name_log(1))

        async def has_arrived() -> bool:
            contents = await asyncio.to_thread(lambda: [bucket.read(key) for key in keys])
            return all(content is not None for content in contents)

        try:
            if not await self._wait_until(has_arrived, BUCKET_S_MAX):
                raise TransientError(
                    f"the node wrote nothing to {self._folder} within {BUCKET_S_MAX:g} s",
                    hints=("allow the node's own login (its role or service account) to write there",),
                )
        finally:
            for key in keys:
                await asyncio.to_thread(bucket.delete, key)
        return "written by the node, read and deleted from this machine"

    async def _stop(self) -> str:
        cluster = self._get_cluster()
        if not isinstance(self._cloud, CanStop):
            raise Skip(f"{self._cloud.name} cannot stop nodes")
        if cluster.placement.is_spot and isinstance(self._cloud, ProvidesSshHosts):
            raise Skip("a spot node cannot be stopped; use `--on-demand` to try this step")
        await self._provisioner.stop(self._name)
        stopped_s = self._clock.now_s()
        self._cluster = await self._provisioner.start(self._name)
        return f"stopped, and up again after {self._clock.now_s() - stopped_s:.0f} s"

    async def _terminate(self) -> str:
        if self._store.clusters.get(self._name) is None and not self._store.intents.list_open(self._name):
            raise Skip("nothing was created")
        try:
            await self._provisioner.down(self._name)
        except BrokerError as error:
            error.hints = (f"the node may still cost money: try again with `broker down {self._name}`", *error.hints)
            raise
        return "the cloud confirmed that the node is gone"

    async def _find_leaks(self) -> str:
        swept = await self._provisioner.sweep()
        listed = await self._cloud.list_nodes(self._owner)
        left = [node.id for node in listed if node.cluster == self._name and node.state is not NodeState.TERMINATED]
        if left:
            raise TransientError(
                f"nodes remain: {', '.join(left)}", hints=(f"`broker down {self._name}`", "`broker gc`")
            )
        result = f"no nodes remain; {swept} other resources deleted" if swept else "nothing remains"
        return f"{result}; no answer from {', '.join(sorted(listed.unseen))}" if listed.unseen else result

    async def _wait_until(self, condition: Callable[[], Awaitable[bool]], limit_s: float) -> bool:
        give_up_s = self._clock.now_s() + limit_s
        while not await condition():
            if self._clock.now_s() >= give_up_s:
                return False
            await self._clock.sleep(POLL_S)
        return True

    def _get_cluster(self) -> Cluster:
        assert self._cluster is not None, "steps that need the node follow its creation"
        return self._cluster


def choose_places(plan: Plan, *, per_region: int, usd_hour_max: float) -> Plan:
    """Return the plan with the `per_region` cheapest placements of each region, one of each region before a second.

    An account cannot use every region: AWS enables some only on request, and they are among the cheapest. Placements
    above `usd_hour_max` are left out; there may be none left.
    """
    rounds: list[list[Estimate]] = [[] for _ in range(per_region)]
    counts: Counter[str] = Counter()
    for estimate in plan.estimates:
        region = estimate.placement.offer.region
        if counts[region] < per_region and estimate.placement.usd_hour <= usd_hour_max:
            rounds[counts[region]].append(estimate)
            counts[region] += 1
    return replace(plan, estimates=tuple(estimate for each in rounds for estimate in each))
