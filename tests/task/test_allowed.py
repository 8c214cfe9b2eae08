"""Texts that no cloud, shell or kernel accepts are refused when read, with their position."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest

from broker.app.planning import read_task
from broker.errors import TaskError, UsageError
from broker.task import allowed
from broker.task.allowed import BUCKETS, LABELS, RULES
from broker.task.checking import check_task
from broker.task.loader import load_tasks_text
from broker.task.schema import make_schema
from broker.types import Goal, Resources, Secret, StorageMount, Task


def find_issues(text: str) -> list[tuple[int, int, str]]:
    with pytest.raises(TaskError) as caught:
        load_tasks_text(text, "x.yaml")
    return [(each.line, each.column, each.message) for each in caught.value.issues]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('run: "a\\0b"', (1, 6)),
        ('run: x\nsetup: "\\x00"', (2, 8)),
        ('run: x\nenvs: {A: "a\\u0000b"}', (2, 11)),
        ('run: x\nenvs:\n  "A\\0": b', (3, 3)),
        ('run: x\nsecrets:\n  TOKEN: "\\0"', (3, 10)),
        ('"ru\\0n": x', (1, 1)),
        ('run: x\nconfig: {docker: {run_options: ["\\0"]}}', (2, 33)),
        ('run: x\nservice: {readiness_probe: {path: /, headers: {"a\\0": b}}}', (2, 48)),
        ('run: x\nresources: {labels: {team: "\\0"}}', (2, 28)),
    ],
)
def test_zero_byte_is_refused_in_any_field_with_its_place(text: str, place: tuple[int, int]) -> None:
    (issue,) = find_issues(text)
    assert issue[:2] == place and "zero byte" in issue[2]


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ('name: "a\\nb"', (1, 7), "`name` must be"),
        ("name: ..", (1, 7), "`name` must be"),
        ("name: -x", (1, 7), "`name` must be"),
        ("envs: {" + "A" * 300 + ": b}", (1, 8), "a key of `envs`"),
        ("file_mounts: {../../etc: ./a}", (1, 15), "without `..`"),
        ("file_mounts: {/data/../../etc: s3://b}", (1, 15), "without `..`"),
        ("file_mounts: {-rf: ./a}", (1, 15), "a leading `-`"),
        ('file_mounts: {"/a\\nb": ./a}', (1, 15), "control characters"),
        ("file_mounts: {/a/" + "b" * 256 + ": ./a}", (1, 15), "a path on the node"),
        ("file_mounts: {..: ./a}", (1, 15), "a path on the node"),
        ("file_mounts: {/x: {name: My_Bucket, store: s3}}", (1, 26), "3 to 63 lower-case"),
        ("file_mounts: {/x: {name: a..b, store: gcs}}", (1, 26), "a bucket name"),
        ("file_mounts: {/x: {name: a--b, store: azure}}", (1, 26), "single `-`"),
        ("file_mounts: {/x: {name: a.b, store: r2}}", (1, 26), "3 to 63 lower-case"),
        ("file_mounts: {/x: {name: .., store: s3}}", (1, 26), "a bucket name"),
        ('file_mounts: {/x: "s3://b/\\x01"}', (1, 19), "without control characters"),
        ('workdir: "a\\x1b[31m"', (1, 10), "without control characters"),
        ("resources: {infra: aws/-x}", (1, 20), "`infra` must be"),
        ('resources: {infra: "aws/us\\x7f"}', (1, 20), "`infra` must be"),
        ("resources: {region: -x}", (1, 21), "`region` must be"),
        ("resources: {cloud: aws, zone: a b}", (1, 31), "`zone` must be"),
        ("resources: {instance_type: --help}", (1, 28), "`instance_type` must be"),
        ('resources: {image_id: "docker:a b"}', (1, 23), "`image_id` must be"),
        ('resources: {labels: {"a\\tb": c}}', (1, 22), "a key of `labels`"),
        ("resources: {labels: {a: " + "b" * 257 + "}}", (1, 25), "at most 256"),
        ("volumes: {/data: ..}", (1, 18), "a volume name"),
        ("volumes: {/a/../b: disk}", (1, 11), "without `..`"),
        ('inputs: {"s3://b/\\x01": 1GB}', (1, 10), "a folder or bucket URL"),
        ('checkpoint: {to: "s3://b/\\x01"}', (1, 18), "a bucket like"),
    ],
)
def test_invalid_text_is_refused_with_its_position(text: str, place: tuple[int, int], words: str) -> None:
    issues = find_issues(text)
    assert any(each[:2] == place and words in each[2] for each in issues), issues


def test_near_miss_of_a_name_is_suggested() -> None:
    for text, near in (
        ("name: my task!", "my-task"),
        ("file_mounts: {/x: {name: My_Bucket, store: s3}}", "my-bucket"),
    ):
        with pytest.raises(TaskError) as caught:
            load_tasks_text(text, "x.yaml")
        assert caught.value.issues[0].hint == f"did you mean `{near}`?"


@pytest.mark.parametrize("field", ["run", "setup"])
def test_script_that_the_kernel_takes_as_one_argument_loads_and_one_byte_more_does_not(field: str) -> None:
    longest = "é" * ((allowed.ARGUMENT_BYTES_MAX - 1) // 2) + "x"
    (task,) = load_tasks_text(f"{field}: {longest}", "x.yaml")
    assert getattr(task, field) == longest
    ((_, _, message),) = find_issues(f"{field}: {longest}x")
    assert "131,071 bytes" in message


def test_variable_that_the_kernel_takes_loads_and_one_byte_more_does_not() -> None:
    room = allowed.ARGUMENT_BYTES_MAX - len("NAME=") - 1
    (task,) = load_tasks_text(f"run: x\nenvs: {{NAME: {'v' * room}}}", "x.yaml")
    assert len(task.envs["NAME"]) == room
    assert find_issues(f"run: x\nenvs: {{NAME: {'v' * room}v}}")[0][:2] == (2, 8)


def test_variables_that_together_are_more_than_a_program_takes_are_refused() -> None:
    values = {f"V{number}": "v" * 100_000 for number in range(11)}
    with pytest.raises(TaskError, match="in total"):
        check_task(Task(run="x", envs=values))
    with pytest.raises(TaskError, match="in total"):
        load_tasks_text("run: x", "x.yaml", envs=values)


def test_limit_of_the_table_is_the_limit_of_this_kernel() -> None:
    """The agent passes `run` to bash in one argument."""
    import subprocess

    script = "exit 0 #" + "x" * (allowed.ARGUMENT_BYTES_MAX - 1 - len("exit 0 #"))
    assert allowed.SCRIPT.admits(script)
    assert subprocess.run(["bash", "-c", script], check=False).returncode == 0


@pytest.mark.parametrize("secret", ["secrets: {TOKEN: 'hunter2%s'}", "envs: {TOKEN: 'hunter2%s'}"])
def test_fault_in_a_secret_does_not_show_it(secret: str) -> None:
    for text in (secret.replace("'", '"') % "\\0", secret % ("x" * allowed.ARGUMENT_BYTES_MAX)):
        with pytest.raises(TaskError) as caught:
            load_tasks_text(f"run: x\n{text}", "x.yaml")
        assert "hunter2" not in "".join(
            f"{each.message} {each.hint} {each.source_line}" for each in caught.value.issues
        )


def test_label_that_one_cloud_refuses_is_a_fault_there_and_a_notice_elsewhere() -> None:
    labels = 'labels: {"aws:team": a}'
    assert find_issues(f"resources: {{infra: aws, {labels}}}\nrun: x")[0][2].startswith("a label on aws must be")
    (task,) = load_tasks_text(f"resources: {{{labels}}}\nrun: x", "x.yaml")
    (notice,) = [each for each in task.notices if each.cloud == "aws"]
    assert not notice.blocks_launch and notice.field == "labels"
    (task,) = load_tasks_text(f"resources: {{infra: gcp, {labels}}}\nrun: x", "x.yaml")
    assert [each.cloud for each in task.notices if each.field == "labels" and each.cloud != "local"] == []
    both = f"resources: {{any_of: [{{infra: aws}}, {{infra: gcp}}], {labels}}}\nrun: x"
    assert "aws" in {each.cloud for each in load_tasks_text(both, "x.yaml")[0].notices}


def test_label_of_one_alternative_is_judged_by_its_cloud() -> None:
    text = "resources: {any_of: [{infra: aws}, {infra: k8s, labels: {team: two words}}]}\nrun: x"
    assert "on kubernetes must be" in find_issues(text)[0][2]


@pytest.mark.parametrize("cloud", sorted(LABELS))
def test_labels_that_skypilot_users_write_are_taken_by_every_cloud(cloud: str) -> None:
    text = f"resources: {{infra: {cloud}, labels: {{project: my-project, cost_center: '42', empty: ''}}}}\nrun: x"
    assert load_tasks_text(text, "x.yaml")[0].resources[0].labels["cost_center"] == "42"


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "a\nb"},
        {"run": "\0"},
        {"setup": "\ud800"},
        {"workdir": "\x07"},
        {"envs": {"1A": "x"}},
        {"envs": {"A": "\0"}},
        {"secrets": {"A": Secret(value="hunter2\0")}},
        {"file_mounts": {"../x": "a"}},
        {"file_mounts": {"/x": "a\0"}},
        {"storage_mounts": (StorageMount(target="/x", name="NO", store="s3"),)},
        {"storage_mounts": (StorageMount(target="/x", source=("s3://\x01",)),)},
        {"resources": (Resources(region="-x"),)},
        {"resources": (Resources(instance_type="a b"),)},
        {"resources": (Resources(image_id="a\0"),)},
        {"resources": (Resources(labels={"\0": "x"}),)},
        {"resources": (Resources(cloud="aws", labels={"aws:x": "x"}),)},
    ],
    ids=str,
)
def test_task_made_in_python_is_held_to_the_same_table(changes: dict[str, Any]) -> None:
    with pytest.raises(TaskError) as caught:
        read_task(replace(Task(run="x"), **changes))
    assert "hunter2" not in str(caught.value.issues)


def test_mapping_from_python_is_held_to_the_same_table() -> None:
    for wrong in ({"run": "\0"}, {"run": "\ud800"}, {"run": "x", "envs": {"A": "\0"}}):
        with pytest.raises(TaskError):
            read_task(wrong)
    with pytest.raises(UsageError, match="invalid task"):
        read_task({"run": {("a",): 1}})


@pytest.mark.parametrize("text", ["\U0001f600", "\x7f \x85 \x9f", "\u2028 \ufeff \uffff", "é", "\x01\t\x1b"])
def test_mapping_keeps_every_character_that_a_program_can_be_given(text: str) -> None:
    task = read_task({"run": f"echo {text}", "envs": {"A": text}})
    assert (task.run, task.envs["A"]) == (f"echo {text}", text)


def test_every_rule_has_a_description_and_a_source() -> None:
    for kind, rule in RULES.items():
        assert rule.expected and rule.source, kind
        re.compile(f"^(?:{rule.pattern})$")
        if rule not in (allowed.SCRIPT, allowed.ENV_VALUE):
            assert not rule.admits("a\nb") and not rule.admits("a\x1bb"), kind
        assert not rule.admits("a\0b") and not rule.admits("a\ud800"), kind


def test_the_schema_has_the_same_patterns() -> None:
    definitions = make_schema()["$defs"]
    task, resources = definitions["task"]["properties"], definitions["resources"]["properties"]
    assert task["run"]["pattern"] == f"^(?:{allowed.SCRIPT.pattern})$"
    assert task["run"]["maxLength"] == allowed.ARGUMENT_BYTES_MAX - 1
    assert task["envs"]["propertyNames"]["pattern"] == f"^(?:{allowed.ENV_NAME.pattern})$"
    assert task["file_mounts"]["propertyNames"]["pattern"] == f"^(?:{allowed.TARGET.pattern})$"
    assert resources["labels"]["propertyNames"]["pattern"] == f"^(?:{allowed.LABEL_KEY.pattern})$"
    assert definitions["storage"]["properties"]["name"]["pattern"] == f"^(?:{allowed.BUCKET.pattern})$"


@pytest.mark.parametrize(("store", "name"), [("s3", "my.bucket-1"), ("gcs", "my_bucket.example.com"), ("azure", "a-b"),
                                             ("r2", "a-b-c")])  # fmt: skip
def test_bucket_name_that_its_store_admits_loads(store: str, name: str) -> None:
    assert BUCKETS[store].admits(name)
    load_tasks_text(f"run: x\nfile_mounts: {{/x: {{name: {name}, store: {store}}}}}", "x.yaml")


@pytest.mark.parametrize("target", ["~/data", "/data", "data/sub", "./x", "/mnt/a b", "~/.netrc", "/..a/b..", "/data/"])
def test_valid_mount_target_loads(target: str) -> None:
    load_tasks_text(f"run: x\nfile_mounts: {{'{target}': s3://bucket}}", "x.yaml")


def test_everything_in_the_price_book_can_be_named_in_a_task(tmp_path: Any) -> None:
    from broker.catalog.bundle import open_book

    book = open_book(tmp_path)
    offers = [offer for cloud in book.clouds for offer in book.list_offers(cloud)]
    assert len(offers) > 50_000
    for name in {each.instance_type for each in offers}:
        assert allowed.INSTANCE_TYPE.admits(name), name
    for name in {each.region for each in offers} | {each.zone for each in offers if each.zone}:
        assert allowed.PLACE.admits(name), name


@pytest.mark.parametrize("name", ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "PASSWORD"])
def test_credential_among_envs_is_noted_and_not_shown(name: str) -> None:
    (task,) = load_tasks_text(f"run: x\nenvs:\n  {name}: hunter2", "x.yaml")
    (notice,) = [each for each in task.notices if each.field == "envs"]
    assert not notice.blocks_launch and "`secrets`" in str(notice.hint)
    assert (notice.origin.line, notice.origin.column) == (3, 3)
    assert "hunter2" not in f"{notice.message} {notice.hint} {notice.source_line}"


@pytest.mark.parametrize("name", ["TOKENS", "SECRET_SANTA", "KEY", "MAX_TOKENS_KEY", "TOKENIZER"])
def test_other_variables_do_not_count_as_credentials(name: str) -> None:
    (task,) = load_tasks_text(f"run: x\nenvs: {{{name}: a}}", "x.yaml")
    assert task.notices == ()


def test_secret_on_the_line_of_another_fault_or_notice_is_not_shown() -> None:
    line = "{run: x, secrets: {A: hunter2, B: }, envs: {HF_TOKEN: hunter3}, "
    with pytest.raises(TaskError) as caught:
        load_tasks_text(line + "nonsense: 1}", "x.yaml")
    assert "***" in str(caught.value.issues[0].source_line)
    (task,) = load_tasks_text(line + "num_nodes: 1}", "x.yaml")
    assert {each.field for each in task.notices} == {"secrets", "envs"}
    for shown in (*caught.value.issues, *task.notices):
        assert "hunter" not in str(shown.source_line)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Task(num_nodes=0), "`num_nodes` must be a whole number from 1"),
        (Task(num_nodes=1.5), "`num_nodes` must be a whole number from 1"),  # type: ignore[arg-type]
        (Task(resources=()), "`resources` must have at least one alternative"),
        (Task(resources=(Resources(accelerator="T4", accelerator_count=0),)), "`accelerators` must have a positive"),
        (Task(resources=(Resources(accelerator_count=-1),)), "`accelerators` must have a positive"),
        (Task(resources=(Resources(disk_size_gib=0),)), "`disk_size` must be a positive number"),
        (Task(resources=(Resources(usd_hour_max=math.nan),)), "`max_hourly_cost` must be a positive number"),
        (Task(goal=Goal(work_hours=math.inf)), "`goal.work` must be a positive number"),
        (Task(goal=Goal(work_hours=1.0, budget_usd=-5.0)), "`goal.budget` must be a positive number"),
        (Task(max_duration_s=0.0), "`max_duration` must be a positive number"),
        (Task(pod_config="{"), "`pod_config` must be a JSON object"),
        (Task(pod_config="[]"), "`pod_config` must be a JSON object"),
    ],
)
def test_values_that_no_file_can_contain_are_refused_from_python(task: Task, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        check_task(task)
