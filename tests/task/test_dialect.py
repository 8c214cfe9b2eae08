"""SkyPilot's dialect: forms of real task files, and the result of each."""

from __future__ import annotations

import pytest

from broker.errors import TaskError
from broker.task.accelerators import read_accelerator, resolve_accelerators
from broker.task.loader import load_tasks_text
from broker.task.measures import Duration
from broker.task.override import override_resources
from broker.types import AcceleratorFigures, Autostop, DataSet, JobRecovery, Quantity, Resources, Task

FIGURES = {
    name: AcceleratorFigures(name=name, memory_gib=gib)
    for name, gib in {
        "A100": 40.0, "A100-80GB": 80.0, "H100": 80.0, "H200": 141.0, "MI300X": 192.0, "T4": 16.0, "TPU-v5e": 16.0,
    }.items()
}  # fmt: skip


def load(text: str) -> Task:
    (task,) = load_tasks_text(f"run: x\n{text}", "task.yaml")
    return task


def load_resources(text: str) -> tuple[Resources, ...]:
    return load(f"resources: {text}").resources


def list_places(text: str) -> list[tuple[str | None, str | None, str | None]]:
    return [(each.cloud, each.region, each.zone) for each in load_resources(text)]


def list_accelerators(text: str) -> list[tuple[str | None, float]]:
    task = resolve_accelerators(load(f"resources: {{accelerators: {text}}}"), FIGURES)
    return [(each.accelerator, each.accelerator_count) for each in task.resources]


def find_message(text: str) -> str:
    with pytest.raises(TaskError) as caught:
        load(text)
    return "\n".join(f"{each.line}:{each.column} {each.message} | {each.hint}" for each in caught.value.issues)


@pytest.mark.parametrize(
    ("infra", "place"),
    [
        ("aws", ("aws", None, None)),
        ("AWS/us-east-1", ("aws", "us-east-1", None)),
        ("aws/us-east-1/us-east-1a", ("aws", "us-east-1", "us-east-1a")),
        ("aws/*/us-east-1a", ("aws", None, "us-east-1a")),
        ("'*'", (None, None, None)),
        ("'*/us-east-1'", (None, "us-east-1", None)),
        ("k8s/arn:aws:eks:us-east-1:123:cluster/mine", ("kubernetes", "arn:aws:eks:us-east-1:123:cluster/mine", None)),
        ("slurm/big/gpu", ("slurm", "big", "gpu")),
        ("lambda/", ("lambda", None, None)),
    ],
)
def test_infra_names_a_place(infra: str, place: tuple[str | None, ...]) -> None:
    assert list_places(f"{{infra: {infra}}}") == [place]


def test_infra_of_an_alternative_replaces_the_whole_place_outside() -> None:
    assert list_places("{infra: aws/us-east-1, any_of: [{infra: gcp}, {}]}") == [
        ("gcp", None, None),
        ("aws", "us-east-1", None),
    ]


def test_finer_place_of_an_alternative_keeps_the_cloud_outside() -> None:
    assert list_places("{cloud: gcp, any_of: [{zone: us-central1-a}, {region: us-east1}]}") == [
        ("gcp", None, "us-central1-a"),
        ("gcp", "us-east1", None),
    ]


def test_misspelt_cloud_gets_the_near_miss() -> None:
    assert "did you mean `lambda`?" in find_message("resources: {infra: lamda/us-east-1}")
    assert "did you mean `azure`?" in find_message("resources: {cloud: azur}")


def test_alternatives_take_over_accelerators_and_labels_from_outside() -> None:
    resources = load_resources(
        "{accelerators: {H100: 8, A100: 8}, labels: {team: a}, any_of: [{use_spot: true, labels: {kind: s}},"
        " {use_spot: false}]}"
    )
    assert [(each.accelerator, each.use_spot, dict(each.labels)) for each in resources] == [
        ("H100", True, {"team": "a", "kind": "s"}),
        ("A100", True, {"team": "a", "kind": "s"}),
        ("H100", False, {"team": "a"}),
        ("A100", False, {"team": "a"}),
    ]


