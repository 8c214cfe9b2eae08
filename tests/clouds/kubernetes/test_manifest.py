"""The pod of a node: accepted by Kubernetes' published schema and by kubectl, and complete without secrets."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.clouds.kubernetes import manifest
from broker.clouds.kubernetes.manifest import FINALIZER, GANG_LABEL, find_pool, make_pod, name_gang, read_record
from broker.errors import InvalidRequestError
from broker.sites.facts import Machine
from broker.sites.kubernetes import IMAGE, KubernetesContext, Pool
from broker.types import MachineSpec, NodeRequest, Offer, Placement

SOURCES = ("import json, os\n", "machine\n")
GPU_NODE = Machine(vcpus=95.5, memory_gib=1000, accelerator="H100", accelerator_count=8)
POOL = Pool(
    name="gpu", machine=GPU_NODE, node_count=2, is_spot=True, selector={"cloud.google.com/gke-spot": "true"},
    tolerations=[{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}], resource="nvidia.com/gpu",
    disk_gib=400,
)  # fmt: skip
FULL = KubernetesContext(
    name="lab", context="lab", namespace="ml", service_account="train", image_pull_secrets=("registry",),
    queue="team-a", priority_class="low", hours_max=1.5, node_selector={"team": "vision"},
)  # fmt: skip
PLAIN = KubernetesContext(name="lab", context="lab")


def make_request(*, node_count: int = 2, machine: Machine = GPU_NODE, **more: Any) -> NodeRequest:
    offer = machine.make_offer("kubernetes", "lab", zone="gpu", ondemand_usd_hour=None, spot_usd_hour=8.0)
    placement = Placement(offer=offer, is_spot=True, node_count=node_count)
    given = {"owner": "0a1b", "cluster": "train", "attempt": 3, "token": "t", "placement": placement, **more}
    return NodeRequest(**given)


def make(context: KubernetesContext = FULL, request: NodeRequest | None = None) -> dict[str, Any]:
    return dict(make_pod(context, POOL, request or make_request(), 1, sources=SOURCES, now_s=1000.0))


@pytest.mark.parametrize("context", [FULL, PLAIN], ids=["full", "plain"])
def test_pod_is_valid_by_the_published_schema(context: KubernetesContext) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    pod = make(context)
    validate.validate(pod, "1.37", strict=True)
    pod["spec"]["restartPolcy"] = "Never"
    with pytest.raises(validate.ValidationError):
        validate.validate(pod, "1.37", strict=True)


def test_pod_is_accepted_by_kubectl_without_a_server(tmp_path: Any) -> None:
    if not shutil.which("kubectl"):
        pytest.skip("kubectl is not installed")
    # `create --dry-run=client` asks a server for its resources; `annotate --local` decodes the same types without one.
    words = ["annotate", "--local", "--filename=-", "--output=json", "checked=yes", "--kubeconfig=/dev/null"]
    done = subprocess.run(["kubectl", *words], input=json.dumps(make()), capture_output=True, text=True, check=True)
    pod = json.loads(done.stdout)
    expected = make()
    expected["metadata"]["annotations"]["checked"] = "yes"
    assert pod == expected


def test_gang_shares_one_name_and_ranks_differ() -> None:
    request = make_request()
    names = [make_pod(PLAIN, POOL, request, rank, sources=SOURCES, now_s=5.0)["metadata"]["name"] for rank in (0, 1)]
    assert names == [f"{name_gang(request)}-0", f"{name_gang(request)}-1"]
    assert name_gang(replace(request, token="u")) != name_gang(request) != name_gang(replace(request, owner="x"))


@given(st.text(max_size=80), st.integers(1, 10**6))
def test_names_of_pods_are_dns_labels(cluster: str, attempt: int) -> None:
    name = f"{name_gang(make_request(cluster=cluster, attempt=attempt))}-999"
    assert len(name) <= 63
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", name)


def test_record_is_read_back_and_foreign_pods_have_none() -> None:
    record = read_record(make())
    assert record and (record["owner"], record["cluster"], record["attempt"], record["rank"]) == ("0a1b", "train", 3, 1)
    assert record["usd_hour"] == 8.0 and record["is_spot"]
    for each in ({}, {"broker/request": "no"}, {"broker/request": "[]"}, {"broker/request": "{}"}):
        assert read_record({"metadata": {"annotations": each}}) is None
    assert read_record({"metadata": {}}) is None


def test_settings_of_the_entry_are_in_the_pod() -> None:
    pod = make()
    spec, labels = pod["spec"], pod["metadata"]["labels"]
    assert (spec["serviceAccountName"], spec["imagePullSecrets"]) == ("train", [{"name": "registry"}])
    assert (spec["priorityClassName"], spec["activeDeadlineSeconds"]) == ("low", 5400)
    assert spec["nodeSelector"] == {"cloud.google.com/gke-spot": "true", "team": "vision"}
    assert labels["kueue.x-k8s.io/queue-name"] == "team-a"
    assert labels["kueue.x-k8s.io/pod-group-name"] == labels[GANG_LABEL]
    assert pod["metadata"]["annotations"]["kueue.x-k8s.io/pod-group-total-count"] == "2"
    assert pod["metadata"]["finalizers"] == [FINALIZER]
    single = make(FULL, make_request(node_count=1))["metadata"]
    assert "kueue.x-k8s.io/pod-group-name" not in single["labels"]


def test_container_asks_for_the_offer_and_no_service_token() -> None:
    spec = make(PLAIN)["spec"]
    (container,) = spec["containers"]
    assert container["image"] == IMAGE
    limits = {"cpu": "95500m", "memory": str(1000 << 30), "nvidia.com/gpu": "8"}
    assert container["resources"] == {"limits": limits, "requests": {**limits, "ephemeral-storage": "256Gi"}}
    assert spec["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": str(500 << 30)}
    assert spec["automountServiceAccountToken"] is False and "env" not in container
    assert spec["restartPolicy"] == "Never", "broker recovers the job"


def test_share_of_a_node_asks_for_its_share_of_the_disk() -> None:
    part = Machine(vcpus=11.9, memory_gib=125, accelerator="H100", accelerator_count=1)
    (container,) = make(PLAIN, make_request(machine=part))["spec"]["containers"]
    assert container["resources"]["requests"]["ephemeral-storage"] == "49Gi"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_image_of_the_task_replaces_the_default() -> None:
    request = make_request(spec=MachineSpec(image_id="docker:pytorch/pytorch:2.13"))
    assert make(PLAIN, request)["spec"]["containers"][0]["image"] == "pytorch/pytorch:2.13"


def test_task_cannot_replace_the_tags_by_labels() -> None:
    request = make_request(spec=MachineSpec(labels={"broker-owner": "other", "team": "vision", "bad": "not valid!"}))
    labels = make(PLAIN, request)["metadata"]["labels"]
    assert labels["broker-owner"] == "0a1b" and labels["team"] == "vision" and "bad" not in labels


def test_command_fits_one_argument_of_linux() -> None:
    big = ("#" * 5000, "x = 1\n" * 20000)
    words = make_pod(PLAIN, POOL, make_request(), 0, sources=big, now_s=0.0)["spec"]["containers"][0]["command"]
    assert max(map(len, words)) < 128 * 1024, "MAX_ARG_STRLEN"


def test_pool_that_the_last_check_did_not_find_is_an_invalid_request() -> None:
    larger = replace(POOL, machine=replace(GPU_NODE, vcpus=191.5))
    assert find_pool([larger, POOL], make_request()) is POOL, "the smallest that fits"
    offer = Offer(
        cloud="kubernetes", region="lab", zone="other", instance_type="x", vcpus=1, memory_gib=1, ondemand_usd_hour=0.0
    )
    request = make_request(placement=Placement(offer=offer, is_spot=False, node_count=1))
    with pytest.raises(InvalidRequestError) as caught:
        find_pool([POOL], request)
    assert "broker check kubernetes" in caught.value.hints[0]
    assert manifest.SHM_SHARE < 1


POD_CONFIG = {
    "metadata": {"labels": {"team": "nlp", GANG_LABEL: "thief"}, "annotations": {"note": "x"}},
    "spec": {
        "nodeSelector": {"disk": "ssd", "team": "thief"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "serviceAccountName": "trainer",
        "imagePullSecrets": [{"name": "mine"}],
        "securityContext": {"fsGroup": 1000},
        "volumes": [
            {"name": "nfs", "nfs": {"server": "10.0.0.1", "path": "/srv"}},
            {"name": "dshm", "emptyDir": {"medium": "Memory"}},
        ],
        "containers": [
            {
                "name": "ray-node",
                "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
                "volumeMounts": [{"name": "nfs", "mountPath": "/shared"}, {"name": "dshm", "mountPath": "/dev/shm"}],
            }
        ],
    },
}


def test_settings_of_the_task_are_merged_into_its_pod_and_do_not_replace_broker_s() -> None:
    plain = make()
    pod = make(request=make_request(spec=MachineSpec(pod_config=json.dumps(POD_CONFIG))))
    spec, (container,) = pod["spec"], pod["spec"]["containers"]
    assert pod["metadata"]["labels"] == {"team": "nlp", **plain["metadata"]["labels"]}
    assert pod["metadata"]["annotations"] == {"note": "x", **plain["metadata"]["annotations"]}
    assert spec["nodeSelector"] == {"disk": "ssd", **plain["spec"]["nodeSelector"]}
    assert spec["tolerations"] == [*plain["spec"]["tolerations"], {"key": "gpu", "operator": "Exists"}]
    assert spec["imagePullSecrets"] == [{"name": "registry"}, {"name": "mine"}]
    assert (spec["serviceAccountName"], spec["securityContext"]) == ("trainer", {"fsGroup": 1000})
    assert [each["name"] for each in spec["volumes"]] == [manifest.SHM, "nfs", "dshm"]
    assert container["env"] == [{"name": "NCCL_DEBUG", "value": "INFO"}]
    assert container["volumeMounts"] == [
        {"name": manifest.SHM, "mountPath": "/dev/shm"}, {"name": "nfs", "mountPath": "/shared"},
    ]  # fmt: skip
    (own,) = plain["spec"]["containers"]
    assert {name: container[name] for name in ("name", "image", "command", "resources")} == {
        name: own[name] for name in ("name", "image", "command", "resources")
    }
    assert plain["spec"]["nodeSelector"]["team"] == "vision", "the context's own selector is kept"


def test_volume_that_the_task_calls_shm_is_the_one_that_it_mounts() -> None:
    """Files written to it would otherwise be in the memory of broker's own volume."""
    claim = {"name": "shm", "persistentVolumeClaim": {"claimName": "data"}}
    mount = {"name": "shm", "mountPath": "/data"}
    config = {"spec": {"volumes": [claim], "containers": [{"volumeMounts": [mount]}]}}
    spec = make(request=make_request(spec=MachineSpec(pod_config=json.dumps(config))))["spec"]
    assert claim in spec["volumes"] and mount in spec["containers"][0]["volumeMounts"]
    names = [each["name"] for each in spec["volumes"]]
    assert len(set(names)) == len(names) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"spec": {"hostNetwork": true}}', "`spec.hostNetwork` is not supported"),
        ('{"spec": {"containers": [null]}}', "`spec.containers` is not supported"),
        ('{"metadata": []}', "`metadata` is not supported"),
        ("[]", "`pod_config` is not supported"),
        ("{", "not JSON"),
    ],
)
def test_settings_of_a_task_without_a_file_are_checked_too(text: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(words)):
        make(request=make_request(spec=MachineSpec(pod_config=text)))


def test_pod_with_settings_of_the_task_is_valid_by_the_published_schema() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    pod = make(request=make_request(spec=MachineSpec(pod_config=json.dumps(POD_CONFIG))))
    validate.validate(pod, "1.37", strict=True)
