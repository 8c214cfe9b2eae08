"""Work scaled from the placement on which it was measured to another."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.optimizer.memory_model import Sharding
from broker.optimizer.model_shape import ModelShape
from broker.optimizer.roofline import Hardware, estimate_step
from broker.optimizer.throughput import _roofline_speed, find_speed, scale_work
from broker.types import AcceleratorFigures, Goal, Offer

FIGURES = {
    each.name: each
    for each in (
        AcceleratorFigures(
            name="A100", memory_gib=40, bf16_dense_tflops=312, memory_bandwidth_gbs=1555, nvlink_gbs=600
        ),
        AcceleratorFigures(
            name="H100", memory_gib=80, bf16_dense_tflops=989, memory_bandwidth_gbs=3350, nvlink_gbs=900
        ),
        AcceleratorFigures(name="T4", memory_gib=16, bf16_dense_tflops=65, memory_bandwidth_gbs=320, nvlink_gbs=0),
        AcceleratorFigures(name="Blank", memory_gib=16),
    )
}
GOAL = Goal(work_hours=100, work_on="A100:8")


def sell(accelerator: str | None, count: float, *, cloud: str = "aws", instance_type: str = "p5.48xlarge") -> Offer:
    return Offer(
        cloud=cloud, region="r", zone=None, instance_type=instance_type, vcpus=8, memory_gib=64,
        accelerator=accelerator, accelerator_count=count,
    )  # fmt: skip


def scale(accelerator: str | None, count: float, *, nodes: int = 1, goal: Goal = GOAL, **measured: float) -> float:
    table = {key.replace("_", ":"): value for key, value in measured.items()}
    hours = scale_work(goal, sell(accelerator, count), FIGURES, node_count=nodes, measured=table or None)
    assert hours is not None
    return hours


def test_without_work_there_are_no_hours() -> None:
    assert scale_work(None, sell("A100", 8), FIGURES) is None
    assert scale_work(Goal(deadline_hours=3), sell("A100", 8), FIGURES) is None


def test_work_without_a_card_takes_the_same_hours_anywhere() -> None:
    assert scale("H100", 8, goal=Goal(work_hours=7)) == 7
    assert scale(None, 0) == 100


def test_the_card_itself_takes_the_hours_given() -> None:
    assert scale("A100", 8) == pytest.approx(100)


def test_h100_is_faster_than_a100_by_less_than_its_peak() -> None:
    # The peaks differ by 3.2, the bandwidths by 2.2, and H100 reaches less of its peak.
    assert 2.0 < 100 / scale("H100", 8) < 3.0


def test_a_users_own_figures_override_the_roofline() -> None:
    assert scale("H100", 8, H100_8=31_000, A100_8=12_500) == pytest.approx(100 * 12_500 / 31_000)


def test_a_figure_for_another_count_keeps_the_measured_ratio_of_cards() -> None:
    twice = scale("H100", 8, nodes=2, H100_8=31_000, A100_8=12_500)
    once = scale("H100", 8, H100_8=31_000, A100_8=12_500)
    assert once / 2 <= twice < once * 0.6


def test_an_unmeasured_card_uses_the_mean_of_the_measured_ones() -> None:
    # Only the goal's card is measured: the ratio is the roofline's.
    assert scale("H100", 8, A100_8=12_500) == pytest.approx(scale("H100", 8))


def test_two_nodes_take_about_half_the_time_on_a_fast_network() -> None:
    assert 50 <= scale("A100", 8, nodes=2) < 56


def test_two_nodes_on_slow_ethernet_gain_little() -> None:
    slow = sell("A100", 8, cloud="nowhere", instance_type="x")
    one, two = (scale_work(GOAL, slow, FIGURES, node_count=nodes) for nodes in (1, 2))
    assert one is not None and two is not None
    fast = sell("A100", 8, instance_type="p4d.24xlarge")
    fast_two = scale_work(GOAL, fast, FIGURES, node_count=2)
    assert fast_two is not None
    assert two > fast_two * 1.1


def test_a_card_without_figures_is_compared_by_count_or_not_at_all() -> None:
    assert scale("Blank", 4, goal=Goal(work_hours=10, work_on="Blank:8")) == 20
    assert scale("Blank", 4) == 100
    assert scale("Unheard", 4, nodes=2, goal=Goal(work_hours=10, work_on="unheard:8")) == 10


def test_names_are_case_insensitive() -> None:
    assert scale("H100", 8, goal=Goal(work_hours=100, work_on="a100:8")) == scale("H100", 8)


@given(st.sampled_from(["A100", "H100", "T4"]), st.integers(1, 7), st.integers(1, 4))
def test_more_cards_per_node_are_never_slower(name: str, count: int, more: int) -> None:
    low, high = (find_speed(name, min(8, each), FIGURES) for each in (count, count + more))
    assert high >= low * 0.999


def test_peaks_decide_if_nothing_else_is_known() -> None:
    bare = {
        name: AcceleratorFigures(name=name, memory_gib=80, bf16_dense_tflops=peak)
        for name, peak in (("A100", 300.0), ("H100", 900.0))
    }
    hours = scale_work(Goal(work_hours=90, work_on="A100:8"), sell("H100", 8), bare)
    assert hours == pytest.approx(30)


@given(st.floats(0.05, 0.95))
def test_a_fraction_of_a_card_does_a_fraction_of_the_work(part: float) -> None:
    assert find_speed("T4", part, FIGURES) == pytest.approx(part * find_speed("T4", 1, FIGURES))


@given(st.floats(1, 1e6), st.floats(1, 1e6))
def test_measured_figures_have_no_unit(speed: float, factor: float) -> None:
    one = scale("T4", 4, A100_8=speed, T4_1=speed / 20)
    other = scale("T4", 4, A100_8=speed * factor, T4_1=speed * factor / 20)
    assert math.isclose(one, other, rel_tol=1e-9)


def test_a_card_without_figures_scales_by_its_count_alone() -> None:
    """The speed is known only from its own measurements; the one for the nearest count is used."""
    measured = {"Blank:8": 1000.0, "Blank:64": 4000.0}
    assert find_speed("Blank", 16, {}, measured=measured) == 2000.0
    assert find_speed("blank", 8, {}, node_count=3, measured=measured) == 1500.0
    assert find_speed("Blank", 8, {}, measured=measured) == 1000.0
    assert find_speed("Other", 8, {}, measured=measured) == 0.0


@pytest.mark.parametrize(
    ("count", "nodes", "batch"), [(8, 1, 256), (1, 1, 256), (3, 1, 255), (8, 40, 320), (8, 12, 288)]
)
def test_speed_is_that_of_the_reference_workload_in_micro_batches_of_at_most_four(
    count: int, nodes: int, batch: int
) -> None:
    figures, ranks = FIGURES["H100"], count * nodes
    step = estimate_step(
        ModelShape(layers=24, width=2048, heads=16), Sharding(data=ranks, zero=1),
        Hardware(figures=figures, accelerators=count, network_gbs=50.0), sequence=2048, batch=batch,
        micro_batch=min(4, batch // ranks), recompute="selective",
    )  # fmt: skip
    assert _roofline_speed(figures, count, nodes, 50.0) == pytest.approx(batch * 2048 / step.total_s, rel=1e-12)


def test_half_a_card_has_half_its_speed() -> None:
    figures = FIGURES["H100"]
    assert _roofline_speed(figures, 0.5, 1, 50.0) == pytest.approx(_roofline_speed(figures, 1, 1, 50.0) / 2)
    two = _roofline_speed(figures, 2, 1, 50.0)
    assert _roofline_speed(figures, 1.6, 1, 50.0) == pytest.approx(0.8 * two)
    assert _roofline_speed(figures, 2.4, 1, 50.0) == two, "the part of a third card adds nothing"
