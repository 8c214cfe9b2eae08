"""The cost of copying a task's buckets is shown before a launch; a bucket that cannot be queried does not stop it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from broker.app.buckets import collect_files, note_copies
from broker.errors import InvalidRequestError, UsageError
from broker.types import StorageMount, Task

CONTEXT: Any = SimpleNamespace(note=lambda text: NOTES.append(text))  # nothing else is used before the sizes are known
NOTES: list[str] = []


def make_plans(url: str) -> list[Any]:
    mount = StorageMount(target="/data", source=(url,), mode="COPY")
    return [SimpleNamespace(task=Task(run="true", storage_mounts=(mount,)))]


def test_without_the_package_the_cost_is_not_known_and_the_launch_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)  # as if it were not installed
    note_copies(CONTEXT, make_plans("s3://some-bucket/data"))
    noted = NOTES.pop()
    assert "unknown copy cost: `s3://some-bucket` requires the package obstore" in noted


def test_an_impossible_mount_stops_the_launch_whatever_its_name() -> None:
    with pytest.raises(InvalidRequestError, match="obstore"):
        note_copies(CONTEXT, make_plans("obstore://bucket/data"))


def test_paths_of_one_name_do_not_replace_each_other_in_a_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a/data", "b/data", "b/more"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "x.csv").touch()
    a, b, more = (str(tmp_path / name) for name in ("a/data", "b/data/", "b/more"))
    with pytest.raises(UsageError, match=r"`.*a/data` and `.*b/data` have the same name"):
        collect_files((a, b))
    monkeypatch.chdir(a)
    assert list(collect_files((".", more))) == ["data/x.csv", "more/x.csv"]