def test_ordered_alternatives_keep_their_order() -> None:
    task = load("resources: {ordered: [{accelerators: T4}, {accelerators: A100}], use_spot: true}")
    assert task.is_ordered
    assert [each.accelerator for each in task.resources] == ["T4", "A100"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("H100", [("H100", 1)]),
        ("h100:8", [("H100", 8)]),
        ("A100-40GB:4", [("A100", 4)]),
        ("a100-80gb", [("A100-80GB", 1)]),
        ("H100-80GB:2", [("H100", 2)]),
        ("T4:0.5", [("T4", 0.5)]),
        ("{A100: 8}", [("A100", 8)]),
        ("{A100:8, H100:8}", [("A100", 8), ("H100", 8)]),
        ("{'A100:1', T4}", [("A100", 1), ("T4", 1)]),
        ("['A100-40GB:1', 'T4:1']", [("A100", 1), ("T4", 1)]),
        ("[{T4: 1}, 'A100:2', {H100: null}]", [("T4", 1), ("A100", 2), ("H100", 1)]),
        ("tpu-v5e-8", [("TPU-v5e", 8)]),
        ("tpu-v5litepod-4", [("TPU-v5e", 4)]),
        ("80GB", [("A100-80GB", 1), ("H100", 1)]),
        ("80GB+:8", [("A100-80GB", 8), ("H100", 8), ("H200", 8), ("MI300X", 8)]),
        ("nvidia:141GB+:8", [("H200", 8)]),
        ("amd:80GB+", [("MI300X", 1)]),
    ],
)
def test_accelerators_as_people_write_them(text: str, found: list[tuple[str, float]]) -> None:
    assert list_accelerators(text) == found


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("MI300:8", ["MI300X"]),
        ("mi300x", ["MI300X"]),
        ("A100-80:8", ["A100-80GB"]),
        ("Inferentia:6", ["Inferentia", "Inferentia2"]),
        ("inf2", ["Inferentia2"]),
        ("trn1:16", ["Trainium"]),
        ("A100-80GB-SXM4:8", ["A100-80GB"]),
        ("H100-MEGA-80GB:8", ["H100"]),
        ("Radeon MI25:1", ["MI25"]),
        ("Radeon Pro V520", ["Radeon-Pro-V520"]),
        ("Gaudi HL-205:8", ["Gaudi"]),
    ],
)
def test_other_names_of_an_accelerator_are_understood(text: str, names: list[str]) -> None:
    others = ("Inferentia", "Inferentia2", "Trainium", "MI25", "Radeon-Pro-V520", "Gaudi")
    devices = {name: AcceleratorFigures(name=name, memory_gib=32) for name in others}
    task = resolve_accelerators(load(f"resources: {{accelerators: '{text}'}}"), {**FIGURES, **devices})
    assert [each.accelerator for each in task.resources] == names and not task.notices


def test_a_note_says_that_a_fraction_of_a_card_uses_a_whole_one() -> None:
    task = load("resources: {accelerators: 'T4:0.5'}")
    assert [(each.field, each.blocks_launch) for each in task.notices] == [("accelerators", False)]
    assert "broker exec" in (task.notices[0].hint or "")
    assert not load("resources: {accelerators: 'T4:1'}").notices


@pytest.mark.parametrize("text", ["'T4:1.5'", "{T4: 1.5}", "[H100, 'T4:1.5']", "{'T4:3': 0.5}"])
def test_more_than_one_accelerator_is_a_whole_number_of_them(text: str) -> None:
    with pytest.raises(TaskError) as refused:
        load(f"resources: {{accelerators: {text}}}")
    (issue,) = refused.value.issues
    assert "`T4:1.5`" in issue.message and (issue.line, issue.column) == (2, 13)
    assert "`T4:1` or `T4:2`" in (issue.hint or "") and "`T4:0.5`" in (issue.hint or "")
    with pytest.raises(TaskError, match=r"T4:1\.5"):
        load(f"resources: {{any_of: [{{accelerators: {text}}}, {{cpus: 4}}]}}")
    with pytest.raises(TaskError, match=r"T4:1\.5"):
        override_resources(load(""), accelerators="T4:1.5")


def test_a_tpu_node_is_planned_as_a_tpu_vm_and_refused_at_launch() -> None:
    node = "accelerators: tpu-v2-8, accelerator_args: {tpu_vm: false}"
    task = load(f"resources: {{instance_type: n1-highmem-8, {node}}}")
    (resources,) = task.resources
    assert (resources.accelerator, resources.accelerator_count, resources.instance_type) == ("TPU-v2", 4, None)
    assert ("instance_type", True) in [(each.field, each.blocks_launch) for each in task.notices]
    kept = load(f"resources: {{instance_type: n1-highmem-8, {node.replace('tpu-v2-8', 'T4')}}}")
    assert kept.resources[0].instance_type == "n1-highmem-8"


