"""A node checks its GPUs before the first step: only evidence is a fault, and gaps are reported."""

from __future__ import annotations

import asyncio
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from local_gang import Rig, make_task

from broker.agent import FOLDER
from broker.types import NodeFault, RunStatus
from tests.agent.fake_gpus import FakeGpus
from tests.tiers import spread

sys.path.insert(0, str(FOLDER))  # as on a node: siblings by bare names
agent_health: Any = importlib.import_module("agent_health")
agent_peaks: Any = importlib.import_module("agent_peaks")
sys.path.remove(str(FOLDER))

ORDER = {"gpus": 2.0, "refused": []}
HEALTHY = "GPU-a, 1320, NVIDIA A100-SXM4-80GB, 0\nGPU-b, 1321, NVIDIA A100-SXM4-80GB, 0\n"


def find(text: str, **order: Any) -> tuple[str, list[str]]:
    fault, cards = agent_health.find_fault(agent_health.parse_cards(text), "", {**ORDER, **order})
    return fault, [each for card in cards for each in card.serials]


def test_healthy_gpus_have_no_fault() -> None:
    assert find(HEALTHY)[0] == ""
    assert find(HEALTHY, gpus=1.0)[0] == "", "a share of a larger machine"


@pytest.mark.parametrize("count", ["[N/A]", "[Not Supported]", "N/A", ""])
def test_gpu_that_reports_no_ecc_errors_is_not_a_fault(count: str) -> None:
    assert find(HEALTHY.replace(", 0\n", f", {count}\n"))[0] == ""


def test_uncorrected_ecc_error_is_the_fault_of_its_gpu() -> None:
    text = HEALTHY.replace("GPU-b, 1321, NVIDIA A100-SXM4-80GB, 0", "GPU-b, 1321, NVIDIA A100-SXM4-80GB, 3")
    assert find(text) == ("GPU 1 (GPU-b) has 3 uncorrected ECC errors", ["GPU-b", "1321"])
    assert find(text.replace(", 3\n", ", 1\n"))[1] == ["GPU-b", "1321"], "one is enough"


def test_only_the_gpu_at_fault_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cards = agent_health.parse_cards(
        HEALTHY.replace("1321, NVIDIA A100-SXM4-80GB, 0", "1321, NVIDIA A100-SXM4-80GB, 3")
    )
    monkeypatch.setattr(agent_health, "list_cards", lambda: (cards, ""))
    finding, timed = agent_health.inspect(ORDER, str(tmp_path / "no-log"))
    assert finding.serials == ("GPU-b", "1321") and timed == cards


def test_missing_gpu_is_a_fault_of_the_node_with_all_its_gpus() -> None:
    assert find(HEALTHY, gpus=4.0) == ("2 of 4 GPUs are present", ["GPU-a", "1320", "GPU-b", "1321"])


@pytest.mark.parametrize("serial", ["GPU-b", "1321"])
def test_gpu_that_failed_before_is_refused_by_uuid_or_serial(serial: str) -> None:
    fault, serials = find(HEALTHY, refused=[serial])
    assert fault == "GPU 1 (GPU-b) has failed an earlier check" and serials == ["GPU-b", "1321"]


def test_serial_that_is_not_reported_identifies_no_gpu() -> None:
    text = HEALTHY.replace("1320", "[N/A]").replace("1321", "0")
    assert find(text, refused=["[N/A]", "0"]) == ("", ["GPU-a", "GPU-b"])


def test_only_errors_of_the_hardware_count_in_the_kernel_log() -> None:
    assert agent_health.find_xid({"13": 4, "31": 1, "43": 2, "45": 9}) == "", "programs cause these"
    assert agent_health.find_xid({"31": 1, "79": 1}) == "Xid 79 in the kernel log (fell off the bus)"


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("Tesla T4", 65.0),
        ("Tesla V100-SXM2-16GB", 112.0),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA T400", None),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_peak_is_that_of_the_product(name: str, tflops: float | None) -> None:
    assert agent_peaks.find_tflops(name) == tflops


def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: Any) -> Any:
    monkeypatch.setattr(agent_health.agent_files, "STATE", tmp_path)
    return agent_health.judge(agent_health.HealthFinding("", (), ()), agent_health.parse_cards(HEALTHY), result)


def test_slow_gpu_is_a_fault_and_one_that_is_only_limited_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert judge(tmp_path, monkeypatch, {"tflops": {"GPU-a": 240.0, "GPU-b": 100.0}}).fault == ""
    assert not agent_health.is_probe_due(ORDER, agent_health.parse_cards(HEALTHY)), "they are not timed again here"
    slow = judge(tmp_path, monkeypatch, {"tflops": {"GPU-a": 240.0, "GPU-b": 9.0}})
    assert slow.fault == "GPU 1 (GPU-b) reaches 9.0 of 312 TFLOP/s" and slow.serials == ("GPU-b", "1321")


