"""Unsupported fields: reported with their position, and refused at launch where they matter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from broker.errors import TaskError
from broker.task.codec import decode_task, encode_task
from broker.task.loader import load_tasks, load_tasks_text
from broker.task.notices import refuse_blocking, render_notice
from broker.task.override import override_resources
from broker.types import Task

_TPU = "resources: {{infra: gcp, accelerators: [{}], accelerator_args: {{tpu_vm: true, runtime_version: {}}}}}"


def load(text: str) -> Task:
    (task,) = load_tasks_text(text, "task.yaml")
    return task


@pytest.mark.parametrize(
    ("text", "field", "blocks"),
    [
        ("service: {readiness_probe: /health, replicas: 2}", "service", True),
        ("pool: {workers: 2}", "pool", True),
        ("volumes: {/mnt: pvc0, /new: {size: 1Gi}}", "volumes", True),
        ("file_mounts: {/data: 'oci://bucket/x'}", "file_mounts", True),
        ("file_mounts: {/data: {name: bucket, source: ./here, store: GCS}}", "file_mounts", True),
        ("file_mounts: {/data: {name: bucket}}", "file_mounts", True),
        ("file_mounts: {/data: {store: volume, config: {disk_size: 10}}}", "file_mounts", True),
        ("file_mounts: {/data: ./no/such/folder}", "file_mounts", True),
        ("workdir: ./no/such/folder", "workdir", True),
        ("envs: {TOKEN: }", "envs", True),
        ("secrets: {TOKEN: null}", "secrets", True),
        ("secrets: ['secrets:TOKEN']", "secrets", True),
        ("managed_secrets: [TOKEN]", "managed_secrets", True),
        ("config: {docker: {run_options: [--gpus]}}", "docker", True),
        ("config: {gcp: {vpc_name: mine}}", "gcp", True),
        ("config: {kubernetes: {provision_timeout: 600}}", "kubernetes", False),
        ("config: {kubernetes: {pod_config: {spec: {hostPID: true}}}}", "kubernetes", True),
        ("config: {hooks: [{run: save, events: [down]}]}", "hooks", True),
        ("api_server_access: true", "api_server_access", False),
        ("resources: {image_id: 'skypilot:gpu-ubuntu-2004'}", "image_id", True),
        ("resources: {image_id: {us-east-1: ami-1, docker: ubuntu}}", "image_id", True),
        ("resources: {local_disk: nvme}", "local_disk", True),
        ("resources: {autostop: {hook: save}}", "hook", True),
        ("resources: {accelerator_args: {runtime_version: v2}}", "accelerator_args", True),
        ("resources: {any_of: [{accelerator_args: {tpu_name: a}}]}", "accelerator_args", True),
        (_TPU.format("tpu-v5p-8", "tpu-vm-base"), "accelerator_args", True),
        (_TPU.format("'tpu-v2-8', 'tpu-v6e-8'", "v2-alpha-tpuv6e"), "accelerator_args", True),
        ("job: {wait_for_scheduling_timeout: 2h}", "wait_for_scheduling_timeout", False),
    ],
)
def test_task_with_unsupported_fields_loads_with_notices(text: str, field: str, blocks: bool) -> None:
    task = load(f"run: x\n{text}")
    assert [(each.field, each.blocks_launch) for each in task.notices] == [(field, blocks)]
    (notice,) = task.notices
    assert (notice.origin.file, notice.origin.line) == ("task.yaml", 2)
    if blocks:
        assert notice.hint
        with pytest.raises(TaskError) as caught:
            refuse_blocking(task.notices)
        (issue,) = caught.value.issues
        assert issue.source_line == text
        assert (issue.line, issue.column, issue.message) == (2, notice.origin.column, notice.message)
    else:
        refuse_blocking(task.notices)


@pytest.mark.parametrize(
    ("field", "value", "blocks"),
    [
        ("disk_size", "500", False),
        ("disk_tier", "best", False),
        ("network_tier", "best", False),
        ("ports", "8080", False),
        ("labels", "{team: vision}", False),
        ("image_id", "ami-0123", True),
    ],
)
def test_field_that_clouds_carry_out_is_a_notice_only_of_those_that_do_not(
    field: str, value: str, blocks: bool
) -> None:
    notices = load(f"run: x\nresources: {{{field}: {value}}}").notices
    assert {each.cloud for each in notices} & {None, "aws", "gcp", "azure"} == set()
    (local,) = (each for each in notices if each.cloud == "local")
    assert (local.field, local.blocks_launch) == (field, blocks)
    assert local.message.startswith(f"`{field}` on local: ")


def test_pod_settings_are_refused_only_in_part_and_where_pods_are_started() -> None:
    text = "run: x\nconfig: {kubernetes: {pod_config: {spec: {hostNetwork: true, tolerations: [{key: a}]}}}}"
    (notice,) = load(text).notices
    assert (notice.cloud, notice.blocks_launch) == ("kubernetes", True)
    assert notice.message == "`pod_config`: `spec.hostNetwork` is not supported"
    assert load(text.replace("hostNetwork: true, ", "")).notices == ()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("[a]", ["pod_config"]),
        ("{spec: [a]}", ["spec"]),
        ("{spec: {volumes: {a: b}}}", ["spec.volumes"]),
        ("{spec: {volumes: [a]}}", ["spec.volumes"]),
        ("{spec: {containers: [{name: ray-node, env: [{name: A, value: b}]}, {name: b}]}}", ["spec.containers.1"]),
        ("{spec: {containers: [{image: x}]}}", ["spec.containers.0.image"]),
        ("{spec: {initContainers: []}, status: {}}", ["status", "spec.initContainers"]),
        ("{metadata: {labels: {a: b}, finalizers: [x]}}", ["metadata.finalizers"]),
    ],
)
def test_part_of_pod_settings_that_cannot_be_merged_is_named(settings: str, expected: list[str]) -> None:
    found = load(f"run: x\nconfig: {{kubernetes: {{pod_config: {settings}}}}}").notices
    assert [each.message for each in found] == [f"`pod_config`: `{part}` is not supported" for part in expected]


@pytest.mark.parametrize(
    ("infra", "image", "clouds", "hint"),
    [
        ("'*'", "ubuntu:22.04", {"aws", "gcp"}, "for a container, write `image_id: docker:ubuntu:22.04`"),
        ("aws", "nvcr.io/nvidia/pytorch:24.07-py3", {"aws"}, "for a container, write `image_id: docker:nvcr.io/"),
        ("gcp", "ami-1", {"gcp"}, "this is an image of aws"),
        ("gcp", "projects/p/global/machineImages/m", {"gcp"}, None),
        ("'{any_of}'", "ami-1", {"gcp"}, "this is an image of aws"),
        ("aws", "ssm:/aws/service/x", set(), None),
        ("gcp", "https://www.googleapis.com/compute/v1/projects/p/global/images/family/f", set(), None),
        ("lambda", "ubuntu:22.04", set(), None),
        ("k8s", "ubuntu:22.04", set(), None),
    ],
)
def test_image_that_a_cloud_cannot_start_is_refused_there(
    infra: str, image: str, clouds: set[str], hint: str | None
) -> None:
    """Before a launch: the cloud would refuse it only when the machine is created."""
    place = "any_of: [{infra: aws}, {infra: gcp}]" if "any_of" in infra else f"infra: {infra}"
    task = load(f"run: x\nresources: {{{place}, image_id: '{image}'}}")
    found = [each for each in task.notices if each.cloud in (None, "aws", "gcp", "azure", "lambda", "kubernetes")]
    assert {each.cloud for each in found} == clouds
    assert all(each.blocks_launch and each.origin.line == 2 for each in found)
    assert all((each.hint or "").startswith(hint) if hint else each.hint is None for each in found)


@pytest.mark.parametrize("cloud", ["local", "slurm", "ssh"])
def test_machines_that_exist_already_start_no_image(cloud: str) -> None:
    found = [each for each in load(f"run: x\nresources: {{infra: {cloud}, image_id: ami-1}}").notices]
    assert cloud in {each.cloud for each in found if each.blocks_launch}
    (own,) = (each for each in found if each.cloud == cloud)
    assert own.message == f"`image_id` on {cloud}: machine images are not supported"


@pytest.mark.parametrize(
    ("image", "cloud"),
    [
        ("microsoft-dsvm:ubuntu-2004:2004:21.11.04", "azure"),
        ("/CommunityGalleries/g/Images/i", "azure"),
        ("ocid1.image.oc1.us-sanjose-1.aaaa:oraclelinux", "oci"),
        ("projects/p/global/images/i", "gcp"),
        ("registry:5000/ubuntu:22.04", None),
        ("docker:a:b:c", None),
    ],
)
def test_form_of_an_image_reveals_its_cloud(image: str, cloud: str | None) -> None:
    assert load(f"run: x\nresources: {{image_id: '{image}'}}").resources[0].cloud == cloud


def test_container_without_a_name_is_an_error() -> None:
    with pytest.raises(TaskError) as caught:
        load("run: x\nresources: {image_id: 'docker:'}")
    assert [each.message for each in caught.value.issues] == ["`image_id` names no container"]


@pytest.mark.parametrize("field", ["disk_tier: none", "network_tier: standard"])
def test_common_fields_give_no_notice_on_any_cloud(field: str) -> None:
    assert load(f"run: x\nresources: {{{field}}}").notices == ()


@pytest.mark.parametrize(
    "text",
    [
        "api_server_access: false",
        "config: {}",
        "volumes: {}",
        "job: {}",
        "resources: {accelerator_args: {tpu_vm: true}}",
        _TPU.format("tpu-v2-8", "tpu-vm-base"),
        _TPU.format("tpu-v5litepod-8", "v2-alpha-tpuv5"),
        _TPU.format("tpu-v6e-8", "v2-alpha-tpuv6e"),
    ],
)
def test_field_without_effect_gives_no_notice(text: str) -> None:
    assert load(f"run: x\n{text}").notices == ()


def test_note_names_the_place_and_what_to_do() -> None:
    task = load("envs: {TOKEN: }\nrun: x")
    assert render_notice(task.notices[0]) == "note: task.yaml:1:8: `envs.TOKEN` has no value (pass `--env TOKEN=...`)"


def test_given_value_removes_the_notice() -> None:
    (task,) = load_tasks_text("secrets: ['secrets:TOKEN']\nrun: x", "t.yaml", secrets={"TOKEN": "abc"})
    assert task.notices == ()
    assert task.secrets["TOKEN"].value == "abc"


def test_flag_removes_the_notice_of_its_field() -> None:
    task = load("resources: {infra: gcp, image_id: 'skypilot:x'}\nrun: x")
    notice = replace(task.notices[0], field="infra")
    task = replace(task, notices=(notice, *task.notices))
    assert [each.field for each in override_resources(task, infra="aws").notices] == ["image_id"]


def test_notices_survive_the_store() -> None:
    task = load("file_mounts: {/out: {name: b}}\nservice: {replicas: 1}\nrun: x")
    assert decode_task(encode_task(task), {}) == task


def test_local_paths_that_are_there_are_mounted(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    task = load(
        f"run: x\nworkdir: {tmp_path}\nfile_mounts:\n  /data: {tmp_path}/data\n  /x: {tmp_path}/${{NAME}}\n"
        "envs: {NAME: data}"
    )
    assert task.notices == ()
    assert task.workdir == str(tmp_path)
    assert dict(task.file_mounts) == {"/data": f"{tmp_path}/data", "/x": f"{tmp_path}/data"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file contains no task"),
        (b"\n\n# nothing\n", "the file contains no task"),
        (b"run: x\nname: \xff\xfe\n", "the file is not UTF-8 text"),
        (b"\xff\xfer\x00u\x00n\x00", "the file is UTF-16, not UTF-8 text"),
        (b"\x7fELF\x02\x01\x01\x00\x00", "the file contains a zero byte, so it is not text"),
        (b"- run: x\n", "a task must be a mapping, not a list"),
        (b"run\n", "a task must be a mapping, not `run`"),
        (b"run: x\n\tname: y\n", "not valid YAML: found a tab character"),
        (b"run: x\nname\n", "not valid YAML: a field without `:`"),
        (b"run: \x1b[31m", "not valid YAML"),
        (b"# " + b"x" * 1_000_001, "the file is larger than 1,000,000 bytes"),
    ],
)
def test_file_that_is_not_a_task_file_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "task.yaml"
    path.write_bytes(data)
    with pytest.raises(TaskError) as caught:
        load_tasks(path)
    assert caught.value.issues[0].message.startswith(message)


def test_line_of_the_first_invalid_byte_is_named(tmp_path: Path) -> None:
    path = tmp_path / "task.yaml"
    path.write_bytes(b"name: a\nrun: \xe9\n")
    with pytest.raises(TaskError) as caught:
        load_tasks(path)
    assert caught.value.issues[0].line == 2


def test_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "task.yaml"
    path.write_bytes(b"\xef\xbb\xbfname: a\nrun: x\n")
    assert load_tasks(path)[0].name == "a"


@pytest.mark.parametrize(
    "value", ["s3://bucket/x", "gs://bucket", "{source: 'gcs://b/x', mode: MOUNT}", "{name: data, store: AZURE}"]
)
def test_supported_bucket_gives_no_notice(value: str) -> None:
    written = value if value.startswith("{") else f"'{value}'"
    task = load(f"run: x\nfile_mounts: {{/data: {written}}}")
    assert task.notices == () and len(task.storage_mounts) == 1
