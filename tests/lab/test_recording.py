"""Recording a spot market: each observation with its time, in a file that is complete at any moment."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.errors import AuthError, CapacityError, ThrottledError, TransientError, UsageError
from broker.lab.recording import Recorder, check_folder
from broker.provision.bring_up import lock_name
from broker.types import Estimate, Placement, Plan, Task
from tests.simulation.world import make_offer
from tests.state.samples import START_S, Hands

OFFER = replace(make_offer("east1a"), spot_usd_hour=2.0, ondemand_usd_hour=6.0)
FULL, UNCLEAR = CapacityError("full"), ThrottledError("slow down")


def fail(cause: Exception) -> CapacityError:
    """Return the error of a search in which no place granted the nodes, with its cause."""
    error = CapacityError("no place gave the nodes")
    error.__cause__ = cause
    return error


class Provisioner:
    """Gives each request for a zone the next of its answers; None grants the nodes."""

    def __init__(self, **answers: list[Exception | None]) -> None:
        self.answers = answers
        self.up_now: set[str] = set()
        self.downs: list[str] = []
        self.failing_downs = 0

    async def up(self, name: str, plan: Plan) -> None:
        assert name not in self.up_now and len(plan.estimates) == 1
        zone = plan.estimates[0].placement.offer.zone or ""
        self.up_now.add(name)
        answer = self.answers[zone].pop(0)
        if answer is not None:
            raise fail(answer)

    async def down(self, name: str) -> None:
        self.downs.append(name)
        if self.failing_downs:
            self.failing_downs -= 1
            raise TransientError("not now")
        self.up_now.discard(name)


class Stage:
    def __init__(self, folder: Path, provisioner: Provisioner, *zones: str, every_s: float = 600.0) -> None:
        self.folder, self.clock, self.messages = folder, Hands(), list[str]()
        self.provisioner = provisioner
        chosen = tuple(
            Estimate(placement=Placement(offer=replace(OFFER, zone=zone), is_spot=True, node_count=2)) for zone in zones
        )
        task = Task(num_nodes=2)
        plan = Plan(task=task, estimates=chosen, rejections=(), prices_as_of="", reason="")
        recorded_by: Any = provisioner
        self.recorder = Recorder(
            recorded_by, plan, chosen, clock=self.clock, owner="owner-1", out=folder, every_s=every_s,
            on_message=self.messages.append,
        )  # fmt: skip

    def run(self, ticks: int) -> None:
        asyncio.run(self.recorder.run(ticks))

    def read(self, zone: str) -> Any:
        return json.loads((self.folder / f"simulated-{zone}-{OFFER.instance_type}.json").read_text())


def test_each_place_has_a_file_with_its_samples(tmp_path: Path) -> None:
    provisioner = Provisioner(a=[None, FULL, None], b=[FULL, FULL, None])
    stage = Stage(tmp_path, provisioner, "a", "b")
    stage.run(3)
    assert stage.read("a") == {
        "metadata": {"gap_seconds": 600.0, "gang": 2, "on_demand_price": 6.0, "started_s": START_S},
        "data": [2, 0, 2],
        "prices": [2.0, 2.0, 2.0],
    }
    assert stage.read("b")["data"] == [0, 0, 2]
    assert stage.messages == [
        f"sample {n} of 3: {given} of 2 locations have capacity" for n, given in ((1, 1), (2, 0), (3, 2))
    ]
    assert stage.clock.time_s == START_S + 2 * 600.0, "the first sample is immediate"
    assert not provisioner.up_now and len(provisioner.downs) == 12, "before each sample, too: the last run may be dead"
    assert set(provisioner.downs) == {"broker-trace-owne-0", "broker-trace-owne-1"}
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".json"]


def slow_down(stage: Stage, takes_s: float) -> None:
    """Let each observation take this long."""
    up = stage.provisioner.up

    async def up_slowly(name: str, plan: Plan) -> None:
        await stage.clock.sleep(takes_s)
        await up(name, plan)

    stage.provisioner.up = up_slowly  # type: ignore[method-assign]


def test_observations_keep_their_schedule_however_long_one_takes(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Provisioner(a=[None, None]), "a")
    slow_down(stage, 250.0)
    stage.run(2)
    assert stage.clock.time_s == START_S + 600.0 + 250.0


def test_observations_that_were_missed_repeat_the_previous_one(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Provisioner(a=[None, FULL, None]), "a")
    slow_down(stage, 1500.0)
    stage.run(6)
    assert stage.read("a")["data"] == [2, 2, 0, 0, 0, 2], "samples at 0, 1,500 and 3,000 s, ten minutes each"


def test_a_recording_is_not_replaced_by_another(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Provisioner(a=[None]), "a", "b")
    check_folder(tmp_path, stage.recorder._chosen[:1])
    stage.recorder._chosen = stage.recorder._chosen[:1]
    stage.run(1)
    with pytest.raises(UsageError, match="already exists"):
        check_folder(tmp_path, stage.recorder._chosen)


def test_an_unclear_observation_repeats_the_previous_one(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Provisioner(a=[UNCLEAR, None, UNCLEAR, FULL, UNCLEAR]), "a")
    stage.run(5)
    found = stage.read("a")
    assert found["data"] == [2, 2, 0, 0]
    assert found["metadata"]["started_s"] == START_S + 600.0, "it begins with the first clear answer"
    assert sum("no clear answer" in line for line in stage.messages) == 3


def test_a_permanent_error_ends_the_recording_and_keeps_its_data(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Provisioner(a=[None, AuthError("no login")]), "a")
    with pytest.raises(AuthError, match="no login"):
        stage.run(5)
    assert stage.read("a")["data"] == [2] and not stage.provisioner.up_now


def test_nodes_that_cannot_be_terminated_are_reported_and_terminated_before_the_next_observation(
    tmp_path: Path,
) -> None:
    provisioner = Provisioner(a=[None, None])
    stage = Stage(tmp_path, provisioner, "a")
    down = provisioner.down

    async def down_failing_once(name: str) -> None:
        if len(provisioner.downs) == 1:
            provisioner.failing_downs = 1
        await down(name)

    provisioner.down = down_failing_once  # type: ignore[method-assign]
    stage.run(2)
    assert stage.read("a")["data"] == [2, 2] and not provisioner.up_now
    assert any("broker down broker-trace-owne-0" in line for line in stage.messages)


def test_an_offer_without_a_spot_price_has_no_prices(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Provisioner(a=[None]), "a", every_s=0.0)
    priceless = replace(OFFER, zone="a", spot_usd_hour=None)
    stage.recorder._chosen = (
        Estimate(placement=Placement(offer=priceless, is_spot=True, node_count=2)),
    )  # fmt: skip
    stage.run(1)
    assert "prices" not in stage.read("a") and stage.read("a")["metadata"]["gap_seconds"] == 1.0


# -- one command at a time brings a name up -------------------------------------------------------------------------


def test_a_name_is_claimed_by_one_command_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "claims"
    with lock_name(folder, "a/b"):
        with pytest.raises(UsageError, match="a/b"), lock_name(folder, "a/b"):
            pass
        with lock_name(folder, "another"):
            pass
        with pytest.raises(UsageError), lock_name(folder, "a/b"):
            pass
    with lock_name(folder, "a/b"):
        assert folder.stat().st_mode & 0o777 == 0o700
    with pytest.raises(ValueError, match="inside"), lock_name(folder, "a/b"):
        raise ValueError("inside")
    with lock_name(folder, "a/b"):
        pass
