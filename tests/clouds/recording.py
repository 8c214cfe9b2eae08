"""`broker traces record` on a live cloud: one suite, run on each fake."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from broker.errors import AuthError, QuotaError
from broker.lab.recording import Recorder
from broker.lab.traces import Trace, parse_trace
from broker.provision.lifecycle import Provisioner
from broker.state.store import Store
from broker.types import Estimate, Node, NodeRequest, Placement, Plan, Task
from tests.clouds.beds import OWNER, Bed, count_living

EVERY_S = 600.0
ROOM, NO_ROOM = 64, 0


class RecordingSuite:
    """Inherit, and provide a fixture `bed`."""

    def test_only_the_capacity_at_each_observation_is_recorded(self, bed: Bed, tmp_path: Path) -> None:
        world = World(bed, tmp_path)
        trace = world.record([ROOM, NO_ROOM, NO_ROOM, ROOM])
        assert trace.counts == (2, 0, 0, 2)
        assert (trace.gang, trace.gap_hours) == (2, EVERY_S / 3600)
        assert (trace.prices, trace.ondemand_usd_hour) == ((bed.offer.spot_usd_hour,) * 4, bed.offer.ondemand_usd_hour)
        world.check_nothing_left()

    def test_an_interrupted_check_leaves_no_machine(
        self, bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        world = World(bed, tmp_path)
        create = world.cloud.create_nodes

        async def act() -> None:
            recording = asyncio.ensure_future(world.make_recorder(world.messages.append).run(1))

            async def create_and_interrupt(request: NodeRequest) -> Sequence[Node]:
                nodes = await create(request)
                recording.cancel()
                return nodes

            monkeypatch.setattr(world.cloud, "create_nodes", create_and_interrupt)
            await asyncio.wait([recording])
            assert recording.cancelled()

        world.run(act())
        assert world.list_files() == []
        world.check_nothing_left()

    def test_a_quota_error_is_reported_and_not_recorded_as_a_full_zone(self, bed: Bed, tmp_path: Path) -> None:
        world = World(bed, tmp_path)
        bed.exhaust_quota()
        with pytest.raises(QuotaError):
            world.record([ROOM])
        assert world.list_files() == []
        world.check_nothing_left()

    def test_an_expired_login_ends_the_recording_and_keeps_its_data(self, bed: Bed, tmp_path: Path) -> None:
        world = World(bed, tmp_path)
        with pytest.raises(AuthError):
            world.record([ROOM, bed.log_out])
        assert world.read().counts == (2,)

    def test_nodes_of_a_killed_recording_are_terminated_first(self, bed: Bed, tmp_path: Path) -> None:
        world = World(bed, tmp_path)

        async def act() -> None:
            await world.provisioner.up(f"broker-trace-{OWNER[:4]}-0", world.plan)

        world.run(act())
        assert world.record([ROOM]).counts == (2,)
        world.check_nothing_left()


class World:
    """One zone, recorded by periodic looks; before each of them an event may happen."""

    def __init__(self, bed: Bed, folder: Path) -> None:
        self.bed, self.out = bed, folder / "recorded"
        self.out.mkdir()
        self.messages = list[str]()
        placement = Placement(offer=bed.offer, is_spot=True, node_count=2)
        self.plan = Plan(
            task=Task(num_nodes=2),
            estimates=(Estimate(placement=placement),),
            rejections=(),
            prices_as_of="",
            reason="",
        )
        self.store = Store(folder / "state.db", clock=bed.clock)
        self.cloud = bed.reopen()
        self.provisioner = Provisioner(
            {self.cloud.name: self.cloud},
            self.store,
            clock=bed.clock,
            owner=OWNER,
            write_boot="#!/bin/sh\n# {0.token}\n".format,
        )

    def record(self, looks: Sequence[int | Callable[[], None]]) -> Trace:
        """Record one look for each item: a number of machines left in the zone, or an event."""
        coming = iter(looks)

        def note_message(text: str) -> None:
            self.messages.append(text)
            if text.startswith("sample"):
                self._bring_about(next(coming, ROOM))

        self._bring_about(next(coming))
        self.run(self.make_recorder(note_message).run(len(looks)))
        return self.read()

    def _bring_about(self, what: int | Callable[[], None]) -> None:
        if isinstance(what, int):
            self.bed.leave_room(what)
        else:
            what()

    def make_recorder(self, on_message: Callable[[str], None]) -> Recorder:
        return Recorder(
            self.provisioner, self.plan, self.plan.estimates, clock=self.bed.clock, owner=OWNER, out=self.out,
            every_s=EVERY_S, on_message=on_message,
        )  # fmt: skip

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self.bed.run(work)

    def read(self) -> Trace:
        (file,) = self.list_files()
        return parse_trace(file.read_bytes(), file.stem)

    def list_files(self) -> list[Path]:
        return sorted(self.out.iterdir())

    def check_nothing_left(self) -> None:
        async def act() -> None:
            assert await count_living(self.bed) == 0
            assert not self.store.intents.list_open()

        self.run(act())