def test_unknown_accelerator_is_skipped_only_if_another_remains() -> None:
    task = resolve_accelerators(load("resources: {accelerators: {H10O: 8, H100: 8}}"), FIGURES)
    assert [each.accelerator for each in task.resources] == ["H100"]
    assert [(each.field, each.hint, each.blocks_launch) for each in task.notices] == [
        ("accelerators", "did you mean `H100`?", False)
    ]
    alone = resolve_accelerators(load("resources: {accelerators: MI210}"), FIGURES)
    assert [each.accelerator for each in alone.resources] == ["MI210"]


def test_accelerator_with_offers_but_without_figures_is_kept() -> None:
    asked = load("resources: {accelerators: {rtx4090: 1, RTX5090-32GB: 2, H100: 8}}")
    task = resolve_accelerators(asked, FIGURES, offered=["H100", "RTX4090", "RTX5090"])
    assert [each.accelerator for each in task.resources] == ["RTX4090", "RTX5090", "H100"]
    assert not task.notices


def test_accelerator_that_only_clouds_without_prices_offer_is_explained() -> None:
    asked = load("resources: {infra: vast, accelerators: {A4000: 1, H100: 8}}")
    task = resolve_accelerators(asked, FIGURES, sellers={"RTXA4000": ("runpod", "vast")})
    assert [each.accelerator for each in task.resources] == ["H100"]
    (notice,) = task.notices
    assert notice.message == "`accelerators`: the catalog has no offers of `RTXA4000`; ignoring it"
    assert notice.hint == "add prices with `broker catalog update --cloud vast`"


@pytest.mark.parametrize(
    ("text", "quantity"),
    [
        ("{memory: 32}", Quantity(value=32)),
        ("{memory: 32+}", Quantity(value=32, is_minimum=True)),
        ("{memory: 64GB}", Quantity(value=64)),
        ("{memory: 64Gi+}", Quantity(value=64, is_minimum=True)),
        ("{memory: 0.5TB}", Quantity(value=512)),
        ("{memory: 1048576KB}", Quantity(value=1)),
    ],
)
def test_memory_in_every_unit(text: str, quantity: Quantity) -> None:
    assert load_resources(text)[0].memory_gib == quantity


@pytest.mark.parametrize("text", ["{memory: 4x}", "{cpus: 4+, memory: ' 4x '}"])
def test_memory_by_vcpu_is_a_ratio_of_each_offer(text: str) -> None:
    (found,) = load_resources(text)
    assert (found.memory_gib, found.memory_gib_per_vcpu) == (None, 4)


def test_memory_of_an_alternative_replaces_a_ratio_outside() -> None:
    first, second = load_resources("{memory: 4x, any_of: [{memory: 32}, {cpus: 2}]}")
    assert (first.memory_gib, first.memory_gib_per_vcpu) == (Quantity(value=32), None)
    assert (second.memory_gib, second.memory_gib_per_vcpu) == (None, 4)


@pytest.mark.parametrize(
    ("text", "autostop"),
    [
        ("true", Autostop(idle_minutes=5)),
        ("false", None),
        ("10", Autostop(idle_minutes=10)),
        ("0", Autostop(idle_minutes=0)),
        ("10m", Autostop(idle_minutes=10)),
        ("'90s'", Autostop(idle_minutes=2)),
        ("2h", Autostop(idle_minutes=120)),
        ("{idle_minutes: 3, down: true}", Autostop(idle_minutes=3, is_down=True)),
        ("{down: true}", Autostop(idle_minutes=5, is_down=True)),
    ],
)
def test_autostop_in_every_form(text: str, autostop: Autostop | None) -> None:
    assert load(f"resources: {{autostop: {text}}}").autostop == autostop


@pytest.mark.parametrize(
    ("text", "recovery"),
    [
        ("FAILOVER", JobRecovery(strategy="failover")),
        ("none", JobRecovery()),
        ("DYNAMIC_NODE_SET", JobRecovery(nodes_min=1)),
        ("{strategy: DYNAMIC_NODE_SET, min_nodes: 6}", JobRecovery(nodes_min=6)),
        ("{health_check: false}", JobRecovery(checks_health=False)),
        ("{cache_setup: true}", JobRecovery(caches_setup=True)),
        ("{strategy: EAGER_NEXT_REGION, max_restarts_on_errors: 3}",
         JobRecovery(strategy="eager_next_region", max_restarts_on_errors=3)),
        ("{recover_on_exit_codes: 33}", JobRecovery(recover_on_exit_codes=(33,))),
        ("{recover_on_exit_codes: [33, 34], stall_timeout: 10m}",
         JobRecovery(recover_on_exit_codes=(33, 34), stall_timeout_s=600)),
    ],
)  # fmt: skip
def test_job_recovery_in_every_form(text: str, recovery: JobRecovery) -> None:
    assert load(f"resources: {{job_recovery: {text}}}").recovery == recovery


