"""A simulated job has the machines, prices and times of its plan: without preemptions, both agree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.app.simulating import SimulatedJob, SimulationRequest, measure_job, set_scenes, simulate
from broker.errors import UsageError
from broker.lab.replay import replay
from broker.lab.traces import Trace, write_trace
from broker.spot.policies import load_policy
from broker.task.accelerators import resolve_accelerators
from broker.types import AcceleratorFigures, Offer, Plan, Task
from tests.optimizer.market import offer, plan, read

OPEN = Trace(name="open", gap_hours=1.0, counts=(1,) * 200)
OFFER = offer("elsewhere")  # bills starts in full
TEXT = "resources: {accelerators: H100:8}\ngoal: {work: 40h, deadline: %s}\ncheckpoint: {%s}"


FIGURES = {
    "A100": AcceleratorFigures(name="A100", memory_gib=40, bf16_dense_tflops=312, memory_bandwidth_gbs=1555),
    "H100": AcceleratorFigures(name="H100", memory_gib=80, bf16_dense_tflops=989, memory_bandwidth_gbs=3350),
}


class Planned:
    """Plans of the optimizer without a catalog."""

    def __init__(self, *offers: Offer) -> None:
        self.offers = list(offers) or [OFFER]
        self.notes: list[str] = []
        self.note = self.notes.append

    def resolve(self, task: Task) -> Task:
        return resolve_accelerators(task, FIGURES)

    def plan(self, task: Task) -> Plan:
        return plan(task, self.offers, figures=FIGURES)


def measure(checkpoint: str, deadline: str = "60h") -> SimulatedJob:
    context: Any = Planned()
    return measure_job(context, read(TEXT % (deadline, checkpoint)), [OPEN], None, 0.0)


@pytest.mark.parametrize("checkpoint", ["", "every: 30m, stall: 2m", "stall: 2m", "every: 30m, stall: 2m, restart: 1h"])
def test_on_demand_takes_as_long_and_costs_as_much_as_in_the_plan(checkpoint: str) -> None:
    job = measure(checkpoint)
    made = plan(TEXT % ("60h", checkpoint), [OFFER])
    alone = next(each for each in made.estimates if not each.placement.is_spot)
    assert job.ondemand_hours == pytest.approx(alone.expected_hours)
    (scene,) = set_scenes(job, [OPEN], 1, is_apart=False)
    found = replay(scene.case, load_policy("on-demand"))
    assert found.hours == pytest.approx(alone.expected_hours)
    assert alone.breakdown is not None
    unbilled_hours = (alone.breakdown.recovery_s - alone.breakdown.recovery_billed_s) / 3600  # replays bill it
    assert found.usd == pytest.approx((alone.expected_usd or 0.0) + unbilled_hours * alone.placement.usd_hour)


def test_on_demand_is_the_cheapest_that_the_job_would_continue_on() -> None:
    """Spot costs least at the one cloud, on-demand at another; own machines without a price may be busy."""
    cheap = offer("fjord", instance_type="8h", ondemand_usd_hour=25.0, spot_usd_hour=None)
    own = offer("ssh", ondemand_usd_hour=0.0, spot_usd_hour=None)
    context: Any = Planned(OFFER, cheap, own)
    job = measure_job(context, read(TEXT % ("60h", "") + "\nnum_nodes: 2"), [OPEN], None, 0.0)
    assert (job.ondemand_usd_hour, job.spot_usd_hour) == (50.0, 20.0)
    assert dict(job.list_facts())["prices"] == "50.00 on-demand (fjord 8h), 20.00 spot, USD/h"
    (scene,) = set_scenes(job, [OPEN], 1, is_apart=False)
    assert replay(scene.case, load_policy("on-demand")).usd == pytest.approx(50.0 * job.ondemand_hours)


def test_other_kinds_of_machines_have_their_own_price_on_demand() -> None:
    slow = {"accelerator": "A100", "accelerator_memory_gib": 40, "instance_type": "a"}
    context: Any = Planned(OFFER, offer("s", ondemand_usd_hour=9.0, spot_usd_hour=8.0, **slow))
    text = "resources: {accelerators: {A100:8, H100:8}}\ngoal: {work: {hours: 40, on: A100:8}, deadline: 60h}"
    job = measure_job(context, read(text), [OPEN], None, 0.0)
    assert {job.ondemand_usd_hour, *(each.ondemand_usd_hour for each in job.others)} == {40.0, 9.0}


def test_stalls_of_a_fixed_interval_are_part_of_the_shortest_deadline() -> None:
    """Work of 40 h with a stall of 2 min every 30 min takes 42:40 on-demand, and the start 5 min."""
    assert measure("every: 30m, stall: 2m", "42.8h").ondemand_hours == pytest.approx(40 * 32 / 30 + 1 / 12)
    with pytest.raises(UsageError, match="42h 40m of work and 5m 00s to start") as caught:
        measure("every: 30m, stall: 2m", "42.7h")
    assert caught.value.hints == ("pass `--deadline-hours 51.3`",)
    assert measure("stall: 2m", "42.7h").ondemand_hours < 42.7, "only a fixed interval makes on-demand save"


def test_work_is_scaled_from_another_name_of_an_accelerator_and_an_unknown_one_is_noted() -> None:
    context: Any = Planned()
    text = "resources: {accelerators: H100:8}\ngoal: {work: {hours: 40, on: %s}}"
    job = measure_job(context, read(text % "A100-40GB:8"), [OPEN], None, 0.0)
    assert job.work_hours < 25 and not context.notes
    assert measure_job(context, read(text % "A10O:8"), [OPEN], None, 0.0).work_hours == 40
    (note,) = context.notes
    assert "the speed of `A10O` is unknown" in note


def test_a_deadline_of_no_hours_is_not_taken_for_none() -> None:
    context: Any = Planned()
    with pytest.raises(UsageError, match="cannot be met"):
        measure_job(context, read(TEXT % ("60h", "")), [OPEN], 0.0, 0.0)


def test_no_policy_is_late_if_on_demand_stalls_too() -> None:
    """All of on-demand's spare time is known: none of it is lost to stalls that a policy does not expect."""
    shut = Trace(name="shut", gap_hours=1.0, counts=(0,) * 200)
    context: Any = Planned()
    job = measure_job(context, read(TEXT % ("44h", "every: 30m, stall: 2m")), [shut], None, 0.0)
    (scene,) = set_scenes(job, [shut], 1, is_apart=False)
    for name in ("greedy", "uniform-progress", "adaptive"):
        found = replay(scene.case, load_policy(name))
        assert not found.is_late and found.hours > 42.6, name


