"""Habits from other tools: names, units and forms that users bring to their first task files."""

from __future__ import annotations

import pytest

from broker.optimizer.throughput import scale_work
from broker.task.accelerators import resolve_accelerators
from broker.task.loader import load_tasks_text
from broker.types import AcceleratorFigures, Offer, Task

FIGURES = {
    "A100": AcceleratorFigures(name="A100", memory_gib=40, bf16_dense_tflops=312, memory_bandwidth_gbs=1555),
    "H100": AcceleratorFigures(name="H100", memory_gib=80, bf16_dense_tflops=989, memory_bandwidth_gbs=3350),
}
A100 = Offer(
    cloud="aws", region="r", zone=None, instance_type="a", vcpus=96, memory_gib=768, accelerator="A100",
    accelerator_count=8, accelerator_memory_gib=40, ondemand_usd_hour=1.0, spot_usd_hour=None,
)  # fmt: skip


def load(text: str) -> Task:
    (task,) = load_tasks_text(f"run: x\n{text}", "task.yaml")
    return task


@pytest.mark.parametrize("name", ["H100", "h100", "H100-80GB", "h100-sxm"])
def test_work_measured_under_another_name_of_an_accelerator_is_scaled(name: str) -> None:
    task = resolve_accelerators(load(f"goal: {{work: {{hours: 100, on: '{name}:8'}}}}"), FIGURES)
    assert not task.notices
    assert (scale_work(task.goal, A100, FIGURES) or 0) > 200


def test_measured_figures_apply_under_another_name_of_an_accelerator() -> None:
    figures = "{A100-40GB:8: 100, H100-80GB:8: 300}"
    task = resolve_accelerators(load(f"goal: {{work: {{hours: 100, on: H100:8}}, throughput: {figures}}}"), FIGURES)
    assert task.goal is not None and task.goal.throughput == {"A100:8": 100, "H100:8": 300}
    assert scale_work(task.goal, A100, FIGURES, measured=task.goal.throughput) == pytest.approx(300)


def test_work_measured_on_an_unknown_accelerator_is_noted() -> None:
    asked = load("goal: {work: {hours: 100, on: H10O:8}}")
    task = resolve_accelerators(asked, FIGURES)
    (notice,) = task.notices
    assert notice.message.startswith("`on`: the speed of `H10O` is unknown, so the work takes the same time")
    assert (notice.hint, notice.blocks_launch) == ("did you mean `H100`?", False)
    assert resolve_accelerators(task, FIGURES).notices == task.notices, "noted once"
    measured = resolve_accelerators(load("goal: {work: {hours: 1, on: TPU-x:8}, throughput: {TPU-x:8: 5}}"), FIGURES)
    assert [each.message.partition(":")[0] for each in measured.notices] == ["`throughput`"], "its figure is known"
