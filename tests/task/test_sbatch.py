"""Slurm batch scripts become task files that load; anything without a counterpart is named."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from broker.cli.jobs_import import write_task_file
from broker.task.loader import load_tasks
from broker.task.sbatch import import_sbatch, name_gpu, read_minutes

NO_MODULES = "type module >/dev/null 2>&1 || module() { :; }  # clouds' machines have no modules\n"
SCRIPTS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "one GPU": (
        "#!/bin/bash\n#SBATCH --job-name=tune\n#SBATCH --gres=gpu:1\n#SBATCH -t 90\npython tune.py\n",
        {"name": "tune", "accelerators": "1GB+:1", "work": "90m", "run": "python tune.py\n"},
        ("--time",),
    ),
    "nodes of eight": (
        "#!/bin/bash\n#SBATCH -N 4 --gres=gpu:h100:8 --cpus-per-task=96 --mem=1T\n#SBATCH --requeue\n"
        "srun --kill-on-bad-exit=1 --ntasks-per-node 1 torchrun --nnodes $SLURM_NNODES train.py\n",
        {
            "num_nodes": 4, "accelerators": "H100:8", "cpus": "96+", "memory": "1024+",
            "run": 'export SLURM_NNODES="$SKYPILOT_NUM_NODES"\ntorchrun --nnodes $SLURM_NNODES train.py\n',
        },
        (),
    ),
    "an array": (
        "#!/bin/bash\n#SBATCH --array=0-6:3,9%2 --time=1-12\npython run.py --seed $SLURM_ARRAY_TASK_ID\n",
        {"work": "36h", "envs": {"SLURM_ARRAY_TASK_ID": "0"}},
        ("`broker sweep task.yaml --param SLURM_ARRAY_TASK_ID=0,3,6,9 --parallel 2`",),
    ),
    "a task per GPU": (
        "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=4 --gpus-per-task=a100:1 --cpus-per-task=8\n"
        "srun -l python train.py\n",
        {"num_nodes": 2, "accelerators": "A100:4", "cpus": "32+", "run": "python train.py\n"},
        ("start the 4 processes",),
    ),
    "GPUs of all nodes": (
        "#!/bin/sh\n#SBATCH --nodes=2\n#SBATCH --gpus=l40s:16 --mem-per-cpu=4G -c 12\n#SBATCH -o %j.out\ntrain\n",
        {"num_nodes": 2, "accelerators": "L40S:8", "cpus": "12+", "memory": "48+"},
        (),
    ),
    "a site's options": (
        "#!/bin/bash\n#SBATCH -p gpu-long -A project7 --qos=high\n#SBATCH --signal=B:TERM@60 --mail-type=END\n"
        "module load cuda/12.4\nmodule load gcc\nmpirun -n 4 ./solve\n",
        {"run": f"{NO_MODULES}module load cuda/12.4\nmodule load gcc\nmpirun -n 4 ./solve\n"},
        ("--partition=gpu-long", "--signal", "--account", "--qos", "--mail-type", "`module load cuda/12.4`"),
    ),
    "a container and amounts per GPU": (
        "#!/bin/bash\n#SBATCH --gpus-per-node=h100:8 --cpus-per-gpu=12 --mem-per-gpu=128G\n"
        "#SBATCH --container-image=nvcr.io#nvidia/pytorch:24.07-py3\ntrain\n",
        {
            "accelerators": "H100:8", "cpus": "96+", "memory": "1024+",
            "image_id": "docker:nvcr.io/nvidia/pytorch:24.07-py3",
        },
        (),
    ),
    "a container with a digest": (
        "#!/bin/bash\n#SBATCH --container-image=docker://ubuntu@sha256:0a\ntrain\n",
        {"image_id": "docker:ubuntu@sha256:0a"},
        (),
    ),
    "options that a reader must decide about": (
        "#!/usr/bin/env bash\n#SBATCH --gpus=16 --constraint=a100 --gres=nvme:1 --mail-user=ada@example.org\n"
        "#SBATCH --container-image=/images/train.sqsh\n#PBS -l nodes=2\n",
        {"accelerators": "1GB+:16", "run": "#PBS -l nodes=2\n"},
        (
            "`--gpus=16` without `--nodes`", "`--constraint=a100`: if it names a GPU", "`--gres=nvme:1`",
            "`notify: {mail: ada@example.org}`", "name an image of a registry", "not `#PBS -l nodes=2`",
        ),
    ),
    "host names": (
        "#!/bin/bash\n#SBATCH --nodes=2-4 --chdir=/tmp --no-requeue\n"
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)\nexec srun --mpi pmix ./train $head\n',
        {
            "num_nodes": 4, "workdir": "/tmp",
            "run": 'head=$(echo "$SKYPILOT_NODE_IPS" | head -n1)\nexec ./train $head\n',
        },
        ("min_nodes: 2", "broker launch"),
    ),
    "an option after the program's first line": (
        "#!/bin/bash\n# A comment.\n#SBATCH -J 'first one'  # its name\n#SBATCH --dependency=afterok:7\n\necho a\n"
        "#SBATCH --nodes=9\n",
        {"name": "first-one", "run": "# A comment.\n\necho a\n#SBATCH --nodes=9\n"},
        ("`needs`",),
    ),
}  # fmt: skip


def run(script: str) -> subprocess.CompletedProcess[str]:
    """Run what a script becomes, as a node does."""
    program = str(import_sbatch(script).task["run"])
    return subprocess.run(["bash", "-c", program], capture_output=True, text=True)


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_becomes_a_task_that_loads(name: str, tmp_path: Path) -> None:
    script, expected, noted = SCRIPTS[name]
    imported = import_sbatch(script)
    flat = {**imported.task, **imported.task["resources"], **imported.task.get("goal", {})}
    assert {key: flat.get(key) for key in expected} == expected
    assert imported.task.get("num_nodes", 1) == expected.get("num_nodes", 1)
    for words in noted:
        assert any(words in note for note in imported.notes), imported.notes
    if not noted:
        assert imported.notes == ()
    path = tmp_path / "task.yaml"
    path.write_text(write_task_file("job.sbatch", imported.task, imported.notes))
    (task,) = load_tasks(path)
    assert task.run is not None
    assert task.run == imported.task["run"]
    assert task.num_nodes == expected.get("num_nodes", 1)
    assert subprocess.run(["bash", "-n", "-c", task.run], check=False).returncode == 0


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("90", 90), ("90:30", 90.5), ("2:00:00", 120), ("1-0", 1440), ("1-12:30", 2190), ("2-00:00:30", 2880.5)],
)
def test_time_limits_are_read_as_slurm_reads_them(text: str, minutes: float) -> None:
    assert read_minutes(text) == minutes


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--time=soon", "--time"),
        ("--mem=lots", "--mem"),
        ("--nodes=0", "--nodes"),
        ("--array=a-b", "--array"),
        ("--array=5-1", "--array"),
        ("--cpus-per-task=x", "--cpus-per-task"),
        ("-Z 1", "-Z"),
    ],
)
def test_value_that_slurm_refuses_is_named(line: str, named: str) -> None:
    with pytest.raises(ValueError, match=f"`{named}"):
        import_sbatch(f"#!/bin/bash\n#SBATCH {line}\ntrue\n")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("#!/bin/bash\n#SBATCH --job-name=a b\ntrue\n", "line 2: a value with a space must be in quotes: `b`"),
        ("#!/bin/bash\n#SBATCH -N 2\n#SBATCH hetjob\ntrue\n", "line 3: heterogeneous jobs are not supported"),
        (
            "#!/usr/bin/env python3\n#SBATCH -N 2\nprint(1)\n",
            "the script is for `/usr/bin/env python3`, not for `bash`",
        ),
    ],
)
def test_script_that_cannot_be_converted_is_refused_with_the_line(script: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        import_sbatch(script)


def test_script_without_commands_has_no_run() -> None:
    imported = import_sbatch("#!/bin/bash\n#SBATCH --nodes=2\n\n")
    assert "run" not in imported.task and imported.notes == ("the script has no commands; add `run`",)


@pytest.mark.parametrize("line", ["#!/bin/sh", "#!/usr/bin/env bash", "#!/usr/bin/bash -l", "#!/bin/zsh"])
def test_script_of_any_shell_is_converted(line: str) -> None:
    assert import_sbatch(f"{line}\ntrue\n").task["run"] == "true\n"


def test_srun_that_continues_in_the_next_lines_is_removed_whole() -> None:
    script = (
        "#!/bin/bash\n#SBATCH --nodes=2\nsrun --nodes=2 --kill-on-bad-exit=1 \\\n"
        '  --container-image="$IMAGE" \\\n  bash -c "\n    train --rank $SLURM_NODEID\n  "\necho done \n'
    )
    found = import_sbatch(script)
    head, run = found.task["run"].split("\n", 1)
    assert head == 'export SLURM_NODEID="$SKYPILOT_NODE_RANK"'
    assert run == 'bash -c "\n    train --rank $SLURM_NODEID\n  "\necho done\n'
    assert '`srun --container-image="$IMAGE"`: set `image_id: docker:IMAGE`' in found.notes


@pytest.mark.parametrize(
    ("line", "run", "note"),
    [
        (
            'srun --nodes=1 --ntasks=1 -w "$head" ray start --head &', "ray start --head &",
            "`srun` starts `ray start --head &` on some nodes only, but `run` starts on all",
        ),
        ("srun -N1 -n1 python a.py", "python a.py", "`srun` starts `python a.py` on some nodes only"),
        ("srun -n 2 --exclusive python a.py", "python a.py", ""),
        ("srun -N $SLURM_NNODES python a.py", "python a.py", ""),
        ("srun --export=ALL,A=1 python a.py", "python a.py", "`srun --export=ALL,A=1` has no counterpart"),
        ("srun --export=ALL -D /data python a.py", "python a.py", "`srun --chdir=/data` has no counterpart"),
        (
            'srun --container-mounts="/a b:/c" --label python a.py', "python a.py",
            '`srun --container-mounts="/a b:/c"` has no counterpart',
        ),
        ("srun -n2 a & srun -n2 b &", "a & srun -n2 b &", "`srun` after another command in its line is not converted"),
    ],
)  # fmt: skip
def test_options_of_srun_that_change_what_it_starts_are_noted(line: str, run: str, note: str) -> None:
    found = import_sbatch(f"#!/bin/bash\n#SBATCH --nodes=2\n{line}\n")
    assert str(found.task["run"]).splitlines()[-1] == run
    noted = [each for each in found.notes if "srun" in each]
    assert len(noted) == bool(note) and all(each.startswith(note) for each in noted)


def run_head(task: Any, **environment: str) -> str:
    """Run a converted script, and return what it prints."""
    given = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "PATH": "/usr/bin:/bin", **environment}
    return subprocess.run(["bash", "-c", task["run"]], env=given, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("options", "nodes"),
    [
        ("--ntasks=16 --ntasks-per-node=8", 2),
        ("--gpus=h100:12 --gpus-per-node=h100:8", 2),
        ("-n 4 --ntasks-per-node=8", 1),
        ("-N 3 --ntasks=16 --ntasks-per-node=8", 3),
    ],
)
def test_nodes_are_those_that_the_tasks_or_gpus_need(options: str, nodes: int) -> None:
    """The task of 16 MPI processes would run on one node, with half of them."""
    assert import_sbatch(f"#!/bin/bash\n#SBATCH {options}\nsrun ./a\n").task.get("num_nodes", 1) == nodes


def test_counts_of_tasks_are_those_of_the_script() -> None:
    """`mpirun -n $SLURM_NTASKS` would start two processes instead of 64."""
    echo = "echo $SLURM_NTASKS $SLURM_NPROCS $SLURM_NTASKS_PER_NODE $SLURM_PROCID"
    assert run_head(import_sbatch(f"#!/bin/bash\n#SBATCH -N 2 -n 64\n{echo}\n").task) == "64 64 32 32\n"
    assert run_head(import_sbatch(f"#!/bin/bash\n#SBATCH -N 2\n{echo}\n").task) == "2 2 1 1\n"
    text = "#!/bin/bash\n#SBATCH -J a -a 3-9:2\necho $SLURM_ARRAY_TASK_COUNT $SLURM_ARRAY_TASK_MAX $SLURM_JOB_NAME\n"
    found = import_sbatch(text)
    assert run_head(found.task, **found.task["envs"]) == "4 9 a\n"


def test_address_of_the_head_is_that_of_the_first_node() -> None:
    """The beginning of PyTorch's own template."""
    script = """#!/bin/bash
#SBATCH --nodes=2
nodes=( $( scontrol show hostnames $SLURM_JOB_NODELIST ) )
head_node=${nodes[0]}
head_node_ip=$(srun --nodes=1 --ntasks=1 -w "$head_node" hostname --ip-address)
echo $head_node_ip
echo $(srun -N1 hostname -I | awk '{print $1}')
"""
    found = import_sbatch(script)
    assert not found.notes
    assert run_head(found.task, SKYPILOT_NODE_IPS="10.0.0.7\n10.0.0.8") == "10.0.0.7\n10.0.0.7\n"