def test_spot_is_used_in_a_market_that_never_closed() -> None:
    """Without preemptions, the best interval between checkpoints is infinite, and all work would be at risk on spot."""
    job = measure("")
    assert job.save_every_hours < 1.0
    (scene,) = set_scenes(job, [OPEN], 1, is_apart=False)
    for name in ("greedy", "uniform-progress", "adaptive"):
        found = replay(scene.case, load_policy(name))
        assert found.ondemand_hours == 0 and found.usd < 0.5 * job.work_hours * job.ondemand_usd_hour


@pytest.mark.parametrize("is_apart", [False, True])
def test_the_catalogs_price_is_the_mean_of_the_cheapest_zone(is_apart: bool) -> None:
    """The first tick of a recording may be a spike, and prices while spot is unavailable are not paid."""
    spiky = Trace(name="a", gap_hours=1.0, counts=(1,) * 199 + (0,), prices=(21.0, *[2.0] * 199))
    cheap = Trace(name="b", gap_hours=1.0, counts=(1,) * 199 + (0,), prices=(5.0, *[1.0] * 199))
    job = measure("")
    scenes = set_scenes(job, [spiky, cheap], 2, is_apart=is_apart)
    sites = [site for scene in scenes for site in scene.case.sites][:2]
    means = [sum(site.read_step(site.find_step(hour))[2].usd_hour for hour in range(199)) / 199 for site in sites]
    ratio = 1.0 if is_apart else sum(spiky.prices[:199]) / sum(cheap.prices[:199])
    assert means == [pytest.approx(job.spot_usd_hour * ratio), pytest.approx(job.spot_usd_hour)]


def test_a_market_that_counts_instances_is_open_only_with_room_for_all_nodes(tmp_path: Path) -> None:
    context: Any = Planned()
    text = TEXT.replace("}\ngoal", "}\nnum_nodes: %d\ngoal", 1) % (4, "60h", "")

    def find_shares(counts: tuple[int, ...], gang: int) -> list[float]:
        file = tmp_path / "trace.json"
        file.write_text(write_trace(Trace(name="t", gap_hours=1.0, counts=counts, gang=gang)))
        request = SimulationRequest(traces=file, policies=("greedy",), starts=1, optima=0)
        return [each.spot_share for each in simulate(context, read(text), request).study.scores]

    assert find_shares((3,) * 200, 1) == [0.0, 0.0]
    assert find_shares((4,) * 200, 1) == [0.0, 1.0]
    assert find_shares((1,) * 200, 1) == [0.0, 1.0], "1 means available"
    assert find_shares((2,) * 200, 2) == [0.0, 1.0], "recorded with a gang of its own"


def test_zones_whose_recordings_began_at_different_hours_are_replayed_from_the_last_beginning(tmp_path: Path) -> None:
    """Both zones close at the same time, once: a job of 12 h has nowhere to move, and is preempted at once in both."""
    early = Trace(name="a", gap_hours=1.0, counts=(1,) * 10 + (0,) * 10, started_s=0.0)
    late = Trace(name="b", gap_hours=0.5, counts=(1,) * 8 + (0,) * 20, started_s=6 * 3600.0)
    for each in (early, late):
        (tmp_path / f"{each.name}.json").write_text(write_trace(each))
    context: Any = Planned()
    task = read("resources: {accelerators: H100:8}\ngoal: {work: 12h, deadline: 13h}")
    request = SimulationRequest(traces=tmp_path, policies=("greedy",), starts=1, optima=0)
    found = simulate(context, task, request)
    assert [each.changes for each in found.traces] == [((0.0, True), (4.0, False))] * 2
    assert found.study.scores[1].preemptions_mean == 1
    apart = simulate(context, task, replace(request, is_apart=True))
    assert [each.hours for each in apart.traces] == [20.0, 14.0]
    (tmp_path / "b.json").write_text(write_trace(replace(late, started_s=20 * 3600.0)))
    with pytest.raises(UsageError, match="`a` and `b` do not overlap") as caught:
        simulate(context, task, request)
    assert "--apart" in caught.value.hints[0]
