"""`broker jobs import`: what a user of Slurm sees."""

from __future__ import annotations

from pathlib import Path

from broker.task.loader import load_tasks
from tests.cli.conftest import Shell

SCRIPT = "#!/bin/bash\n#SBATCH -J sim -t 30 --qos=high\nsrun python sim.py\n"


def test_imported_script_is_planned_as_it_is_and_no_file_is_overwritten(shell: Shell) -> None:
    script = shell.write("sim.sbatch", SCRIPT)
    printed = shell.run("jobs", "import", script).stdout
    assert "# - `--qos` has no counterpart\n" in printed
    assert "run: |\n  python sim.py\n" in printed
    target = str(shell.folder / "sim.yaml")
    shell.run("jobs", "import", script, "-o", target)
    assert "Task sim:" in shell.run("plan", target).stdout
    refused = shell.run("jobs", "import", script, "-o", target, code=2)
    assert "exists" in refused.stderr


def test_sweep_of_an_imported_array_names_the_written_file(shell: Shell) -> None:
    script = shell.write("fit.sbatch", "#SBATCH -J fit --array=1-2\npython fit.py\n")
    shell.run("jobs", "import", script, "-o", "array.yaml")
    assert "`broker sweep array.yaml --param SLURM_ARRAY_TASK_ID=1,2`" in (shell.folder / "array.yaml").read_text()


def test_script_of_another_editor_keeps_its_options(shell: Shell) -> None:
    """Windows writes a byte order mark, and old comments are in Latin-1."""
    script = shell.folder / "sim.sbatch"
    for content in (
        b"\xef\xbb\xbf#!/bin/bash\r\n#SBATCH --nodes=2\r\nsrun ./a\r\n",
        b"#SBATCH -N 2\n# f\xfcr\nsrun ./a\n",
    ):
        script.write_bytes(content)
        printed = shell.run("jobs", "import", str(script)).stdout
        assert "num_nodes: 2\n" in printed and "./a\n" in printed


def test_program_with_tabs_stays_a_readable_block(shell: Shell) -> None:
    script = shell.write("sim.sbatch", "#!/bin/bash\nif true; then\n\tcat <<-END\n\t\ta\n\tEND\nfi\n")
    printed = shell.run("jobs", "import", script).stdout
    assert "run: |\n  if true; then\n  \tcat <<-END\n  \t\ta\n  \tEND\n  fi\n" in printed
    (task,) = load_tasks(Path(shell.write("task.yaml", printed)))
    assert task.run == "if true; then\n\tcat <<-END\n\t\ta\n\tEND\nfi\n"
