"""Try task templates of other frameworks: `python -m tests.frameworks jax torchrun`, `make test-frameworks NAMES=jax`.

Each runs on two nodes of the local cloud: one worker is killed with kill -9, then its node is preempted, and the end is
compared with an undisturbed run. Rows are kept in tests/frameworks/results.json, which docs/FRAMEWORKS.md must match.
Programs of the templates that need GPUs run without a job, on CPUs (`rehearsals.py`), if they are named.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

from tests.cli.conftest import ROOT
from tests.frameworks.beds import StuckError, prepare
from tests.frameworks.registry import FRAMEWORKS, GPU_TEMPLATES
from tests.frameworks.rehearsals import rehearse
from tests.frameworks.report import show
from tests.frameworks.trials import run_trial

RESULTS = Path(__file__).with_name("results.json")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.frameworks", description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", choices=[*FRAMEWORKS, *GPU_TEMPLATES, []], default=[], metavar="NAME")
    parser.add_argument("--venvs", type=Path, default=ROOT / "build/frameworks", help="folder that keeps environments")
    options = parser.parse_args()
    failed = []
    for name in options.names or FRAMEWORKS:
        folder = Path(tempfile.mkdtemp(prefix=f"frameworks-{name}-"))
        template = ROOT / "task_templates" / f"{name}.yaml"
        try:
            install_s = prepare(template, options.venvs.resolve(), folder / "python")
            begin_s = time.monotonic()
            python = folder / "python/bin/python"
            if name in GPU_TEMPLATES:
                version = find_version(python, GPU_TEMPLATES[name].distribution)
                print(f"{name} {version}: {rehearse(GPU_TEMPLATES[name], python, folder)}", flush=True)
                continue
            version = find_version(python, FRAMEWORKS[name].distribution)
            row = run_trial(name, FRAMEWORKS[name], template, folder, options.venvs.resolve())
        except (StuckError, AssertionError, subprocess.CalledProcessError) as error:
            print(f"{name}: FAILED: {error}\n{getattr(error, 'stderr', '') or ''}", flush=True)
            failed.append(name)
            continue
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        row["run_s"] = round(time.monotonic() - begin_s)
        row |= {"install_s": round(install_s)} if install_s is not None else {}
        print(f"{name}: installed in {row.get('install_s', 0)} s, tested in {row['run_s']} s")
        keep({**row, "version": version, "date": date.today().isoformat()})
        print(show([row | {"version": version}]), flush=True)
    return 1 if failed else 0


def find_version(python: Path, distribution: str) -> str:
    code = f"import importlib.metadata; print(importlib.metadata.version({distribution!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def keep(row: dict[str, object]) -> None:
    rows = {each["framework"]: each for each in json.loads(RESULTS.read_text())} if RESULTS.exists() else {}
    name = str(row["framework"])
    kept = {key: value for key, value in rows.get(name, {}).items() if key == "install_s"}  # of a new environment
    rows[name] = kept | row
    RESULTS.write_text(json.dumps([rows[name] for name in sorted(rows)], indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