def test_gpu_that_torch_does_not_see_is_named_as_unchecked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = judge(tmp_path, monkeypatch, {"tflops": {"GPU-a": 240.0}})
    assert finding.fault == "", "the task may hide it on purpose"
    assert finding.unchecked == ("matrix product of GPU 1: torch does not see it",)


@pytest.mark.parametrize("result", [None, {}, {"tflops": 3}, {"unchecked": "ImportError: torch"}])
def test_program_that_times_nothing_is_not_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: dict[str, Any] | None
) -> None:
    finding = judge(tmp_path, monkeypatch, result)
    assert finding.fault == "" and finding.unchecked[0].startswith("matrix products: ")
    assert agent_health.is_probe_due(ORDER, agent_health.parse_cards(HEALTHY)), "the next attempt tries again"


@pytest.mark.parametrize("value", [None, "", "{", "[]", '{"gpus": "x", "refused": []}', '{"gpus": 1}'])
def test_node_checks_nothing_if_the_order_is_invalid(value: str | None) -> None:
    assert agent_health.read_order({"envs": {} if value is None else {"BROKER_HEALTH": value}}) is None


def test_products_are_unchecked_without_torch(tmp_path: Path) -> None:
    program = str(FOLDER / "agent_matmul.py")
    subprocess.run([sys.executable, "-I", "-S", program, str(tmp_path / "r.json"), "60"], check=True, timeout=300)
    assert "ModuleNotFoundError" in json.loads((tmp_path / "r.json").read_text())["unchecked"]


async def run_checked(rig: Rig, gpus: FakeGpus, *, node_count: int = 1, count: float = 2) -> Any:
    """Run a gang with the check, and return its report and the head's log."""
    cluster = await rig.make_cluster(node_count)
    task = make_task("echo begun", num_nodes=node_count, envs=gpus.envs)
    await rig.gang.prepare(cluster, task)
    order = json.dumps({"gpus": count, "refused": []})
    await rig.gang.start(cluster, task, run_id=1, envs={"BROKER_HEALTH": order})
    report = await rig.finish_all(cluster)
    return report, await rig.read_log(cluster)


def test_gang_with_healthy_gpus_starts(rig: Rig, gpus: FakeGpus) -> None:
    report, log = asyncio.run(run_checked(rig, gpus))
    assert report.status is RunStatus.SUCCEEDED and "begun" in log
    assert "broker: health check: 2 GPUs without a fault\n" in log and report.faults == ()


@pytest.mark.parametrize(
    ("fault", "reason"),
    spread(
        [
            ("missing", "1 of 2 GPUs are present"),
            ("ecc", "has 2 uncorrected ECC errors"),
            ("xid", "Xid 79 in the kernel log (fell off the bus)"),
            ("slow", "of 312 TFLOP/s"),
        ],
        every=2,
    ),
)
def test_fault_ends_the_run_before_its_first_step(rig: Rig, gpus: FakeGpus, fault: str, reason: str) -> None:
    gpus.plant(fault)
    report, log = asyncio.run(run_checked(rig, gpus))
    (found,) = report.faults
    assert report.status is RunStatus.FAILED_SETUP and report.returncode is None
    assert isinstance(found, NodeFault) and found.rank == 0 and reason in found.reason
    assert "begun" not in log and reason in log and report.reason == f"rank 0: {found.reason}"


def test_other_nodes_of_the_gang_report_no_fault(rig: Rig, gpus: FakeGpus) -> None:
    gpus.plant("ecc")
    report, _ = asyncio.run(run_checked(rig, gpus, node_count=2))
    assert len(report.faults) == 1 and report.status is RunStatus.FAILED_SETUP
    assert all(gpus.read_sick() in serial for serial in report.faults[0].serials)


def test_node_without_the_tool_starts_and_reports_it(rig: Rig, gpus: FakeGpus) -> None:
    (gpus.folder / "nvidia-smi").unlink()
    report, log = asyncio.run(run_checked(rig, gpus))
    assert report.status is RunStatus.SUCCEEDED
    assert "broker: health check: not checked: nvidia-smi is missing\n" in log


def test_failing_tool_is_not_a_fault(rig: Rig, gpus: FakeGpus) -> None:
    gpus.plant("driver")
    report, log = asyncio.run(run_checked(rig, gpus))
    assert report.status is RunStatus.SUCCEEDED and "not checked: nvidia-smi failed: NVIDIA-SMI has failed" in log
