"""Storage of `file_mounts` that cannot be mounted as written is named, each with whether it prevents a launch."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.task.loader import load_tasks_text

MISSING = "`file_mounts` names a path that does not exist: `missing`"


@pytest.mark.parametrize(
    ("storage", "expected"),
    [
        ("source: s3://bucket/data", []),
        ("source: here", ["`file_mounts`: this storage is not supported"]),
        ("{name: mine, store: s3}", []),
        ("{name: mine, store: s3, source: here}", []),
        ("{name: mine, store: s3, source: one.txt}", []),  # a file is as good as a folder
        ("{name: mine, store: s3, source: missing}", [MISSING]),
        ("{name: mine, store: s3, source: [here, missing]}", [MISSING]),
        ("{name: mine, source: s3://bucket/data}", []),
        ("{name: mine}", ["`file_mounts`: the bucket `mine` has no `store`"]),
        ("{name: mine, source: here}", ["`file_mounts`: the bucket `mine` has no `store`"]),
        ("{name: mine, source: [here, s3://bucket/data]}", ["`file_mounts`: this storage is not supported"]),
        ("{name: mine, store: ibm}", ["`file_mounts`: this storage is not supported"]),
        ("{name: mine, store: volume}", ["`file_mounts`: volumes are not supported"]),
        ("source: oci://bucket/data", ["`file_mounts`: this storage is not supported"]),
        ("{name: mine, store: s3, persistent: true}", []),
    ],
)
def test_storage_that_prevents_a_launch(
    storage: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "one.txt").touch()
    inner = storage if storage.startswith("{") else f"{{{storage}}}"
    (task,) = load_tasks_text(f"run: x\nfile_mounts:\n  /data: {inner}\n", "task.yaml")
    assert [each.message for each in task.notices] == expected
    assert all(each.blocks_launch and each.origin.line == 3 for each in task.notices)


def test_a_bucket_that_should_be_deleted_is_kept_with_a_note() -> None:
    text = "run: x\nfile_mounts:\n  /data: {name: mine, store: s3, persistent: false}\n"
    (notice,) = load_tasks_text(text, "task.yaml")[0].notices
    assert notice.message == "`persistent: false`: the bucket is kept" and not notice.blocks_launch
