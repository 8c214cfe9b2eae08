"""Habits from other tools: names, units and forms that users bring to their first task files."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from broker.agent import FOLDER
from broker.app.planning import anchor
from broker.errors import TaskError
from broker.optimizer.throughput import scale_work
from broker.serve.scaling import find_target_qps
from broker.task.accelerators import resolve_accelerators
from broker.task.environment import SET_BY_AGENT
from broker.task.loader import load_tasks_text
from broker.types import AcceleratorFigures, Offer, Task

FIGURES = {
    "A100": AcceleratorFigures(name="A100", memory_gib=40, bf16_dense_tflops=312, memory_bandwidth_gbs=1555),
    "H100": AcceleratorFigures(name="H100", memory_gib=80, bf16_dense_tflops=989, memory_bandwidth_gbs=3350),
}
A100 = Offer(
    cloud="aws", region="r", zone=None, instance_type="a", vcpus=96, memory_gib=768, accelerator="A100",
    accelerator_count=8, accelerator_memory_gib=40, ondemand_usd_hour=1.0, spot_usd_hour=None,
)  # fmt: skip


def load(text: str) -> Task:
    (task,) = load_tasks_text(f"run: x\n{text}", "task.yaml")
    return task


@pytest.mark.parametrize("name", ["H100", "h100", "H100-80GB", "h100-sxm"])
def test_work_measured_under_another_name_of_an_accelerator_is_scaled(name: str) -> None:
    task = resolve_accelerators(load(f"goal: {{work: {{hours: 100, on: '{name}:8'}}}}"), FIGURES)
    assert not task.notices
    assert (scale_work(task.goal, A100, FIGURES) or 0) > 200


def test_measured_figures_apply_under_another_name_of_an_accelerator() -> None:
    figures = "{A100-40GB:8: 100, H100-80GB:8: 300}"
    task = resolve_accelerators(load(f"goal: {{work: {{hours: 100, on: H100:8}}, throughput: {figures}}}"), FIGURES)
    assert task.goal is not None and task.goal.throughput == {"A100:8": 100, "H100:8": 300}
    assert scale_work(task.goal, A100, FIGURES, measured=task.goal.throughput) == pytest.approx(300)


def test_work_measured_on_an_unknown_accelerator_is_noted() -> None:
    asked = load("goal: {work: {hours: 100, on: H10O:8}}")
    task = resolve_accelerators(asked, FIGURES)
    (notice,) = task.notices
    assert notice.message.startswith("`on`: the speed of `H10O` is unknown, so the work takes the same time")
    assert (notice.hint, notice.blocks_launch) == ("did you mean `H100`?", False)
    assert resolve_accelerators(task, FIGURES).notices == task.notices, "noted once"
    measured = resolve_accelerators(load("goal: {work: {hours: 1, on: TPU-x:8}, throughput: {TPU-x:8: 5}}"), FIGURES)
    assert [each.message.partition(":")[0] for each in measured.notices] == ["`throughput`"], "its figure is known"


def find_faults(text: str) -> list[str]:
    with pytest.raises(TaskError) as caught:
        load(text)
    return [f"{each.line}:{each.column} {each.message} | {each.hint}" for each in caught.value.issues]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("nvidia-tesla-t4", "T4"), ("nvidia-l4:2", "L4"), ("nvidia-h100-80gb:8", "H100"), ("Tesla-V100", "V100"),
        ("A100-SXM4-80GB", "A100-80GB"), ("A100-PCIE-40GB", "A100"), ("H100-HBM3", "H100"),
        ("Tesla-V100-SXM2-32GB", "V100-32GB"), ("nvidia-h100-mega-80gb", "H100"),
    ],
)  # fmt: skip
def test_names_of_gke_and_nvidia_smi_are_understood(text: str, name: str) -> None:
    sizes = {"T4": 16, "L4": 24, "H100": 80, "V100": 16, "V100-32GB": 32, "A100": 40, "A100-80GB": 80}
    figures = {each: AcceleratorFigures(name=each, memory_gib=gib) for each, gib in sizes.items()}
    task = resolve_accelerators(load(f"resources: {{accelerators: '{text}'}}"), figures)
    assert [each.accelerator for each in task.resources] == [name]


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("RTX 4090", "write `RTX4090`"),
        ("A100 80GB:8", "write `A100-80GB:8`"),
        ("NVIDIA H100 80GB HBM3:8", "write `H100-80GB:8`"),
        ("Tesla T4", "write `T4`"),
        ("RTX 6000 Ada", "write `RTX6000-Ada`"),
        ("H100 8", "put a colon between name and count: `H100:8`"),
        (
            "A100:8, H100:8",
            "in the task file, write `{A100:8, H100:8}` if any of them will do, or `[A100:8, H100:8]` to try them in "
            "order",
        ),
        ("“H100:8”", "replace the typographic quotes by straight ones, or remove them"),
    ],
)
def test_names_of_products_get_the_name_of_the_accelerator(text: str, hint: str) -> None:
    (fault,) = find_faults(f"resources: {{accelerators: '{text}'}}")
    assert fault.endswith(f" | {hint}")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("resources: {image_id: 'docker://org/image:1'}",
         "2:23 `image_id` of a container has no `//` | write `image_id: docker:org/image:1`"),
        ("x-common: &a {cpus: 2}\nresources: *a",
         "2:1 unknown field `x-common` in the task | define the anchor where its value is used first: "
         "there are no fields for extensions"),
        ("timeout: 2h", "2:1 unknown field `timeout` in the task | use `max_duration`"),
        ("retries: 3", "2:1 unknown field `retries` in the task | use `job_recovery: {max_restarts_on_errors: N}` in "
         "`resources`"),
        ("service: {readiness_probe: {path: /, initial_delay_seconds: 20m}}",
         "2:61 `initial_delay_seconds` must be a number of at least 0, not `20m` | write `1200`"),
        ("file_mounts: {/data: s3://a, /data/: s3://b}",
         "2:30 `/data/` is the same path as `/data` in line 2 | keep one of them"),
        ("file_mounts: {~/sky_workdir/x: s3://a, x: s3://b}",
         "2:40 `x` is the same path as `~/sky_workdir/x` in line 2 | keep one of them"),
        ("workdir: .\nfile_mounts: {~/sky_workdir: {source: s3://a}}",
         "3:15 a bucket mounted at the working directory hides `workdir` | mount it at a folder below it, for example "
         "`~/sky_workdir/data`"),
        ("file_mounts: {~: {source: s3://a}}",
         "2:15 a bucket mounted at the home folder hides what the node keeps there | mount it at a folder below it, "
         "for example `~/data`"),
    ],
)  # fmt: skip
def test_forms_of_other_tools_are_refused_with_ours(text: str, fault: str) -> None:
    assert find_faults(text) == [fault]


def test_the_root_of_a_node_is_no_target() -> None:
    (fault,) = find_faults("file_mounts: {/: s3://bucket}")
    assert "a path on the node, other than `/`" in fault


@pytest.mark.parametrize(
    ("text", "position", "message"),
    [
        ('"a": "\\ud83d\\ude00"', (2, 6), "an escape is half of a character"),
        ("setup: pip install a # comment\n  --upgrade", (3, 3), "the value in line 2 ends at its comment"),
    ],
)
def test_broken_yaml_is_explained_by_its_cause(text: str, position: tuple[int, int], message: str) -> None:
    with pytest.raises(TaskError) as caught:
        load(text)
    (issue,) = caught.value.issues
    assert (issue.line, issue.column) == position and message in issue.message and issue.hint


@pytest.mark.parametrize(
    ("text", "position", "message", "blocks_launch"),
    [
        ("num_nodes: 010", (2, 1), "`num_nodes: 010` is read as 10; SkyPilot reads it as 8", False),
        ("setup: echo 'export A=b' >> ~/.bashrc", (2, 1), "but `run` starts without them", False),
        ("setup: |\n  conda init bash", (2, 1), "`setup` changes shell settings (`conda init`)", False),
        ("envs: {SKYPILOT_NODE_RANK: 3}", (2, 8), "`envs.SKYPILOT_NODE_RANK` has no effect", False),
        ("file_mounts: {$HOME/x: s3://a}", (2, 15), "`file_mounts`: `HOME` is not in `envs`", True),
        ("file_mounts: {/x: 's3://'}", (2, 19), "`file_mounts`: `s3://` names no bucket", True),
        ("file_mounts: {/x: {source: 's3:///y'}}", (2, 19), "`file_mounts`: `s3:///y` names no bucket", True),
        ("file_mounts: {/x/y: s3://a, /x: {source: s3://b}}", (2, 15), "the bucket mounted later at `/x` hides", True),
        ("file_mounts: {/x: {source: s3://b}, /x/y: .}", (2, 37), "the bucket mounted later at `/x` hides", True),
    ],
)
def test_value_that_yaml_changes_is_noted(
    text: str, position: tuple[int, int], message: str, blocks_launch: bool
) -> None:
    (notice,) = load(text).notices
    assert (notice.origin.line, notice.origin.column) == position
    assert message in notice.message and notice.blocks_launch is blocks_launch


@pytest.mark.parametrize(
    ("values", "noted"),
    [
        ("envs: {HF_TOKEN: $HF_TOKEN}", "--secret HF_TOKEN"),
        ("envs: {URI: '${TRACKING_URI}'}", "--env URI"),
        ("envs: {LD_LIBRARY_PATH: '/usr/local/cuda/lib64:$LD_LIBRARY_PATH'}", "--env LD_LIBRARY_PATH"),
        ("envs: {BUCKET: '${DATA_BUCKET:-my-data}'}", "--env BUCKET"),
        ("secrets: {KEY: '${KEY}'}", "--secret KEY"),
        ("envs: {COMMAND: 'python train.py --lr $LR'}", ""),
        ("envs: {PRICE: '$5', HOME_OF: $}", ""),
    ],
)
def test_value_that_looks_like_a_variable_of_this_shell_is_noted_as_text(values: str, noted: str) -> None:
    """A program would log in with the text `${HF_TOKEN}`."""
    notices = load(values).notices
    assert len(notices) == bool(noted)
    assert all("is passed as written" in each.message and f"`{noted}`" in (each.hint or "") for each in notices)


@pytest.mark.parametrize(
    "mounts",
    [
        "/x: {source: s3://a}, /x/y: s3://b",
        "/x/y: ., /x: s3://b",
        "/x: s3://a, /xy: {source: s3://b}",
        "~/: .",
        "~/x: s3://a, x: s3://b",
        "~/sky_workdir: {source: s3://a}",
    ],
)
def test_targets_that_are_next_to_each_other_are_accepted(mounts: str) -> None:
    assert not load(f"file_mounts: {{{mounts}}}").notices


def test_relative_targets_are_in_the_working_directory() -> None:
    """As in SkyPilot, so that `run` finds them where the file says."""
    task = load("file_mounts: {data: ., ./b//: s3://b, c: {source: s3://c}, ~/d: ., /e: .}")
    assert list(task.file_mounts) == ["~/sky_workdir/data", "~/d", "/e"]
    assert [each.target for each in task.storage_mounts] == ["~/sky_workdir/b", "~/sky_workdir/c"]
    assert anchor(Task(file_mounts={"data": "/x"})).file_mounts == {"~/sky_workdir/data": "/x"}
    assert anchor(task) == anchor(anchor(task))


@pytest.mark.parametrize("target", ["~", "~/"])
def test_files_may_be_copied_to_the_home_folder(target: str) -> None:
    assert load(f"file_mounts: {{{target}: .}}").file_mounts == {"~/": "."}


def test_the_variables_that_have_no_effect_are_those_that_the_agent_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))  # as on a node: siblings by bare names
    agent_environment = importlib.import_module("agent_environment")
    monkeypatch.setattr(agent_environment.agent_access, "read_envs", lambda _: {})
    spec = {
        "run_id": 1, "node_ips": ["10.0.0.1"], "gpus_per_node": 0, "rank": 0, "num_nodes": 1, "secrets": {},
        "head": {"master_port": 2000}, "envs": dict.fromkeys((*SET_BY_AGENT, "OWN"), "mine"),
    }  # fmt: skip
    made = agent_environment.make_envs(spec, tmp_path, mark="MARK=1", held=None, container=None)
    assert [name for name, value in made.items() if value == "mine"] == ["OWN"]
    assert made["PYTHONUNBUFFERED"] == "1"
    for name in ("NODE_RANK", "NODE_IPS", "NUM_GPUS_PER_NODE"):  # SkyPilot's names of them in `setup`
        assert made[f"SKYPILOT_SETUP_{name}"] == made[f"SKYPILOT_{name}"]


def test_targets_of_a_service_apply_under_another_name_of_an_accelerator() -> None:
    targets = "{h100: 3, 'A100-40GB:8': 1.5}"
    policy = f"service: {{replica_policy: {{min_replicas: 1, target_qps_per_replica: {targets}}}}}"
    task = resolve_accelerators(load(f"{policy}\nresources: {{accelerators: {{H100:2, A100:8, A100:4}}}}"), FIGURES)
    assert task.service is not None
    found = [find_target_qps(task.service.policy, str(each.accelerator), each.accelerator_count)
             for each in task.resources]  # fmt: skip
    assert found == [3, 1.5, 1.5]
    *_, notice = task.notices
    assert notice.message == "`target_qps_per_replica` has no target for `A100:4`; the lowest one applies"
    assert len(task.notices) == 2, "the other one is that of `service`"
    assert resolve_accelerators(task, FIGURES).notices == task.notices, "noted once"


@pytest.mark.parametrize(("file", "command"), [("train.py", "python train.py"), ("run.sh", "bash run.sh")])
@pytest.mark.parametrize("text", ["import torch\nprint(torch)\n", "import torch\nsizes = {'a': 1}\n", "a: [\n"])
def test_a_program_in_place_of_a_task_file_gets_its_command(file: str, command: str, text: str) -> None:
    with pytest.raises(TaskError) as caught:
        load_tasks_text(text, file)
    assert caught.value.issues[0].hint == f"to run a program, pass its command: `broker launch {command}`"


def test_a_batch_script_that_is_not_yaml_gets_its_converter() -> None:
    with pytest.raises(TaskError) as caught:
        load_tasks_text("#!/bin/bash\n#SBATCH -N 2\nmodule load cuda\nsrun a --b: c: d\n", "train.sh")
    assert "broker jobs import" in (caught.value.issues[0].hint or "")


@pytest.mark.parametrize(
    ("body", "command"),
    [
        ("setup: conda create -n vllm python=3.10 -y", "conda create"),
        ("run: |\n  cd x && conda activate vllm\n  python t.py", "conda activate"),
        ("setup: mamba install -y gcc", "mamba install"),
        ("run: conda deactivate 2>/dev/null || true", ""),
        ("run: |\n  . ~/miniconda3/etc/profile.d/conda.sh\n  conda activate x", ""),
        ('run: |\n  eval "$(conda shell.bash hook)"\n  conda activate x', ""),
        ("run: echo conda activate", ""),
    ],
)
def test_conda_that_only_skypilot_installs_is_noted(body: str, command: str) -> None:
    notices = load_tasks_text(body, "task.yaml")[0].notices
    assert [f"`{command}`" in each.message and not each.blocks_launch for each in notices] == [True] * bool(command)
