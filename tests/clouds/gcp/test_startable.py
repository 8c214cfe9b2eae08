"""`broker check gcp --types` lists which accelerators would start today, and what prevents the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from google.cloud import compute_v1

from broker.clouds.findings import TypeCheckResult
from broker.clouds.gcp import images, machine, quotas
from broker.clouds.gcp.sdk import Sdk
from broker.clouds.gcp.settings import Settings
from broker.clouds.gcp.startable import judge_types
from broker.types import NodeRequest, Offer

MakeOffer = Callable[..., Offer]


def judge(bench: Any, *offers: Offer) -> dict[str, TypeCheckResult]:
    found = bench.run(judge_types(Sdk(bench.make_cloud()._login), offers))
    assert bench.gce.list_names() == [] and not bench.gce.firewalls
    return {each.accelerator: each for each in found}


def test_machine_quota_network_disk_and_region_are_distinguished(bench: Any, offer_of: MakeOffer) -> None:
    bench.gce.limits.update({("us-central1", f"{kind}NVIDIA_V100_GPUS"): 0 for kind in ("", "PREEMPTIBLE_")})
    bench.gce.limits["us-central1", "NVIDIA_P100_GPUS"] = 0
    bench.gce.limits["us-central1", "PREEMPTIBLE_NVIDIA_P100_GPUS"] = 4
    built_in = {"accelerator": "B200", "accelerator_count": 8}
    found = judge(
        bench,
        offer_of("n1-standard-4+1xT4"),
        offer_of("n1-standard-4+1xV100"),
        offer_of("a4-highgpu-8g", **built_in),
        offer_of("ct5lp-hightpu-1t", accelerator="TPU-v5e", accelerator_count=1),
        offer_of("g2-standard-4", zone=None, region="moon-west1", accelerator="L4", accelerator_count=1),
    )
    assert found["T4:1"].ways == ("on-demand", "spot") and found["T4:1"].why == ""
    assert found["V100:1"].ways == () and "1 V100 GPUs requested in us-central1, 0 of 0 left" in found["V100:1"].why
    assert found["V100:1"].command.startswith("gcloud quotas preferences create")
    assert found["B200:8"].ways == ("on-demand", "spot")
    assert "without RDMA" in found["B200:8"].why and "Hyperdisk only" in found["B200:8"].why
    assert "checked by the create call only" in found["B200:8"].why
    assert found["TPU-v5e:1"].ways == () and found["TPU-v5e:1"].why.startswith("machine: ")
    assert found["L4:1"].ways == () and found["L4:1"].why.startswith("region: ")


def test_a_retired_image_stands_in_the_way(bench: Any, offer_of: MakeOffer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "GPU_FAMILIES", (("deeplearning-platform-release", "common-cu80"),))
    found = judge(bench, offer_of("n1-standard-4+1xT4"))["T4:1"]
    assert found.ways == () and found.why.startswith("image: Google has retired")


def test_an_old_gpu_without_an_image_that_drives_it_does_not_start(
    bench: Any, offer_of: MakeOffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "OLD_GPU_FAMILIES", (("deeplearning-platform-release", "common-cu80"),))
    found = judge(bench, offer_of("n1-standard-4+1xV100"), offer_of("n1-standard-4+1xT4"))
    assert found["V100:1"].ways == () and "V100 requires NVIDIA's proprietary driver" in found["V100:1"].why
    assert found["T4:1"].ways, "its image is another one"


def test_metrics_are_spelt_as_in_googles_own_list() -> None:
    known = {each.name for each in compute_v1.Quota.Metric}
    ours = {*quotas.GPU_METRICS.values(), *(f"PREEMPTIBLE_{each}" for each in quotas.GPU_METRICS.values())}
    assert ours | {quotas.ALL_REGIONS} <= known


def test_machines_whose_other_cards_carry_rdma_ask_for_gvnic(
    request_of: Callable[..., NodeRequest], offer_of: MakeOffer
) -> None:
    def card(instance_type: str) -> dict[str, Any]:
        body = machine.make_instance(request_of(offer_of(instance_type)), "z", "projects/p/global/images/i", Settings())
        interface: dict[str, Any] = body["network_interfaces"][0]
        return interface

    assert [card(each).get("nic_type") for each in ("a3-ultragpu-8g", "a4-highgpu-8g")] == ["GVNIC"] * 2
    assert "nic_type" not in card("a2-highgpu-1g")
