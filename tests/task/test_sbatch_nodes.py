"""What a batch script does once, on its first node, and a task's `run` on every node: values must be the same."""

from __future__ import annotations

import subprocess

import pytest

from broker.task.sbatch import import_sbatch

ONE = "#!/bin/bash\n"
TWO = "#!/bin/bash\n#SBATCH --nodes=2\n"
FIRST = '$(echo "$SKYPILOT_NODE_IPS" | head -n1)'


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("export MASTER_ADDR=$(hostname)", f"export MASTER_ADDR={FIRST}"),
        ("A=`hostname -i`; export A", f"A={FIRST}; export A"),
        ("""ip="$(hostname -I | awk '{print $1}')\"""", f"ip={FIRST}"),
        ("head=$(hostname -s) && echo $head", f"head={FIRST} && echo $head"),
        ('echo "on $(hostname)"', 'echo "on $(hostname)"'),
        ("srun bash -c 'A=$(hostname); echo $A'", "bash -c 'A=$(hostname); echo $A'"),
    ],
)
def test_host_of_the_script_is_the_first_node(line: str, expected: str) -> None:
    """Otherwise each node would wait for the others at its own address."""
    assert import_sbatch(f"{TWO}{line}\n").task["run"] == f"{expected}\n"
    assert "SKYPILOT_NODE_IPS" not in import_sbatch(f"{ONE}{line}\n").task["run"]


@pytest.mark.parametrize("name", ["SLURM_LAUNCH_NODE_IPADDR", "SLURMD_NODENAME"])
def test_variables_of_the_first_node_are_defined(name: str) -> None:
    imported = import_sbatch(f"{TWO}srun ./a --address=${name}\n")
    assert imported.task["run"] == f'export {name}="{FIRST}"\n./a --address=${name}\n'
    assert not any(name in note for note in imported.notes)


def test_random_numbers_of_the_script_are_the_same_on_all_nodes() -> None:
    script = "export PORT=$((20000 + RANDOM % 1000))\nsrun torchrun --rdzv_id $RANDOM train.py\n"
    run = import_sbatch(TWO + script).task["run"].replace("torchrun", "echo $PORT")
    environment = {"BROKER_JOB_ID": "7"}
    printed = {
        subprocess.run(["bash", "-c", run], env=environment, capture_output=True, text=True, check=True).stdout
        for _ in range(3)
    }
    assert len(printed) == 1 and "rdzv_id" in printed.pop()
    assert "RANDOM=" not in import_sbatch(ONE + script).task["run"]


@pytest.mark.parametrize(
    "line",
    [
        "export MASTER_PORT=$(shuf -i 20000-30000 -n 1)",
        "export RUN_ID=$(date +%s)",
        "PORT=$(python -c 'import socket; s=socket.socket(); s.bind((\"\", 0)); print(s.getsockname()[1])')",
    ],
)
def test_value_that_each_node_would_determine_by_itself_is_noted(line: str) -> None:
    notes = import_sbatch(f"{TWO}{line}\nsrun ./a\n").notes
    assert notes[0].startswith(f"`{line[:60]}` has another value on each node")
    assert not import_sbatch(f"{ONE}{line}\nsrun ./a\n").notes
    assert not import_sbatch(f"{TWO}echo started at $(date)\nsrun ./a\n").notes


def test_text_that_srun_hands_to_a_shell_on_every_node_is_not_of_the_first_node() -> None:
    script = (
        f"{TWO}srun bash -c '\n  export HERE=$(hostname)\n  torchrun --node_rank=$SLURM_NODEID \\\n"
        '    "$@"\n\' _ train.py --lr 1\n'
    )
    found = import_sbatch(script)
    assert "export HERE=$(hostname)" in found.task["run"]
    assert not [each for each in found.notes if "first node only" in each or "gets no arguments" in each]
    outer = import_sbatch('#!/bin/bash\nbash -c "python $1 train.py"\n').notes
    assert [each for each in outer if "gets no arguments" in each]
    late = import_sbatch(f"{TWO}srun echo 'a\nb'\npython train.py $1\n").notes
    assert [each for each in late if "first node only" in each] and [each for each in late if "no arguments" in each]
