"""No task can write to the backups of its server, where a single key would stop the server for good."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from broker.app.backup_place import check_backups
from broker.app.container import Context
from broker.errors import UsageError
from broker.types import CheckpointSpec, DataSet, StorageMount, Task

OWNER = "0123456789ab"
BACKUP = "s3://lab/broker"


def mount(url: str, mode: Any = "MOUNT") -> Task:
    return Task(storage_mounts=(StorageMount(target="/x", source=(url,), mode=mode),))


def keep(to: str) -> Task:
    return Task(checkpoint=CheckpointSpec(to=to))


def write(url: str) -> Task:
    return Task(outputs=(DataSet(url=url, size_gib=1.0),))


def check(home: Path, task: Task, backup: str = BACKUP) -> None:
    (home / "config.toml").write_text(f'backup = "{backup}"\n')
    (home / "owner").write_text(OWNER)
    check_backups(Context(home), [task])


@pytest.mark.parametrize(
    "task",
    [
        mount("s3://lab"), mount("s3://lab/broker"), mount("s3://lab/broker/epochs"), mount("s3://lab/broker/states/x"),
        write("s3://lab/broker/epochs"), write("s3://lab/broker/"), keep("s3://lab/broker/epochs"),
    ],
)  # fmt: skip
def test_task_that_could_write_to_the_backups_is_refused(tmp_path: Path, task: Task) -> None:
    with pytest.raises(UsageError, match="could write to the backups of this server"):
        check(tmp_path, task)


@pytest.mark.parametrize(
    "task",
    [
        mount("s3://lab", "COPY"), mount("s3://lab/data"), mount("s3://lab/broker-runs"), mount("s3://other/broker"),
        mount("gs://lab/broker"), write("s3://lab/results"), keep("s3://lab"), keep("s3://lab/broker"), Task(),
    ],
)  # fmt: skip
def test_other_places_in_the_bucket_can_be_used(tmp_path: Path, task: Task) -> None:
    """Checkpoints are in folders that begin with the ID of the installation."""
    check(tmp_path, task)


def test_backups_at_the_root_of_a_bucket_leave_room_for_others(tmp_path: Path) -> None:
    check(tmp_path, write("s3://lab/results"), backup="s3://lab")
    with pytest.raises(UsageError):
        check(tmp_path, write("s3://lab/epochs"), backup="s3://lab")