@pytest.mark.parametrize(
    ("text", "strategy", "idle_minutes"),
    [
        ("{job_recovery: failover, autostop: 5, any_of: [{infra: aws}, {infra: gcp}]}", "failover", 5),
        ("{any_of: [{infra: aws}, {infra: gcp, job_recovery: cheapest, autostop: 7}]}", "cheapest", 7),
        ("{job_recovery: failover, autostop: 5, ordered: [{infra: aws, job_recovery: cheapest, autostop: 7}]}",
         "cheapest", 7),
        ("{job_recovery: failover, autostop: 5, ordered: [{infra: aws}, {job_recovery: cheapest, autostop: 7}]}",
         "failover", 5),
        ("{autostop: 5, any_of: [{infra: aws, autostop: false}]}", None, None),
    ],
)  # fmt: skip
def test_recovery_and_autostop_of_the_first_alternative_that_has_them_are_the_tasks(
    text: str, strategy: str | None, idle_minutes: int | None
) -> None:
    task = load(f"resources: {text}")
    assert task.recovery.strategy == strategy
    assert (task.autostop and task.autostop.idle_minutes) == idle_minutes


def test_misspelt_words_of_lists_get_the_near_miss() -> None:
    assert "did you mean `failover`?" in find_message("resources: {job_recovery: failovr}")
    assert "did you mean `MOUNT_CACHED`?" in find_message("file_mounts: {/x: {name: b, mode: MOUNT_CACHE}}")
    assert "did you mean `ultra`?" in find_message("resources: {disk_tier: ultr}")
    assert "did you mean `min_replicas`?" in find_message("service: {replica_policy: {min_replica: 1}}")


def test_image_by_region_plans_those_regions_only() -> None:
    resources = load_resources("{infra: aws, image_id: {us-east-1: ami-1, us-west-2: ami-2}}")
    assert [(each.cloud, each.region, each.image_id) for each in resources] == [
        ("aws", "us-east-1", "ami-1"),
        ("aws", "us-west-2", "ami-2"),
    ]
    inside = load_resources("{infra: aws/us-west-2, image_id: {us-east-1: ami-1, us-west-2: ami-2}}")
    assert [(each.region, each.image_id) for each in inside] == [("us-west-2", "ami-2")]


def test_old_names_are_read_and_exclude_the_new_ones() -> None:
    assert load_resources("{gpus: H100:8}")[0].accelerator == "H100"
    assert load("resources: {spot_recovery: FAILOVER}").recovery == JobRecovery(strategy="failover")
    assert "keep `accelerators`" in find_message("resources: {gpus: T4, accelerators: T4}")


def test_inputs_and_outputs_have_sizes() -> None:
    task = load("inputs: {gs://bucket/imagenet: 70}\noutputs: {model-dir: 0.1, s3://b/c: 1TB}")
    assert task.inputs == (DataSet(url="gs://bucket/imagenet", size_gib=70),)
    assert task.outputs == (DataSet(url="model-dir", size_gib=0.1), DataSet(url="s3://b/c", size_gib=1024))


def test_labels_keep_the_text_they_were_written_as() -> None:
    (found,) = load_resources("{labels: {version: 1.10, id: 0755, yes: true}}")
    assert found.labels == {"version": "1.10", "id": "0755", "yes": "true"}


@pytest.mark.parametrize(("text", "count"), [("0o17", 15), ("0x10", 16), ("+3", 3), ("2.0", 2)])
def test_numbers_by_yaml_1_2(text: str, count: int) -> None:
    assert load(f"num_nodes: {text}").num_nodes == count


@pytest.mark.parametrize("text", [".inf", ".nan", "1_000", "1e", "0o9", "0xg", "+", "."])
def test_no_numbers_by_yaml_1_2(text: str) -> None:
    assert "`num_nodes` must be" in find_message(f"num_nodes: {text}")


def test_merge_keys_share_fields() -> None:
    text = "x: &x {cpus: 4, memory: 8}\n"
    with pytest.raises(TaskError, match="unknown field `x`"):
        load(text)
    resources = load_resources("{any_of: [&first {cpus: 4, infra: aws}, {<<: *first, infra: gcp}]}")
    assert [(each.cloud, each.cpus) for each in resources] == [("aws", Quantity(value=4)), ("gcp", Quantity(value=4))]