@pytest.mark.parametrize("flag", ["--quiet", "-Q", "--pty", "-k", "--no-kill", "-lu", "-s"])
def test_flag_of_srun_without_a_value_does_not_take_the_program(flag: str) -> None:
    assert import_sbatch(f"#!/bin/bash\nsrun {flag} python train.py\n").task["run"] == "python train.py\n"


@pytest.mark.parametrize(
    ("line", "noted"),
    [
        ("mpirun -np 64 ./solver", "`mpirun -np 64 ./solver`"),
        ("rm -rf out && python prepare.py \\\n  ./data", "`python prepare.py`"),
        ("OMP_NUM_THREADS=8 ./prepare.sh", "`OMP_NUM_THREADS=8 ./prepare.sh`"),
        ("python a.py\npython b.py", "`python a.py` and 1 more"),
        ("srun python a.py", ""),
        ("OMP_NUM_THREADS=8 srun python a.py", ""),
        ("export A=./b\nmkdir -p out\nsrun \\\n  ./c", ""),
        ("# python a.py", ""),
    ],
)
def test_program_that_slurm_runs_on_the_first_node_is_noted(line: str, noted: str) -> None:
    notes = import_sbatch(f"#!/bin/bash\n#SBATCH --nodes=4\n{line}\n").notes
    found = [note for note in notes if "on the first node only" in note]
    assert len(found) == bool(noted) and all(note.startswith(f"Slurm runs {noted} on the first") for note in found)
    assert not any("first node only" in note for note in import_sbatch(f"#!/bin/bash\n{line}\n").notes)


