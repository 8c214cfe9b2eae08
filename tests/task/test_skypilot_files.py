"""Files that others wrote for SkyPilot: unusual but valid forms load, and other files are refused in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.errors import TaskError
from broker.task.loader import load_tasks, load_tasks_text
from broker.types import Task


def load(text: str) -> Task:
    (task,) = load_tasks_text(text, "task.yaml")
    return task


def find_faults(text: str) -> list[str]:
    with pytest.raises(TaskError) as caught:
        load_tasks_text(text, "task.yaml")
    return [f"{each.line} {each.message} | {each.hint}" for each in caught.value.issues]


@pytest.mark.parametrize(
    ("ports", "expected"),
    [
        ("'8000,9000'", ("8000", "9000")),
        ("' 8080 '", ("8080",)),
        ("[8080, '9000-9010, 8080']", ("8080", "9000-9010")),
        ("[]", ()),
    ],
)
def test_ports_with_commas_and_spaces_open_each_port_once(ports: str, expected: tuple[str, ...]) -> None:
    assert (load(f"run: x\nresources: {{ports: {ports}}}").resources[0].ports or ()) == expected


@pytest.mark.parametrize("text", ["'A100:8 '", "'A100: 8'", "' A100 : 8'"])
def test_spaces_around_an_accelerator_do_not_matter(text: str) -> None:
    (found,) = load(f"run: x\nresources: {{accelerators: {text}}}").resources
    assert (found.accelerator, found.accelerator_count) == ("A100", 8)


@pytest.mark.parametrize(("word", "is_spot"), [("yes", True), ("On", True), ("no", False), ("OFF", False)])
def test_yaml_1_1_words_are_flags(word: str, is_spot: bool) -> None:
    assert load(f"run: x\nresources: {{use_spot: {word}}}").resources[0].use_spot is is_spot


@pytest.mark.parametrize(
    ("infra", "image"),
    [("k8s", "docker:nvcr.io/nvidia/pytorch:24.07-py3"), ("aws", "nvcr.io/nvidia/pytorch:24.07-py3")],
)
def test_image_of_a_pod_is_a_container_without_saying_so(infra: str, image: str) -> None:
    text = f"run: x\nresources: {{infra: {infra}, image_id: 'nvcr.io/nvidia/pytorch:24.07-py3'}}"
    assert load(text).resources[0].image_id == image


@pytest.mark.parametrize("image", ["ubuntu:22.04", "docker:ubuntu:22.04"])
def test_container_without_a_machine_image_is_launched(image: str) -> None:
    task = load(f"run: x\nresources: {{infra: aws, image_id: {{docker: '{image}'}}}}")
    assert [each.image_id for each in task.resources] == ["docker:ubuntu:22.04"]
    assert not task.notices


def test_image_under_a_null_region_is_for_every_region() -> None:
    (found,) = load("run: x\nresources: {infra: aws/us-east-1, image_id: {null: ami-1}}").resources
    assert (found.region, found.image_id) == ("us-east-1", "ami-1")


def test_autostop_of_minus_one_is_off() -> None:
    assert load("run: x\nresources: {autostop: -1}").autostop is None


@pytest.mark.parametrize("minutes", [-1, -5])
def test_negative_minutes_of_autostop_turn_it_off(minutes: int) -> None:
    assert load(f"run: x\nresources: {{autostop: {minutes}}}").autostop is None


@pytest.mark.parametrize(("text", "size_gib"), [("500MB", 1), ("0", 1), ("2000MB", 1), ("1TB", 1024)])
def test_disk_is_rounded_down_to_whole_gib_but_never_to_none(text: str, size_gib: int) -> None:
    assert load(f"run: x\nresources: {{disk_size: {text}}}").resources[0].disk_size_gib == size_gib


@pytest.mark.parametrize("field", ["region", "zone", "instance_type", "image_id", "job_recovery", "ports"])
def test_empty_text_in_resources_counts_as_unset(field: str) -> None:
    assert load(f"run: x\nresources: {{{field}: '', cpus: 2}}") == load(f"run: x\nresources: {{{field}: , cpus: 2}}")


@pytest.mark.parametrize("field", ["name: {}", "resources: {{job_recovery: {{strategy: {}}}}}"])
def test_empty_name_and_strategy_count_as_unset(field: str) -> None:
    """Templates write such values when their variable is not set."""
    assert load(f"run: x\n{field.format(repr(''))}") == load(f"run: x\n{field.format('')}")


def test_empty_accelerators_are_refused_as_the_task_may_require_some() -> None:
    (fault,) = find_faults("run: x\nresources: {accelerators: ''}")
    assert "not empty text" in fault and "remove `accelerators`" in fault


@pytest.mark.parametrize(("text", "cpus"), [("CPU:4", "4+"), ("cpu", "1+"), ("{CPU: 8}", "8+")])
def test_cpus_named_as_accelerators_are_cpus(text: str, cpus: str) -> None:
    task = load(f"run: x\nresources: {{accelerators: {text}}}")
    assert [(str(each.cpus), each.accelerator) for each in task.resources] == [(cpus, None)]
    (notice,) = task.notices
    assert f"is read as `cpus: {cpus}`" in notice.message
    assert not notice.blocks_launch


def test_cpus_named_as_accelerators_do_not_replace_cpus() -> None:
    (found,) = load("run: x\nresources: {accelerators: CPU:4, cpus: 16}").resources
    assert str(found.cpus) == "16"


def test_long_name_of_a_task_is_a_name() -> None:
    assert load(f"run: x\nname: {'a' * 200}").name == "a" * 200
    assert load("run: x\nname: 1e3").name == "1e3"


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (
            "jobs: {}",
            "unknown field `jobs` in `config`: it has no effect",
            "SkyPilot reads it from `~/.sky/config.yaml`",
        ),
        ("kubernetse: {}", "unknown field `kubernetse` in `config`: it has no effect", "did you mean `kubernetes`?"),
    ],
)
def test_unknown_setting_in_config_is_noted_where_it_stands(text: str, message: str, hint: str) -> None:
    (notice,) = load(f"run: x\nconfig:\n  {text}").notices
    assert (notice.origin.line, notice.origin.column, notice.blocks_launch) == (3, 3, False)
    assert notice.message == message
    assert notice.hint is not None
    assert notice.hint.startswith(hint)


@pytest.mark.parametrize(
    ("field", "first", "second"),
    [
        ("autostop", "10", "{idle_minutes: 10, down: true}"),
        ("job_recovery", "FAILOVER", "{strategy: EAGER_NEXT_REGION}"),
        ("priority", "high", "1"),
    ],
)
def test_field_of_the_whole_task_that_differs_between_alternatives_is_noted(
    field: str, first: str, second: str
) -> None:
    text = "run: x\nresources:\n  %s\n  any_of:\n    - {infra: aws, %s}\n    - {infra: gcp, %s}"
    odd = f"{field}: {second}"
    (notice,) = load(text % ("cpus: 2", f"{field}: {first}", odd)).notices
    assert (notice.origin.line, notice.origin.column, notice.blocks_launch) == (6, 20, False)
    assert notice.message == f"`{field}` differs between the alternatives: the first one that is set applies to all"
    (notice,) = load(text % ("cpus: 2", f"{field}: {first}", "cpus: 4")).notices
    assert notice.origin.line == 6, "the second has none"
    assert not load(text % (odd, "cpus: 2", "cpus: 4")).notices
    assert not load(text % (f"{field}: {first}", "cpus: 2", f"{field}: {first}")).notices


@pytest.mark.parametrize(("field", "value"), [("deadline", "2d"), ("budget", "50"), ("hour_value", "5")])
def test_goal_that_a_plan_cannot_consider_is_noted(field: str, value: str) -> None:
    (notice,) = load(f"run: x\ngoal: {{{field}: {value}}}").notices
    assert notice.message.startswith(f"`{field}` without `work`: plans ") and not notice.blocks_launch
    assert not load(f"run: x\ngoal: {{work: 1h, {field}: {value}}}").notices


def test_url_as_workdir_gets_a_hint_about_repositories() -> None:
    (notice,) = load("run: x\nworkdir: https://host/org/x").notices
    assert notice.blocks_launch
    assert notice.hint == "for a git repository, write `workdir: {url: https://host/org/x}`"


def test_text_that_is_not_a_mapping_gets_a_hint_about_its_colon() -> None:
    with pytest.raises(TaskError) as caught:
        load_tasks_text("run:echo", "task.yaml")
    assert caught.value.issues[0].hint == "put a space after the colon: `run: ...`"


def test_empty_list_of_alternatives_counts_as_none() -> None:
    (found,) = load("run: x\nresources: {cpus: 2, any_of: []}").resources
    assert found.cpus is not None and found.cpus.value == 2


@pytest.mark.parametrize(
    "secrets",
    [
        "[secrets:workspace.HF_TOKEN]",
        "{'secrets:personal.HF_TOKEN': }",
        "{global.HF_TOKEN: }",
    ],
)
def test_scope_of_a_servers_secret_is_not_part_of_its_name(secrets: str) -> None:
    (task,) = load_tasks_text(f"run: x\nsecrets: {secrets}", "task.yaml", secrets={"HF_TOKEN": "abc"})
    assert {name: secret.value for name, secret in task.secrets.items()} == {"HF_TOKEN": "abc"}
    (notice,) = load(f"run: x\nsecrets: {secrets}").notices
    assert "pass `--secret HF_TOKEN=...`" in (notice.hint or "")


def test_header_of_a_group_may_have_placement_and_unknown_fields_are_named_as_its_own() -> None:
    tasks = "---\nname: a\nrun: x\n---\nname: b\nrun: x\n"
    first, _ = load_tasks_text(f"name: g\nplacement: SAME_INFRA\nexecution: parallel\n{tasks}", "task.yaml")
    assert any("run in one region" in each.message for each in first.notices)
    (fault,) = find_faults(f"name: g\nexecution: parallel\nprimary_task: [a]\n{tasks}")
    assert fault == "3 unknown field `primary_task` in `header` | did you mean `primary_tasks`?"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("apiVersion: v1\nkind: Pod\nspec: {}", "a Kubernetes manifest"),
        ("version: '3'\nservices: {web: {image: x}}", "a Docker Compose file"),
        ("on: push\njobs: {a: {steps: []}}", "a GitHub Actions workflow"),
        ("cluster_name: x\nprovider: {type: aws}", "a Ray cluster configuration"),
        ("name: v\ntype: k8s-pvc\ninfra: k8s\nsize: 10Gi", "a volume description"),
        ("jobs: {controller: {}}\nkubernetes: {ports: ingress}", "a SkyPilot settings file"),
        ("type: fleet\nnodes: 2\nresources: {gpu: 24GB}", "a dstack fleet"),
        ("type: dev-environment\nide: vscode\nresources: {gpu: 24GB}", "a dstack dev-environment"),
    ],
)
def test_file_of_another_program_is_refused_in_one_sentence(text: str, expected: str) -> None:
    (fault,) = find_faults(text)
    assert fault.startswith(f"1 this is {expected}, not a task | ")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("cpus: 4", "1 unknown field `cpus` in the task | move it to `resources`"),
        ("storage_mounts: {/a: gs://b}", "1 unknown field `storage_mounts` in the task | move storage mounts to"),
        ("resources: {num_nodes: 2}", "1 unknown field `num_nodes` in `resources` | move it out of `resources`"),
        ("resources: {strategy: FAILOVER}", "1 unknown field `strategy` in `resources` | move it to `job_recovery`"),
        ("resources: {container_image: a}", "1 unknown field `container_image` in `resources` | use `image_id:"),
        ("resources: {any_of: [{run: x}]}", "1 unknown field `run` in `any_of` | move it out of `resources`"),
        ("service: {min_replicas: 1}", "1 unknown field `min_replicas` in `service` | move it to `replica_policy`"),
        ("service: {path: /}", "1 unknown field `path` in `service` | move it to `readiness_probe`"),
        ("resources: {autostop: {zzz: 1}}", "1 unknown field `zzz` in `autostop` | its fields: idle_minutes, down"),
    ],
)
def test_misplaced_field_gets_a_hint_about_its_place(text: str, fault: str) -> None:
    assert find_faults(f"{text}\nrun: x")[0].startswith(fault)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "num_nodes: '2'",
            "1 `num_nodes` must be a whole number of at least 1 and at most 100000, not the text `2` | remove the "
            "quotes",
        ),
        ("resources: {use_spot: 'true'}", "not the text `true` | remove the quotes"),
        ("resources: {accelerators: '{A100:1, L4:1}'}", "| remove the quotes around the alternatives"),
        ("resources: {accelerators: 'A100:0'}", "| for a machine without accelerators, remove `accelerators`"),
        ("resources: {accelerators: None}", "unknown accelerator `None` | for a machine without accelerators"),
        ("resources: {accelerators: ''}", "| for a machine without accelerators, remove `accelerators`"),
        ("resources: {ports: 9000-8000}", "| write the lower port first: `8000-9000`"),
        ("resources: {infra: aws / us-east-1}", "| remove the spaces: `aws/us-east-1`"),
        ("resources: {disk_size: 100+}", "| a size is exact: write `100`"),
        ("resources: [{cpus: 2}]", "| write `KEY: VALUE` on each line, without `- `"),
        ("envs: [A=1]", "| write `KEY: VALUE` on each line, without `- `"),
        ("resources:\n  cpus:4", "a mapping, not `cpus:4` | put a space after the colon: `cpus: ...`"),
        ("resources:\n  cpus 4", "a mapping, not `cpus 4` | put a colon after `cpus`"),
        ("num_nodes: two", "| for example `num_nodes: 2`"),
        ("resources: H100:8", "| write `accelerators: H100:8`"),
        ("resources: {any_of: ['H100:8']}", "| write `accelerators: H100:8`"),
        ("resources: {accelerators: 8xH100}", "| write the name first: `H100:8`"),
        ("resources: {accelerators: H100 x 8}", "| put a colon between name and count: `H100:8`"),
        ("resources: {accelerators: H100:eight}", "| for example `accelerators: H100:8`"),
        ("resources: {infra: aws:us-east-1}", "| write `aws/us-east-1`"),
        ("resources: {cloud: aws/us-east-1}", "| write `infra: aws/us-east-1` instead"),
        ("resources: {memory: 32 gigs}", "| for example `memory: 32+`"),
        ("resources: {autostop: 10 minutes}", "| write `10m`"),
        ("resources: {autostop: none}", "| to turn it off, write `false`"),
        ("goal: 100h", "| write `work: 100h`"),
        ("checkpoint: s3://bucket/folder", "| write `to: s3://bucket/folder`"),
        ("secrets: [HF_TOKEN]", "must be like `secrets:HF_TOKEN`, or a mapping from names to values, not `HF_TOKEN`"),
        ("entrypoint: python a.py", "| use `run`"),
        ("execution: parallel", "| move it to a header: a first document"),
        ("image: pytorch/pytorch", "| use `image_id: docker:IMAGE` in `resources`"),
        ("max_retries: 3", "| use `job_recovery: {max_restarts_on_errors: N}` in `resources`"),
        ("goal: {work: 2.5 hours}", "| write `2.5h`"),
        ("goal: {work: 2 months}", "| for example `work: 100h`"),
        ("goal: {budget: '$5,000'}", "| write `5000`"),
        ("goal: {budget: 5k}", "| write `5000`"),
        ("goal: {confidence: 95%}", "| write `0.95`"),
        ("goal: {confidence: 95}", "| for example `confidence: 0.9`"),
        ("envs: {A-B: c}", "| did you mean `A_B`?"),
        ("workdir: {url: 'ext::sh -c id'}", "`url` must be a URL such as `https://HOST/ORG/NAME`"),
        ("workdir: {url: https://h/x, ref: '--upload-pack=id'}", "`ref` must be a branch, tag or commit"),
        ("setup: [a, b]", "| write it as one text: `|` after the colon"),
        ("resources: {any_of: {infra: aws}}", "| put `- ` before each item"),
        ("resources: {cpus: {{ cpus }}}", "| `{{...}}` is a template: fill it in first"),
        ("{% if gpu %}", "| this is a template: fill it in first"),
        ("resources: {cloud: Google}", "| write `gcp`"),
        ("resources: {infra: digitalocean/nyc1}", "| write `do`"),
        ("resources: {cloud: '*'}", "| remove it: without `cloud` and `infra`, every cloud is considered"),
        ("resources: {region: [us-east-1, us-west-2]}", "| write each one as an alternative: `any_of: ["),
        ("resources: {region: 'us-east-1,us-west-2'}", "not `us-east-1,us-west-2` | write each one as an alternative"),
        ("resources: {region: us-*}", "not `us-*` | write each one as an alternative: `any_of: ["),
        ("resources: {zone: '*'}", "not `*` | remove it: any place fits without it"),
        ("resources: aws", "| write `infra: aws`"),
        ("resources: {any_of: [gcp/us-central1]}", "| write `infra: gcp/us-central1`"),
        ("resources: {disk: 100}", "| use `disk_size`"),
        ("resources: {cloud: '${CLOUD}'}", "| write the value: variables are substituted only in `workdir`, "),
        ("num_nodes: $NODES", "| write the value: variables are substituted only in `workdir`, "),
        ("resources: {disk_size: 1_000}", "| write `1000`"),
        ("resources: {cpus: 1_6}", "| write `16`"),
        ("service: /health", "| write `readiness_probe: /health`"),
        ("script: python a.py", "| use `run`"),
        ("tasks: [{run: a}]", "| write each task as a document of its own, with `---` between them"),
        ("envs: {A: `id`}", "a value cannot start with a backtick | put it in quotes"),
        ("resources:\n\u00a0 cpus: 2", "| replace the non-breaking space in the indentation by plain spaces"),
    ],
)
def test_common_mistake_gets_a_hint(text: str, fault: str) -> None:
    faults = find_faults(f"{text}\nrun: x")
    assert fault in faults[0], faults


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "name:x\nresources:\n  cpus: 2",
            "1 not valid YAML: a field without `:` | put a space after the colon: `name: ...`",
        ),
        ("resources:\n  cpus 2\n  memory: 4", "2 not valid YAML: a field without `:` | put a colon after `cpus`"),
        ("resources:\n  cpus:2\n  memory: 4", "2 not valid YAML: a field without `:` | put a space after the colon"),
        ("resources:\n  cpus: 2\n   memory: 4", "3 not valid YAML: this line is indented further than line 2"),
        ("resources:\n    cpus: 2\n  memory: 4", "3 not valid YAML: the indentation matches no line above"),
        ("envs:\n  A: x\n\n4\n", "4 not valid YAML: a field without `:` | write `KEY: VALUE`, or remove the line"),
        (
            "resources:\n  infra: */us-east-1",
            "2 not valid YAML: `*` and `&` have a special meaning in YAML | put the value",
        ),
        ("name: @x", "1 not valid YAML: a value cannot start with `@` | put it in quotes"),
        (
            "run: python a.py: b",
            "1 not valid YAML: a value contains `: `, which separates a field from its value | put the value in quotes",
        ),
        ("name: 'x", "not valid YAML: a quote is not closed | close it"),
        ("resources: {cpus: 2\nrun: x", "not valid YAML: a bracket is not closed, or a comma is missing | compare"),
    ],
)
def test_broken_yaml_names_the_line_of_the_cause_and_what_to_write(text: str, fault: str) -> None:
    (found,) = find_faults(text)
    assert fault in found


@pytest.mark.parametrize(("infra", "store"), [("aws", "s3"), ("gcp/us-central1", "gcs"), ("azure", "azure")])
def test_bucket_by_name_without_a_store_is_in_the_cloud_of_the_task(infra: str, store: str) -> None:
    """As SkyPilot's own examples are written."""
    text = f"run: x\nresources: {{infra: {infra}}}\nfile_mounts:\n  /ckpt: {{name: my-bucket, mode: MOUNT}}"
    task = load(text)
    (mount,) = task.storage_mounts
    assert (mount.name, mount.store) == ("my-bucket", store)
    assert not task.notices


