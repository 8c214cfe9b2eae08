"""The file of Kubernetes contexts, and the offers of their pools."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import TaskError
from broker.sites.facts import Machine
from broker.sites.kubernetes import (
    IMAGE,
    KubernetesContext,
    Pool,
    divide_machine,
    list_offers,
    read_contexts,
    read_pools,
    write_pools,
)

NODE = Machine(vcpus=7.9, memory_gib=30)
CARDS = Machine(vcpus=95.5, memory_gib=1000, accelerator="H100", accelerator_count=8)
ARN = "arn:aws:eks:eu-west-1:123456789012:cluster/train"


def read(tmp_path: Path, text: str) -> dict[str, KubernetesContext]:
    path = tmp_path / "kubernetes.yaml"
    path.write_text(text)
    return dict(read_contexts(path, tmp_path / "facts.json"))


def test_entries_are_named_as_contexts(tmp_path: Path) -> None:
    found = read(tmp_path, f"{ARN}: {{namespace: ml, queue: team-a}}\nkind-a@b: {{}}\nshort: {{context: {ARN}}}\n")
    assert list(found) == [ARN, "kind-a@b", "short"]
    assert (found[ARN].namespace, found[ARN].queue, found[ARN].image) == ("ml", "team-a", IMAGE)
    assert (found["short"].context, found["kind-a@b"].namespace) == (ARN, "default")


def test_empty_file_uses_the_context_of_the_last_check(tmp_path: Path) -> None:
    assert read(tmp_path, "") == {}
    write_pools(tmp_path / "facts.json", {"minikube": "ml"}, {})
    assert read(tmp_path, "") == {"minikube": KubernetesContext(name="minikube", context="minikube", namespace="ml")}
    assert read(tmp_path, "lab: {}\nminikube: {}\n")["minikube"].namespace == "ml"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("lab:\n  namespace: Not_Valid\n", 2),
        ("lab:\n  namespaces: ml\n", 2),
        ("lab:\n  usd_hour: cheap\n", 2),
        ("- a\n", 1),
    ],
)
def test_mistakes_are_reported_with_their_position(tmp_path: Path, text: str, line: int) -> None:
    with pytest.raises(TaskError) as caught:
        read(tmp_path, text)
    assert caught.value.issues[0].line == line


def test_pools_are_read_as_they_were_written(tmp_path: Path) -> None:
    pool = Pool(name="gpu", machine=CARDS, node_count=2, is_spot=True, selector={"a": "b"}, resource="nvidia.com/gpu")
    write_pools(tmp_path / "facts.json", {"lab": "ml"}, {"lab": [pool]})
    (found,) = read_pools(tmp_path / "facts.json")["lab"]
    assert found.machine == CARDS and found.is_spot and dict(found.selector) == {"a": "b"}
    (tmp_path / "facts.json").write_text("{")
    assert read_pools(tmp_path / "facts.json") == {}


def test_offers_cost_their_share_and_zero_without_a_price(tmp_path: Path) -> None:
    facts = tmp_path / "facts.json"
    pools = [
        Pool(name="cpu", machine=NODE, node_count=3, selector={}),
        Pool(name="gpu", machine=CARDS, node_count=1, is_spot=True, selector={}, resource="nvidia.com/gpu"),
    ]
    write_pools(facts, {"lab": "ml"}, {"lab": pools})
    offers = list_offers(read(tmp_path, "lab: {usd_hour: {gpu: 16}}\n"), facts)
    cpu = [each for each in offers if each.zone == "cpu"]
    assert [each.vcpus for each in cpu] == [7.9, 4, 2, 1]
    assert all((each.ondemand_usd_hour, each.spot_usd_hour) == (0.0, None) for each in cpu)
    gpu = {each.accelerator_count: each for each in offers if each.zone == "gpu"}
    assert {count: each.spot_usd_hour for count, each in gpu.items()} == {8: 16.0, 4: 8.0, 2: 4.0, 1: 2.0}
    assert all(each.ondemand_usd_hour is None and each.accelerator == "H100" for each in gpu.values())
    only = list_offers(read(tmp_path, "lab: {pools: gpu}\n"), facts)
    assert {each.zone for each in only} == {"gpu"}


@given(st.floats(0.5, 512), st.floats(1, 4096), st.integers(0, 16))
def test_parts_of_a_node_fit_into_it(vcpus: float, memory_gib: float, cards: int) -> None:
    machine = Machine(vcpus=vcpus, memory_gib=memory_gib, accelerator="T4" if cards else None, accelerator_count=cards)
    parts = list(divide_machine(machine))
    assert parts[0] == (1.0, machine)
    assert len({each.name for _, each in parts}) == len(parts) or cards, "no size is offered twice"
    for share, part in parts[1:]:
        count = round(1 / share - 0.5)
        assert 0 < share < 1
        assert part.vcpus * count <= vcpus + 1e-6 and part.memory_gib * count <= memory_gib + 1e-6
        assert part.accelerator_count * count <= cards
