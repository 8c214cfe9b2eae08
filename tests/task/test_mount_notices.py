"""Storage of `file_mounts` that cannot be mounted as written is named, each with whether it prevents a launch."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.task.loader import load_tasks_text

EMPTY = "`file_mounts`: the `name` or `source` of a storage is empty"
MISSING = "`file_mounts` names a path that does not exist: `missing`"


@pytest.mark.parametrize(
    ("storage", "expected"),
    [
        ("source: s3://bucket/data", []),
        ("source: here", ["`file_mounts`: a local `source` requires the `name` of a bucket"]),
        ("{name: mine, store: s3}", []),
        ("{name: mine, store: s3, source: here}", []),
        ("{name: mine, store: s3, source: one.txt}", []),  # a file works like a folder
        ("{name: mine, store: s3, source: missing}", [MISSING]),
        ("{name: mine, store: s3, source: [here, missing]}", [MISSING]),
        ("{name: mine, source: s3://bucket/data}", []),
        ("{name: mine}", ["`file_mounts`: the bucket `mine` has no `store`"]),
        ("{name: mine, source: here}", ["`file_mounts`: the bucket `mine` has no `store`"]),
        (
            "{name: mine, source: [here, s3://bucket/data]}",
            ["`file_mounts`: several sources are supported only for local paths"],
        ),
        ("{name: mine, store: ibm}", ["`file_mounts`: the store `ibm` is not supported"]),
        ("{name: mine, store: volume}", ["`file_mounts`: volumes are not supported"]),
        ("source: oci://bucket/data", ["`file_mounts`: `oci://` URLs are not supported"]),
        (
            "{source: s3://bucket/data, store: gcs}",
            ["`file_mounts`: copying `s3://bucket/data` to a bucket in `gcs` is not supported"],
        ),
        ("{source: gs://bucket/data, store: GCS}", []),
        ("{source: 'az://account/container', store: azure}", []),
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


@pytest.mark.parametrize(
    ("storage", "is_read_only"),
    [
        ("source: s3://bucket/data", False),
        ("source: s3://bucket/data, config: {mount: {read_only: true}}", True),
        ("source: s3://bucket/data, config: {mount: {read_only: false}}", False),
        ("source: s3://bucket/data, config: {mount_cached: {read_only: true}}", False),  # of another mode
        ("source: s3://bucket/data, mode: MOUNT_CACHED, config: {mount_cached: {read_only: true}}", True),
        ("source: s3://bucket/data, type: DATASET_RO", True),
        ("source: s3://bucket/data, type: DATASET_RO, config: {mount: {read_only: false}}", False),  # as in SkyPilot
        ("source: s3://bucket/data, type: MODEL_CHECKPOINT_RW", False),
    ],
)
def test_mount_is_read_only_where_the_file_says_so(storage: str, is_read_only: bool) -> None:
    (task,) = load_tasks_text(f"run: x\nfile_mounts:\n  /data: {{{storage}}}\n", "task.yaml")
    assert [each.is_read_only for each in task.storage_mounts] == [is_read_only]
    assert not task.notices


@pytest.mark.parametrize(
    ("mount", "message", "hint", "blocks"),
    [
        ("s4://bucket/x", "`file_mounts`: unknown kind of URL `s4://`", "buckets begin with s3://, gs://", True),
        ("{source: 'hf://org/model', store: hf}", "`file_mounts`: `hf://` URLs are not supported", "download", True),
        ("https://mine.blob.core.windows.net/data/x", "`file_mounts`: `https://` URLs", "write `az://data/x`", True),
        (
            "{source: 'https://a.blob.core.windows.net/b'}",
            "`file_mounts`: `https://` URLs",
            "write `az://b`, and set AZURE_STORAGE_ACCOUNT_NAME=a ",
            True,
        ),
        ("{source: 's3://b/x', mount_options: -o x}", "`mount_options`: options of the mount program", "remove", True),
        (
            "{source: 's3://b/x', config: {mount_cached: {transfers: 8}}}",
            "`transfers`: broker's own setting is used",
            "",
            False,
        ),
    ],
)
def test_mount_that_is_not_carried_out_as_written_is_named(mount: str, message: str, hint: str, blocks: bool) -> None:
    (notice,) = load_tasks_text(f"run: x\nfile_mounts:\n  /data: {mount}\n", "task.yaml")[0].notices
    assert notice.message.startswith(message) and notice.blocks_launch == blocks and notice.origin.line == 3
    assert (notice.hint or "").startswith(hint)


def test_path_with_a_variable_has_one_note_about_the_variable() -> None:
    text = "envs: {SET: here, UNSET: , EMPTY: ''}\nrun: x\n"
    mounts = {
        "$UNSET/x": [], "$SET/x": ["`file_mounts` names a path that does not exist: `here/x`"],
        "${TYPO}/x": ["`file_mounts`: `TYPO` is not in `envs`"], "{source: $UNSET, name: b-c, store: s3}": [],
        "{name: $TYPO, store: s3}": ["`file_mounts`: `TYPO` is not in `envs`"],
        "{name: $EMPTY, store: s3}": [EMPTY],
        "{name: b-c, store: s3, source: $EMPTY}": [EMPTY],  # not the current folder
        "{name: b-c, store: s3, source: [here, $EMPTY]}": [EMPTY],
        "$EMPTY": ["`file_mounts`: the source of `/data` is empty"],
        "''": ["`file_mounts`: the source of `/data` is empty"],
    }  # fmt: skip
    for mount, expected in mounts.items():
        (task,) = load_tasks_text(f"{text}file_mounts:\n  /data: {mount}\n", "task.yaml")
        assert [each.message for each in task.notices if each.field != "envs"] == expected, mount
    (task,) = load_tasks_text(f"{text}workdir: $TYPO/x\n", "task.yaml")
    assert [each.message for each in task.notices if each.field != "envs"] == ["`workdir`: `TYPO` is not in `envs`"]
