"""A request's bodies, names, labels and quotas at Google, without Google."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from google.cloud import compute_v1
from hypothesis import given
from hypothesis import strategies as st

from broker.clouds.gcp import machine, names, quotas
from broker.clouds.gcp.images import OLD_GPU_FAMILIES, list_families
from broker.clouds.gcp.instances import STATES
from broker.clouds.gcp.quotas import Quota, check_quotas, list_needs
from broker.clouds.gcp.settings import Settings
from broker.errors import InvalidRequestError, QuotaError
from broker.types import MachineSpec, NodeRequest, Offer

Make = Callable[..., NodeRequest]
MakeOffer = Callable[..., Offer]
IMAGE = "projects/p/global/images/i"


def test_every_instance_state_is_known() -> None:
    assert set(STATES) == {each.name for each in compute_v1.Instance.Status}


def test_quotas_have_names_that_google_uses() -> None:
    known = {each.name for each in compute_v1.Quota.Metric}
    for metric in quotas.GPU_METRICS.values():
        assert {metric, f"PREEMPTIBLE_{metric}"} <= known
    assert {f"{family.upper()}_CPUS" for family in quotas.CPU_FAMILIES} <= known


@given(st.text(max_size=80), st.text(max_size=80), st.text(min_size=1, max_size=80), st.integers(0, 999))
def test_names_and_labels_follow_googles_grammar_for_any_request(
    owner: str, cluster: str, token: str, rank: int
) -> None:
    prefix = names.owner_prefix(owner)
    request_like = f"{prefix}{'0' * 16}-{rank}-nodes"
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", request_like)
    for text in (owner, cluster, token):
        assert re.fullmatch(r"[a-z0-9_-]{0,63}", names.label_value(text))
        assert re.fullmatch(r"[a-z][a-z0-9_-]{0,62}", names.make_plain(text, is_key=True))
        assert re.fullmatch(r"[a-z0-9_-]{0,63}", names.make_plain(text, is_key=False))


@given(st.text(max_size=70), st.text(max_size=70))
def test_distinct_texts_have_distinct_labels(one: str, other: str) -> None:
    assert (names.label_value(one) == names.label_value(other)) == (one == other)


def test_a_label_of_the_greatest_length_is_kept_and_a_longer_one_shortened() -> None:
    assert names.label_value("a" * 63) == "a" * 63
    longer = names.label_value("a" * 64)
    assert len(longer) == 63 and longer.startswith("a" * 54 + "-")


def test_our_labels_win_over_the_users(request_of: Make) -> None:
    labels = names.make_labels(request_of(spec=MachineSpec(labels={"broker-owner": "thief", "9lives": "x y"})))
    assert labels["broker-owner"] == "0123456789ab" and labels["x9lives"] == "x-y"


def test_nodes_act_as_the_account_of_the_settings_for_storage_only(request_of: Make) -> None:
    assert "service_accounts" not in machine.make_instance(request_of(), "z", IMAGE, Settings())
    settings = Settings(service_account="mine@p.iam.gserviceaccount.com")
    for body in (
        machine.make_instance(request_of(), "z", IMAGE, settings),
        machine.make_gang(request_of(), IMAGE, settings)["instance_properties"],
    ):
        (account,) = body["service_accounts"]
        assert account["email"] == settings.service_account
        assert account["scopes"] == ["https://www.googleapis.com/auth/devstorage.read_write"]


def test_identity_of_one_cluster_reaches_all_apis(request_of: Make) -> None:
    """A server's machine creates nodes; its roles limit it."""
    settings = Settings(service_account="mine@p.iam.gserviceaccount.com")
    for body in (
        machine.make_instance(request_of(), "z", IMAGE, settings, identity="server@p.iam.gserviceaccount.com"),
        machine.make_gang(request_of(), IMAGE, settings, identity="server@p.iam.gserviceaccount.com")[
            "instance_properties"
        ],
    ):
        (account,) = body["service_accounts"]
        assert account["email"] == "server@p.iam.gserviceaccount.com"
        assert account["scopes"] == ["https://www.googleapis.com/auth/cloud-platform"]


def test_ids_contain_project_zone_name_gang_and_rank() -> None:
    link = "https://www.googleapis.com/compute/v1/projects/google.com:p/zones/us-central1-a/instances/b-me-0a-12"
    where = names.NodeId.from_link(link)
    assert where is not None and str(where) == "google.com:p/us-central1-a/b-me-0a-12"
    assert names.NodeId.parse(str(where)) == where
    assert (where.gang, where.rank) == ("b-me-0a", 12)
    assert names.NodeId.from_link(link.replace("instances", "disks")) is None