def test_commands_and_environments_that_are_not_on_the_nodes_are_noted() -> None:
    script = "#!/bin/bash\nsource ~/venv/bin/activate\nsbatch --dependency=afterok:1 next.sh\nscancel $SLURM_JOB_ID\n"
    notes = import_sbatch(script).notes
    assert any(note.startswith("`sbatch`, `scancel`: Slurm's commands are not on the nodes") for note in notes)
    assert any("create the environment of `source ~/venv/bin/activate` in `setup`" in note for note in notes)
    assert not import_sbatch("#!/bin/bash\npython -m squeue_like --sinfo\n").notes


@pytest.mark.parametrize("limit", ["0", "UNLIMITED", "infinite", "-1", "00:00:00"])
def test_time_without_a_limit_is_no_work(limit: str) -> None:
    assert "goal" not in import_sbatch(f"#!/bin/bash\n#SBATCH --time={limit}\ntrue\n").task


def test_every_short_option_and_flag_of_sbatch_is_known() -> None:
    script = "#!/bin/bash\n#SBATCH -W -H -s -k -v -Q -O -N 2\n#SBATCH --oversubscribe -p gpu --reboot -c 4\ntrue\n"
    found = import_sbatch(script)
    assert (found.task["num_nodes"], found.task["resources"]["cpus"]) == (2, "4+")
    assert any("--partition=gpu" in note for note in found.notes)