def test_variables_fill_paths_but_not_commands() -> None:
    task = load(
        "envs: {SIZE: 8b, BUCKET: mine}\nsecrets: {KEY: k}\n"
        "setup: echo $SIZE\n"
        "file_mounts:\n  /model-${SIZE}: s3://$BUCKET/llama-$SIZE-$OTHER\n  /out: {name: $BUCKET, store: s3}\n"
        "service: {readiness_probe: {path: /, post_data: {model: $SIZE}}, replicas: 1}"
    )
    first, second = task.storage_mounts
    assert (first.target, first.source) == ("/model-8b", ("s3://mine/llama-8b-$OTHER",))
    assert (second.name, second.store, second.mode) == ("mine", "s3", "MOUNT")
    assert task.setup == "echo $SIZE"


def test_given_values_fill_paths_before_those_of_the_file() -> None:
    (task,) = load_tasks_text(
        "envs: {BUCKET: }\nfile_mounts: {/data: 's3://${BUCKET}'}\nrun: x", "t.yaml", envs={"BUCKET": "given"}
    )
    assert task.storage_mounts[0].source == ("s3://given",)


def test_filled_in_paths_cannot_blow_a_small_file_up() -> None:
    mounts = "\n".join(f"  /a{number}: $A$A$A" for number in range(500))
    with pytest.raises(TaskError, match="too large"):
        load(f"envs: {{A: {'x' * 9000}}}\nfile_mounts:\n{mounts}")


def test_alternatives_are_bounded() -> None:
    many = ", ".join(f"{{cpus: {count}}}" for count in range(1, 60))
    names = ", ".join(f"A{number}" for number in range(60))
    assert "alternatives" in find_message(f"resources: {{accelerators: {{{names}}}, any_of: [{many}]}}")


def test_issues_are_bounded() -> None:
    with pytest.raises(TaskError) as caught:
        load("\n".join(f"nonsense{number}: 1" for number in range(5000)))
    assert len(caught.value.issues) == 100


def test_nested_file_is_refused_aliases_included() -> None:
    deep = "\n".join([f"a0: &a0 {'[' * 30}{']' * 30}", f"b: {'[' * 40}*a0{']' * 40}"])
    with pytest.raises(TaskError, match="nested more than 60 levels deep"):
        load(deep)


def test_unknown_tag_is_refused_with_its_position() -> None:
    assert "2:7 unsupported tag `!!python/object:os.system`" in find_message("name: !!python/object:os.system x")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tpu-v5p-8", ("TPU-v5p", 4.0)),  # cores, two of each chip
        ("tpu-v4-8", ("TPU-v4", 4.0)),
        ("tpu-v5e-8", ("TPU-v5e", 8.0)),  # chips
        ("tpu-v3-8:2", ("TPU-v3", 8.0)),
        ("A100:0.5", ("A100", 0.5)),
        ("H100", ("H100", 1.0)),
    ],
)
def test_names_of_accelerators_say_how_many(text: str, expected: tuple[str, float]) -> None:
    assert read_accelerator(text) == expected


@pytest.mark.parametrize(
    ("asked", "names"), [("80GB", ["exact", "nearly"]), ("80GB+", ["exact", "nearly", "more"]), ("96GB+", ["more"])]
)
def test_memory_is_compared_as_it_is_sold(asked: str, names: list[str]) -> None:
    """A card of "80 GB" is reported with 79; one with 70 is another."""
    sizes = {"exact": 80.0, "nearly": 79.0, "less": 70.0, "more": 96.0}
    figures = {
        name: AcceleratorFigures(
            name=name, memory_gib=gib, bf16_dense_tflops=1.0, fp32_tflops=1.0, memory_bandwidth_gbs=1.0, nvlink_gbs=0.0
        )
        for name, gib in sizes.items()
    }
    task = Task(run="x", resources=(Resources(accelerator=asked),))
    assert [each.accelerator for each in resolve_accelerators(task, figures).resources] == names


@pytest.mark.parametrize(
    ("text", "bare_unit", "seconds"),
    [("1w", "m", 604800.0), ("1d", "m", 86400.0), ("90", "m", 5400.0), ("90", "s", 90.0), ("1h 30m", "s", 5400.0)],
)
def test_durations_have_the_unit_that_is_written_or_else_the_usual_one(
    text: str, bare_unit: str, seconds: float
) -> None:
    assert Duration(bare_unit=bare_unit).read_value(text) == seconds
