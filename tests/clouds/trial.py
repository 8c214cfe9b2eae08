"""`broker check --live` against a fake of a cloud, and again against the recording of the first run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from broker.clouds.base import CanObserve, Cloud
from broker.clouds.tape import Scrubber, Tape
from broker.errors import TransientError, UnreachedError
from broker.provision.lifecycle import Provisioner
from broker.provision.trial import MARK, Step, StepOutcome, Trial
from broker.runtime.reports import GangReport
from broker.state.store import Store
from broker.types import Cluster, Estimate, Placement, Plan, RunStatus, Task
from tests.clouds.beds import OWNER, Bed, count_living
from tests.testbed.replay import read_tape, serve


class PaperGang:
    """Answers for an imaginary node: every submitted run has succeeded, with the output of the check's command."""

    def __init__(self, *, status: RunStatus = RunStatus.SUCCEEDED, failure: TransientError | None = None) -> None:
        self.status, self.failure = status, failure
        self.calls: list[str] = []

    async def prepare(self, cluster: Cluster, task: Task) -> None:
        self.calls.append("prepare")
        if self.failure is not None:
            raise self.failure

    async def set_autostop(self, cluster: Cluster, autostop: Any) -> None:
        assert autostop is not None and autostop.is_down, "the node must end itself should the check's machine die"

    async def start(self, cluster: Cluster, task: Task, *, run_id: int, envs: Any) -> None:
        self.calls.append("start")

    async def poll(self, cluster: Cluster, run_id: int) -> GangReport:
        code = 0 if self.status is RunStatus.SUCCEEDED else 3
        return GangReport(
            status=self.status, returncode=code, statuses=(self.status,), unreachable=(), progress=None, run_id=run_id
        )

    async def read_log(self, cluster: Cluster, run_id: int, *, offset: int) -> tuple[bytes, int]:
        log = f"{MARK}\nLinux 6.8.0\nPython 3.12.3\n".encode()
        return log, len(log)


class World:
    """A trial on one zone of a bed."""

    def __init__(self, bed: Bed, folder: Path, gang: PaperGang | None = None) -> None:
        self.bed, self.gang = bed, gang or PaperGang()
        self.store = Store(folder / "state.db", clock=bed.clock)
        self.reported: list[Step] = []

    def play(self, cloud: Cloud, *, is_spot: bool = True, spend_usd_max: float = 100.0) -> list[tuple[str, str]]:
        trial = self.make_trial(cloud, is_spot=is_spot, spend_usd_max=spend_usd_max)

        async def act() -> None:
            await trial.run()

        self.bed.run(act())
        assert self.reported == trial.steps
        return [(step.name, step.outcome.value) for step in trial.steps]

    def make_trial(self, cloud: Cloud, *, is_spot: bool = True, spend_usd_max: float = 100.0) -> Trial:
        plan = Plan(
            task=Task(num_nodes=1, run="true"),
            estimates=(Estimate(placement=Placement(offer=self.bed.offer, is_spot=is_spot, node_count=1)),),
            rejections=(), prices_as_of="", reason="",
        )  # fmt: skip
        provisioner = Provisioner(
            {cloud.name: cloud},
            self.store,
            clock=self.bed.clock,
            owner=OWNER,
            write_boot="#!/bin/sh\n# {0.token}\n".format,
        )
        return Trial(
            f"{MARK}-{OWNER[:4]}", plan, cloud, provisioner=provisioner, gang=self.gang, store=self.store,  # type: ignore[arg-type]
            clock=self.bed.clock, owner=OWNER, spend_usd_max=spend_usd_max, on_step=self.reported.append,
        )  # fmt: skip

    def check_nothing_left(self) -> None:
        async def act() -> None:
            assert await count_living(self.bed) == 0
            assert not self.store.intents.list_open() and not self.store.clusters.list()

        self.bed.run(act())