def test_variables_that_only_slurm_sets_are_defined_or_named() -> None:
    """A script that finds no GPUs in `SLURM_GPUS` may end with success."""
    found = import_sbatch("#!/bin/bash\n#SBATCH --gpus=2\n[ $SLURM_GPUS -gt 0 ] || exit 0\nx $SLURM_JOB_QOS\n")
    script = f"{found.task['run'].replace('x $SLURM_JOB_QOS', 'echo $SLURM_GPUS')}"
    environment = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "16\n"
    assert "`SLURM_JOB_QOS`: only Slurm sets it; replace in `run`" in found.notes
    own = import_sbatch("#!/bin/bash\nSLURM_MINE=1\n# $SLURM_CLUSTER_NAME\necho $SLURM_MINE\n")
    assert not own.notes


@pytest.mark.parametrize(
    ("line", "is_noted"),
    [
        ('python train.py "$@"', True), ("CONFIG=${1:-small.yaml}", True), ("bash $1", True), ("x ${@:2}", True),
        ("awk '{print $1}' log", False), ("f() {\n  echo $1\n}", False), ("echo $10 $NAME", False), ("# $1", False),
    ],
)  # fmt: skip
def test_arguments_of_the_script_are_noted(line: str, is_noted: bool) -> None:
    notes = import_sbatch(f"#!/bin/bash\n{line}\n").notes
    assert any("`run` gets no arguments" in note for note in notes) == is_noted


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("tesla_v100", "V100"), ("NVIDIA_L40S", "L40S"), ("H200_141GB", "H200"), ("nvidia_a100-sxm4-80gb", "A100-80GB"),
        ("a100_80gb", "A100-80GB"), ("nvidia_h100_80gb_hbm3", "H100"), ("rtx_2080_ti", "RTX2080TI"),
        ("2080ti", "RTX2080TI"), ("1080ti", "GTX1080TI"),
        ("rtx_a6000", "RTXA6000"),
        ("nvidia_geforce_rtx_3090", "RTX3090"), ("3090", "RTX3090"), ("a100", "A100"),
        ("A100-PCIE-40GB", "A100"), ("v100-32gb", "V100-32GB"),
    ],
)  # fmt: skip
def test_gpu_of_gres_has_the_catalog_s_name(kind: str, name: str) -> None:
    assert name_gpu(kind) == name


