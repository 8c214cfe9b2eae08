"""`broker plan` for the kinds of task files that SkyPilot users have."""

from __future__ import annotations

import pytest

from tests.cli.conftest import Shell


def test_kubernetes_before_its_offers_are_imported_is_a_plan_without_places(shell: Shell) -> None:
    text = "name: smoke\nresources: {infra: k8s, accelerators: 'MI300:1'}\nrun: rocm-smi\n"
    path = shell.write("k8s.yaml", text)
    done = shell.run("plan", path)
    assert "Task smoke: the catalog has no offers of kubernetes yet" in done.stderr
    assert "`broker catalog import DIR`" in done.stderr
    (data,) = shell.read_json("plan", path)
    assert data["choice"] is None and data["task"] == "smoke"
    both = shell.write(
        "both.yaml", "resources: {any_of: [{infra: k8s}, {infra: aws}], accelerators: 'H100:8'}\nrun: x\n"
    )
    (data,) = shell.read_json("plan", both)
    assert data["choice"]["placement"]["offer"]["cloud"] == "aws"
    noted = [line for line in shell.run("plan", both).stderr.splitlines() if "kubernetes" in line]
    assert len(noted) == 1 and "both.yaml:1:" in noted[0] and "ignoring the alternative" in noted[0]
    assert "run `broker check kubernetes`" in noted[0]


@pytest.mark.parametrize(
    ("accelerators", "name", "count"),
    [("T4:0.5", "T4", 1), ("Inferentia:6", "Inferentia2", 6), ("MI300:8", "MI300X", 8)],
)
def test_parts_of_cards_and_other_names_find_a_machine(
    shell: Shell, accelerators: str, name: str, count: float
) -> None:
    path = shell.write("t.yaml", f"resources: {{accelerators: '{accelerators}'}}\nrun: x\n")
    (data,) = shell.read_json("plan", path)
    offer = data["choice"]["placement"]["offer"]
    assert (offer["accelerator"], offer["accelerator_count"]) == (name, count)


def test_a_job_group_is_planned_as_a_whole(shell: Shell) -> None:
    header = "name: group\nexecution: parallel\nprimary_tasks: [trainer]\n---\n"
    tasks = "name: trainer\nresources: {cpus: 4}\nrun: x\n---\nname: judge\nresources: {cpus: 4}\nrun: x\n"
    data = shell.read_json("plan", shell.write("group.yaml", header + tasks))
    assert len(data["tasks"]) == 2 and data["usd"] > 0


def test_an_elastic_job_group_on_kubernetes_and_a_tpu_node_have_a_plan(shell: Shell) -> None:
    recovery = "{strategy: DYNAMIC_NODE_SET, min_nodes: 1000}"
    task = f"resources: {{infra: k8s, cpus: 0.1, memory: 0.1, job_recovery: {recovery}}}\nnum_nodes: 1500\nrun: x\n"
    path = shell.write("elastic.yaml", f"name: all\nexecution: parallel\n---\nname: a\n{task}---\nname: b\n{task}")
    assert {each["task"] for each in shell.read_json("plan", path)} == {"a", "b"}
    node = "{instance_type: n1-highmem-8, accelerators: tpu-v2-8, accelerator_args: {tpu_vm: false}}"
    (data,) = shell.read_json("plan", shell.write("node.yaml", f"resources: {node}\nrun: x\n"))
    assert data["choice"]["placement"]["offer"]["instance_type"] == "tpu-v2-8"


def test_the_host_of_attached_cards_may_be_named_alone(shell: Shell) -> None:
    resources = "{infra: gcp, instance_type: n1-standard-4, accelerators: 'T4:1'}"
    (data,) = shell.read_json("plan", shell.write("host.yaml", f"resources: {resources}\nrun: x\n"))
    assert data["choice"]["placement"]["offer"]["instance_type"] == "n1-standard-4+1xT4"
