"""Digests of the files that a task names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from broker.app.programs import digest_files
from broker.app.sweeping import SweepRequest, name_sweep
from broker.task.loader import load_tasks_text
from broker.types import Task


def make_task(folder: Path, run: str) -> Task:
    (task,) = load_tasks_text("run: x\n", "task.yaml")
    return replace(task, workdir=str(folder), setup="pip install -r requirements.txt", run=run)


def test_files_that_setup_and_run_name_are_digested(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    (folder / "tools").mkdir(parents=True)
    for name in ("train.py", "requirements.txt", "tools/prepare.py", "other.py"):
        (folder / name).write_text(name)
    (tmp_path / "secret").write_text("s")
    (folder / "link").symlink_to(tmp_path / "secret")
    task = make_task(folder, "python -m tools.prepare && ./train.py ../secret link $lr --config=missing.yaml")
    assert sorted(digest_files(task)) == ["requirements.txt", "tools/prepare.py", "train.py"]
    assert not digest_files(replace(task, workdir=None)) and not digest_files(replace(task, workdir="s3://a/b"))


def test_changed_program_is_another_sweep(tmp_path: Path) -> None:
    """The results of an ended sweep would be printed for the new program."""
    (tmp_path / "train.py").write_text("a")
    request = SweepRequest(task=make_task(tmp_path, "python train.py $lr"), parameters=("lr=1,2",))
    first = name_sweep(request)
    (tmp_path / "notes.md").write_text("b")
    assert name_sweep(request) == first
    (tmp_path / "train.py").write_text("b")
    assert name_sweep(request) != first