@pytest.mark.parametrize(
    ("tier", "instance_type", "kind"),
    [
        (None, "n1-standard-4", "pd-balanced"),
        ("low", "e2-standard-4", "pd-standard"),
        ("best", "a2-highgpu-1g", "pd-ssd"),
        ("high", "c4-standard-4", "hyperdisk-balanced"),
        (None, "a3-ultragpu-8g", "hyperdisk-balanced"),
        (None, "a3-highgpu-8g", "pd-balanced"),
    ],
)
def test_the_disk_type_is_supported_by_the_machine(
    request_of: Make, offer_of: MakeOffer, tier: str | None, instance_type: str, kind: str
) -> None:
    request = request_of(offer_of(instance_type), spec=MachineSpec(disk_tier=tier))
    body = machine.make_instance(request, "z", IMAGE, Settings())
    assert body["disks"][0]["initialize_params"]["disk_type"] == f"zones/z/diskTypes/{kind}"
    gang = machine.make_gang(request, IMAGE, Settings())
    assert gang["instance_properties"]["disks"][0]["initialize_params"]["disk_type"] == kind


@pytest.mark.parametrize(
    ("tier", "size_gib", "figures"),
    [
        (None, 256, None),
        ("medium", 256, None),
        ("low", 256, (3000, 140)),
        ("best", 256, (16000, 1000)),
        ("best", 10, (5000, 1000)),
        ("ultra", 10, (5000, 1250)),
    ],
)
def test_the_one_kind_of_disk_of_newer_machines_is_as_fast_as_its_tier(
    request_of: Make, offer_of: MakeOffer, tier: str | None, size_gib: int, figures: tuple[int, int] | None
) -> None:
    request = request_of(offer_of("c4-standard-4"), spec=MachineSpec(disk_tier=tier, disk_size_gib=size_gib))
    disk = machine.make_instance(request, "z", IMAGE, Settings())["disks"][0]["initialize_params"]
    told = (disk["provisioned_iops"], disk["provisioned_throughput"]) if "provisioned_iops" in disk else None
    assert told == figures


@pytest.mark.parametrize("bad", ["n1-standard-4+1xH100", "ct5lp-hightpu-8t", "tpu-v4-8"])
def test_impossible_machine_is_refused_before_the_create_call(request_of: Make, offer_of: MakeOffer, bad: str) -> None:
    with pytest.raises(InvalidRequestError):
        machine.check_request(request_of(offer_of(bad)))


def test_a_disk_tier_of_another_cloud_is_refused(request_of: Make) -> None:
    with pytest.raises(InvalidRequestError):
        machine.check_request(request_of(spec=MachineSpec(disk_tier="gp3")))


def test_images_fit_the_machine(request_of: Make, offer_of: MakeOffer) -> None:
    arm = list_families(request_of(offer_of("t2a-standard-4")))
    gpu = list_families(request_of(offer_of("n1-standard-4+1xT4")))
    old = [list_families(request_of(offer_of(f"n1-standard-4+1x{gpu}"))) for gpu in ("P4", "P100", "V100")]
    cpu = list_families(request_of(offer_of()))
    assert all("arm64" in family for _, family in arm)
    assert all("nvidia" in family for _, family in gpu)
    assert all(families == OLD_GPU_FAMILIES for families in old), "Pascal and Volta need proprietary kernel modules"
    assert not {*OLD_GPU_FAMILIES} & {*gpu}
    assert not any("nvidia" in family or "arm64" in family for _, family in cpu)


def test_nodes_may_do_without_a_public_address(request_of: Make) -> None:
    settings = Settings(network="projects/p/regions/r/subnetworks/s", uses_private_addresses=True)
    (interface,) = machine.make_instance(request_of(), "z", IMAGE, settings)["network_interfaces"]
    assert interface == {"subnetwork": "projects/p/regions/r/subnetworks/s"}


def test_fast_networking_is_requested_where_it_is_offered(request_of: Make, offer_of: MakeOffer) -> None:
    spec = MachineSpec(network_tier="best")
    large = machine.make_instance(request_of(offer_of("n2-standard-32", vcpus=32), spec=spec), "z", IMAGE, Settings())
    small = machine.make_instance(request_of(offer_of("n2-standard-4"), spec=spec), "z", IMAGE, Settings())
    assert large["network_performance_config"] == {"total_egress_bandwidth_tier": "TIER_1"}
    assert "network_performance_config" not in small


