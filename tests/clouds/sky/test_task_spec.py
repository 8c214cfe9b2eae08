"""A plan pins what SkyPilot creates, and the keeper ends unclaimed nodes: run here as on a node."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from broker.clouds import WITHOUT_SELF_TERMINATION
from broker.clouds.sky import task_spec
from broker.clouds.sky.task_spec import make_task
from broker.errors import InvalidRequestError
from broker.types import MachineSpec, NodeRequest, Offer, Placement


def make_request(
    *, is_spot: bool = False, node_count: int = 1, spec: MachineSpec | None = None, **offer: Any
) -> NodeRequest:
    values = {"cloud": "azure", "region": "eastus", "zone": "1", "instance_type": "Standard_NC24ads_A100_v4"}
    figures = {"vcpus": 24, "memory_gib": 220, "ondemand_usd_hour": 3.67, "spot_usd_hour": 1.4}
    placement = Placement(offer=Offer(**{**values, **figures, **offer}), is_spot=is_spot, node_count=node_count)
    return NodeRequest(
        owner="me", cluster="train", attempt=2, token="0" * 32, placement=placement, spec=spec or MachineSpec()
    )


def test_place_and_machine_are_pinned() -> None:
    spec = MachineSpec(
        disk_size_gib=100, disk_tier="high", network_tier="best", image_id="img", ports=("8080", "9000-9010"),
        labels={"team": "vision"},
    )  # fmt: skip
    task = make_task(make_request(is_spot=True, node_count=3, spec=spec))
    assert task["num_nodes"] == 3
    assert task["resources"] == {
        "infra": "azure/eastus/1",
        "instance_type": "Standard_NC24ads_A100_v4",
        "use_spot": True,
        "disk_size": 100,
        "disk_tier": "high",
        "network_tier": "best",
        "image_id": "img",
        "ports": ["8080", "9000-9010"],
        "labels": {"team": "vision", "broker-cluster": "train", "broker-attempt": "2"},
        "autostop": {"idle_minutes": 1, "down": True, "wait_for": "jobs"},
    }


def test_unset_options_are_left_to_skypilot() -> None:
    resources = make_task(make_request(zone=None))["resources"]
    assert resources["infra"] == "azure/eastus"
    assert not {"disk_tier", "network_tier", "image_id", "ports"} & set(resources)


def test_pods_are_requested_by_their_size() -> None:
    request = make_request(
        cloud="kubernetes", region="my-context", zone=None, instance_type="8CPU--32GB--H100:8", vcpus=8,
        memory_gib=32.5, accelerator="H100", accelerator_count=8,
    )  # fmt: skip
    resources = make_task(request)["resources"]
    assert resources["infra"] == "kubernetes/my-context"
    assert (resources["cpus"], resources["memory"], resources["accelerators"]) == ("8+", "32.5+", "H100:8")
    assert not {"instance_type", "disk_size"} & set(resources)


def test_a_tpu_slice_is_requested_by_its_name() -> None:
    request = make_request(
        cloud="gcp", region="us-central1", zone="us-central1-a", instance_type="tpu-v5litepod-8", accelerator="TPU-v5e",
        accelerator_count=8,
    )  # fmt: skip
    resources = make_task(request)["resources"]
    assert resources["accelerators"] == "tpu-v5litepod-8:1" and "instance_type" not in resources


@pytest.mark.parametrize("cloud", WITHOUT_SELF_TERMINATION)
def test_autodown_is_not_requested_for_machines_that_cannot_terminate_themselves(cloud: str) -> None:
    assert "autostop" not in make_task(make_request(cloud=cloud))["resources"]


def test_an_offer_without_a_machine_is_refused() -> None:
    with pytest.raises(InvalidRequestError):
        make_task(make_request(instance_type=""))


def keep(home: Path, monkeypatch: pytest.MonkeyPatch, *, looks: int = 6) -> subprocess.Popen[str]:
    """Run the keeper in its own home folder. A look takes no time, but one line of stdin; at "end" the agent ends the
    node."""
    monkeypatch.setattr(task_spec, "UNCLAIMED_MINUTES", looks // 6)
    monkeypatch.setattr(task_spec, "KEEPER_POLL_S", 10)
    agent = '[ "$line" != end ] || echo autostop >"$HOME/.broker/shutdown"'
    script = f"sleep() {{ read -r line || exit 9; {agent}; }}\n" + make_task(make_request())["run"]
    return subprocess.Popen(
        ["sh", "-c", script],
        env={**os.environ, "HOME": str(home)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_an_unclaimed_node_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = keep(tmp_path, monkeypatch, looks=6)
    done, _ = keeper.communicate("look\n" * 6, timeout=300)
    assert "unclaimed" in done and keeper.returncode == 1


def test_a_claimed_node_is_kept_until_its_agent_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tmp_path / ".broker"
    (state / "runs").mkdir(parents=True)
    (state / "shutdown").write_text("lease")  # of an earlier boot
    keeper = keep(tmp_path, monkeypatch, looks=6)
    done, _ = keeper.communicate("look\n" * 50, timeout=300)  # it reads them all, and would continue
    assert keeper.returncode == 9 and done == "" and not (state / "shutdown").exists()
    keeper = keep(tmp_path, monkeypatch, looks=6)
    done, _ = keeper.communicate("look\n" * 20 + "end\n", timeout=300)
    assert "autostop" in done and keeper.returncode == 1