class TrialSuite:
    """Inherit, and provide a fixture `bed`, and `reopen_at`: the adapter with another endpoint."""

    private: Sequence[str] = ()  # must not be in a recording

    def reopen_at(self, bed: Bed, url: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Cloud:
        raise NotImplementedError

    def test_each_step_is_reported_and_nothing_is_left(self, bed: Bed, tmp_path: Path) -> None:
        world = World(bed, tmp_path)
        assert world.play(bed.reopen()) == [
            ("login", "ok"), ("bucket", "skipped"), ("create", "ok"), ("connect", "ok"), ("run", "ok"),
            ("bucket from the node", "skipped"), ("stop", "skipped"), ("terminate", "ok"), ("leaks", "ok"),
        ]  # fmt: skip
        world.check_nothing_left()

    def test_an_on_demand_node_can_be_stopped_and_started(self, bed: Bed, tmp_path: Path) -> None:
        world = World(bed, tmp_path)
        assert ("stop", "ok") in world.play(bed.reopen(), is_spot=False)
        world.check_nothing_left()

    def test_a_full_zone_fails_the_first_paid_step_and_nothing_is_left(self, bed: Bed, tmp_path: Path) -> None:
        bed.fill()
        world = World(bed, tmp_path)
        outcomes = dict(world.play(bed.reopen()))
        assert (outcomes["create"], outcomes["run"], outcomes["terminate"]) == ("failed", "skipped", "skipped")
        world.check_nothing_left()

    def test_an_unreachable_node_is_terminated(self, bed: Bed, tmp_path: Path) -> None:
        world = World(bed, tmp_path, PaperGang(failure=UnreachedError("ssh: no route", node_id="n")))
        outcomes = dict(world.play(bed.reopen()))
        assert (outcomes["connect"], outcomes["run"], outcomes["terminate"]) == ("failed", "skipped", "ok")
        assert next(step for step in world.reported if step.outcome is StepOutcome.FAILED).note == "ssh: no route"
        world.check_nothing_left()

    def test_the_spending_limit_ends_the_trial(self, bed: Bed, tmp_path: Path) -> None:
        world = World(bed, tmp_path, PaperGang(failure=TransientError("still booting")))
        outcomes = dict(world.play(bed.reopen(), spend_usd_max=0.01))
        assert outcomes["terminate"] == "ok" and "failed" in outcomes.values()
        assert any("spending limit" in step.note for step in world.reported)
        assert 0.01 <= world.reported[-1].spent_usd < 1.0
        world.check_nothing_left()

    def test_an_interrupted_trial_ends_its_node(self, bed: Bed, tmp_path: Path) -> None:
        world = World(bed, tmp_path)
        trial = world.make_trial(bed.reopen())

        async def act() -> None:
            playing = asyncio.ensure_future(trial.run())
            world.gang.prepare = interrupt(playing)  # type: ignore[method-assign]
            await asyncio.wait([playing])
            assert playing.cancelled()

        bed.run(act())
        assert ("terminate", StepOutcome.OK) in [(step.name, step.outcome) for step in trial.steps]
        world.check_nothing_left()

    def test_a_recording_has_nothing_private_and_can_be_replayed(
        self, bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file, (first, second) = tmp_path / "tape.jsonl", (tmp_path / "1", tmp_path / "2")
        for folder in (first, second):
            folder.mkdir()
        cloud = bed.reopen()
        assert isinstance(cloud, CanObserve)
        tape = Tape(file, Scrubber({OWNER: OWNER}))
        cloud.observe(tape.add_exchange)
        recorded = World(bed, first).play(cloud)
        tape.close()
        text = file.read_text()
        assert tape.count == len(read_tape(file)) > 5
        assert [each for each in (*self.private, "#!/bin/sh") if each in text] == []
        with serve(read_tape(file)) as (url, missing):
            replayed = World(bed, second).play(self.reopen_at(bed, url, monkeypatch, second))
        assert missing == []
        assert replayed == recorded


def interrupt(playing: asyncio.Future[Any]) -> Callable[..., Any]:
    """Stands for a call during which Ctrl-C is pressed."""

    async def press(*_: Any) -> None:
        playing.cancel()
        await asyncio.sleep(0)

    return press