@pytest.mark.parametrize("first", ["#!/bin/sh\n", "#!/bin/bash -e\n", ""])
def test_the_boot_script_runs_at_the_first_start_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    monkeypatch.setattr(machine, "STARTED", str(tmp_path / "started"))
    script = tmp_path / "boot"
    script.write_text(machine.run_once(f"{first}echo ran >> {tmp_path}/log\n"))
    script.chmod(0o700)
    for _ in range(3):
        subprocess.run([script], check=True)
    assert (tmp_path / "log").read_text() == "ran\n"


def test_without_a_script_nothing_is_started(request_of: Make) -> None:
    body = machine.make_instance(request_of(boot=""), "z", IMAGE, Settings())
    assert "startup-script" not in {item["key"] for item in body["metadata"]["items"]}


def test_quotas_are_counted_by_what_the_gang_draws_on(request_of: Make, offer_of: MakeOffer) -> None:
    def needs(instance_type: str, **changes: object) -> dict[str, float]:
        spot = bool(changes.pop("is_spot", True))
        request = request_of(offer_of(instance_type, **changes), node_count=2, is_spot=spot)
        return {need.metrics[0]: need.amount for need in list_needs(request)}

    assert needs("n1-standard-4+1xT4") == {"PREEMPTIBLE_NVIDIA_T4_GPUS": 2, "PREEMPTIBLE_CPUS": 8}
    assert needs("n2-standard-4", is_spot=False) == {"N2_CPUS": 8}
    assert needs("e2-standard-4", is_spot=False) == {"CPUS": 8}
    a100 = {"accelerator": "A100", "accelerator_count": 8, "vcpus": 96, "is_spot": False}
    assert needs("a2-highgpu-8g", **a100) == {"NVIDIA_A100_GPUS": 16}
    assert needs("a3-highgpu-8g", **(a100 | {"accelerator": "H100"})) == {}  # counted where regions do not report it


def test_only_gpus_with_a_limited_life_may_draw_on_preemptible_quota_as_well(
    request_of: Make, offer_of: MakeOffer
) -> None:
    def draw(spec: MachineSpec) -> set[str]:
        request = request_of(offer_of("n1-standard-4+1xT4"), is_spot=False, spec=spec)
        return {metric for need in list_needs(request) for metric in need.metrics}

    assert "PREEMPTIBLE_NVIDIA_T4_GPUS" in draw(MachineSpec())
    assert draw(MachineSpec(is_replaceable=False)) == {"NVIDIA_T4_GPUS", "CPUS"}


def test_unknown_quota_is_not_treated_as_zero(request_of: Make, offer_of: MakeOffer) -> None:
    needs = list_needs(request_of(offer_of("n1-standard-4+1xT4")))
    check_quotas(needs, {}, project="p")
    short = {"NVIDIA_T4_GPUS": Quota(metric="NVIDIA_T4_GPUS", limit=4, usage=4)}
    with pytest.raises(QuotaError) as caught:
        check_quotas(needs, short, project="p", region="us-central1")
    assert "0 of 4 left (NVIDIA_T4_GPUS)" in caught.value.message


def test_nodes_of_a_gang_share_its_price_and_its_replacements_their_tag(request_of: Make) -> None:
    request = request_of(node_count=2)
    description = names.read_description(names.describe(request))
    assert description is not None and description["usd_hour"] * 2 == pytest.approx(request.placement.usd_hour)
    assert names.peers_tag(replace(request, token="another")) == names.peers_tag(request), (
        "a replacement reaches its peers"
    )
    for other in (replace(request, attempt=request.attempt + 1), replace(request, cluster="another")):
        assert names.peers_tag(other) != names.peers_tag(request)


@pytest.mark.parametrize("length", [62, 63, 64, 200])
def test_labels_fit_and_stay_distinct(length: int) -> None:
    value = names.label_value("a" * length)
    assert len(value) <= 63 and (value == "a" * length) is (length <= 63)
    assert names.label_value("a" * length + "b") != value
    assert names.label_value("Team") != names.label_value("team") == "team"
    assert len(names.make_plain("1" + "a" * length, is_key=True)) <= 63