@pytest.mark.parametrize("resources", ["{}", "{infra: lambda}", "{any_of: [{infra: aws}, {infra: gcp}]}"])
def test_bucket_by_name_that_could_be_in_several_stores_gets_a_hint_to_name_one(resources: str) -> None:
    task = load(f"run: x\nresources: {resources}\nfile_mounts:\n  /ckpt: {{name: my-bucket}}")
    (notice,) = task.notices
    assert notice.blocks_launch and notice.message == "`file_mounts`: the bucket `my-bucket` has no `store`"
    assert notice.hint is not None and "`store: s3`" in notice.hint


def test_existing_bucket_is_where_its_url_says() -> None:
    (mount,) = load(
        "run: x\nresources: {infra: gcp}\nfile_mounts:\n  /d: {name: a-b, source: 's3://a-b'}"
    ).storage_mounts
    assert mount.store is None


@pytest.mark.parametrize(
    ("text", "place", "message", "hint"),
    [
        ("num_nodes: 99999999999999999999", (1, 12), "at least 1 and at most 100000, not", ""),
        ("resources: {job_recovery: {max_restarts_on_errors: 9999999999}}\nrun: x", (1, 52), "", "is 1000000000"),
        ('name: a\nrun: "echo\nsetup: x\n', (2, 6), "a quote is not closed", "close it"),
        ("name: a\nrun: 'echo\n", (2, 6), "a quote is not closed", "close it"),
        ("name: a\nrun: x\0y\n", (2, 7), "zero byte", "remove it"),
        ("name: a\nrun: x\7y\n", (2, 7), "the control character '\\x07'", "or write it as an escape"),
        ("resources: &a {any_of: [*a]}\nrun: x", (1, 25), "`*a` is inside the value of `&a`", "repeat the value"),
        ("resources: *b\nrun: x", (1, 12), "undefined alias `*b`", "define `&b` above it"),
        ("? \n: a\nrun: x", (1, 2), "a field without a name in the task", ""),
        ("resources:\n  cpus:\u00a04\nrun: x", (2, 3), "`resources` must be a mapping", "no-break spaces"),
        ("workdir: 5\nrun: x", (1, 10), "at most 4,095 bytes, or a mapping, not `5`", ""),
        ("resources: {ports: '22:22'}\nrun: x", (1, 20), "`ports` must be like `8080`", "the port of the node alone"),
        (
            "#!/bin/bash\n#SBATCH --nodes=2\nsrun python x.py\n",
            (3, 1),
            "a task must be a mapping",
            "broker jobs import",
        ),
        ("type: task\ncommands:\n  - python train.py\nresources: {gpu: 24GB}\n", (1, 1), "a dstack config", "`run:`"),
    ],
)
def test_error_names_the_place_and_the_cause(text: str, place: tuple[int, int], message: str, hint: str) -> None:
    with pytest.raises(TaskError) as caught:
        load_tasks_text(text, "x.yaml")
    assert any(
        (each.line, each.column) == place and message in each.message and hint in (each.hint or "")
        for each in caught.value.issues
    ), caught.value.issues


def test_byte_that_is_not_utf8_is_reported_at_its_character(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes("name: a\nrun: é ".encode() + b"\xff\n")
    with pytest.raises(TaskError) as caught:
        load_tasks(path)
    assert [(each.line, each.column) for each in caught.value.issues] == [(2, 8)]