def test_exported_variables_are_set_and_late_options_are_named() -> None:
    imported = import_sbatch("#!/bin/bash\n#SBATCH --export=ALL,MODE=off=line,HOME\nexport A=1\n#SBATCH --nodes=9\n")
    assert imported.task["envs"] == {"MODE": "off=line"} and "num_nodes" not in imported.task
    assert imported.notes == ("`#SBATCH --nodes=9` follows a command, so Slurm ignores it, and so does the task",)


@pytest.mark.parametrize(
    "body",
    [
        "if true; then\n\tmodule swap PrgEnv-cray PrgEnv-gnu\nfi\necho here\n",
        "module load gcc \\\n    cuda/12\necho here\n",
        "module purge && module load gcc && echo here\n",
        "set -eu\nml gcc/13\necho here\n",
        "[ -n here ] && module -q load gcc; echo here\n",
    ],
)
def test_modules_are_skipped_where_the_machine_has_none(body: str) -> None:
    done = run(f"#!/bin/bash\n{body}")
    assert (done.stdout, done.stderr, done.returncode) == ("here\n", "", 0)


def test_modules_of_the_machine_are_used(tmp_path: Path) -> None:
    text = "#!/bin/bash\nmodule load gcc\n"
    program = f"module() {{ echo real $*; }}\n{import_sbatch(text).task['run']}"
    assert subprocess.run(["bash", "-c", program], capture_output=True, text=True).stdout == "real load gcc\n"


def test_word_module_in_another_language_is_left_alone() -> None:
    assert import_sbatch("#!/bin/bash\npython - <<E\nmodule = 1\nE\n").task["run"] == "python - <<E\nmodule = 1\nE\n"


def test_tasks_per_node_is_another_name_of_the_option() -> None:
    found = import_sbatch("#!/bin/bash\n#SBATCH --nodes=4 --tasks-per-node=32 --cpus-per-task=2\nsrun ./md\n")
    assert found.task["resources"]["cpus"] == "64+"
    assert not [each for each in found.notes if "no counterpart" in each]


def test_comment_after_an_option_may_have_an_apostrophe() -> None:
    found = import_sbatch("#!/bin/bash\n#SBATCH --mem=64G  # don't ask for \"all\n#SBATCH -J 'a # b'\ntrain\n").task
    assert (found["resources"]["memory"], found["name"]) == ("64+", "a-b")
    with pytest.raises(ValueError, match="line 2: No closing quotation"):
        import_sbatch("#!/bin/bash\n#SBATCH --comment=don't\ntrain\n")


def test_container_that_the_site_keeps_is_noted() -> None:
    noted = import_sbatch("#!/bin/bash\nsrun --container-name=mine python t.py\n").notes
    assert [each for each in noted if "`srun --container-name=mine` has no counterpart" in each]
