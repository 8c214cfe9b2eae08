"""`broker jobs import`: what a user of Slurm sees."""

from __future__ import annotations

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
