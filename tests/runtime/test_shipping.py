"""The bundled trainers reach every node of a task that runs them, and no other."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import zipfile
from io import BytesIO
from pathlib import Path

import pytest
from local_gang import Rig, make_task

from broker.errors import StateError
from broker.runtime import shipping
from broker.types import RunStatus

WHERE = "import trainers; print('from', trainers.__file__)"
RUN = f'python -m trainers.launch >/dev/null 2>&1; python -c "{WHERE}"'


def test_node_imports_the_trainers_that_were_sent(rig: Rig) -> None:
    async def act() -> None:
        cluster = await rig.make_cluster(2)
        await rig.start(cluster, make_task(RUN, num_nodes=2))
        assert (await rig.finish(cluster)).status is RunStatus.SUCCEEDED
        log = await rig.read_log(cluster)
        for node, mark in zip(cluster.nodes, ("", "(rank1) "), strict=True):
            folder = f"{node.handle}/home/.broker/trainers/{shipping.pack_trainers().name}"
            assert f"{mark}from {folder}/trainers/__init__.py\n" in log, log

    asyncio.run(act())


def test_node_of_another_task_gets_none(rig: Rig) -> None:
    async def act() -> None:
        cluster = await rig.make_cluster(1)
        await rig.start(cluster, make_task('echo "path=$PYTHONPATH python=$BROKER_PYTHON"; ls ~/.broker'))
        assert (await rig.finish(cluster)).status is RunStatus.SUCCEEDED
        log = await rig.read_log(cluster)
        assert "path= python=\n" in log and "trainers" not in log

    asyncio.run(act())


def test_values_that_a_task_sets_come_after_the_trainers(rig: Rig) -> None:
    async def act() -> None:
        cluster = await rig.make_cluster(1)
        run = 'echo "$PYTHONPATH"; echo "$PATH"; : -m trainers.launch'
        await rig.start(cluster, make_task(run, envs={"PYTHONPATH": "/mine", "PATH": "/tools:/usr/bin:/bin"}))
        assert (await rig.finish(cluster)).status is RunStatus.SUCCEEDED
        home = f"{cluster.nodes[0].handle}/home/.broker"
        log = await rig.read_log(cluster)
        assert f"{home}/trainers/{shipping.pack_trainers().name}:/mine\n" in log
        assert f"{home}/python/node/bin:/tools:/usr/bin:/bin\n" in log

    asyncio.run(act())


def test_folders_for_state_exist_before_the_program_starts(rig: Rig, tmp_path: Path) -> None:
    async def act() -> None:
        cluster = await rig.make_cluster(1)
        places = {"BROKER_CHECKPOINT_DIR": f"{tmp_path}/a/b", "BROKER_PIPELINE_DIR": f"file://{tmp_path}/c d"}
        run = 'cd "$BROKER_CHECKPOINT_DIR" && cd "${BROKER_PIPELINE_DIR#file://}" && echo both'
        await rig.start(cluster, make_task(run, envs=places))
        assert (await rig.finish(cluster)).status is RunStatus.SUCCEEDED, await rig.read_log(cluster)

    asyncio.run(act())


def test_folder_that_cannot_be_created_is_reported_and_the_program_runs(rig: Rig, tmp_path: Path) -> None:
    async def act() -> None:
        (tmp_path / "file").touch()
        cluster = await rig.make_cluster(1)
        await rig.start(cluster, make_task("echo ran", envs={"BROKER_CHECKPOINT_DIR": f"{tmp_path}/file/b"}))
        assert (await rig.finish(cluster)).status is RunStatus.SUCCEEDED
        log = await rig.read_log(cluster)
        assert f"warning: cannot create the folder {tmp_path}/file/b: Not a directory\n" in log and "ran\n" in log

    asyncio.run(act())


@pytest.mark.parametrize(
    ("run", "is_needed"),
    [
        ("python -m trainers.lm --strategy ddp", True),
        ("torchrun --nproc-per-node 8 \\\n  -m \\\n  trainers.lm", True),
        ('subprocess.run(["python", "-m", "trainers.lm"])', True),
        ("python train.py --trainers.lm 3", False),
        ("python -m my.trainers.lm", False),
        ("python -m trainers_of_mine.lm", False),
        (None, False),
    ],
)
def test_task_needs_the_trainers_where_it_starts_one(run: str | None, is_needed: bool) -> None:
    assert shipping.needs_trainers(make_task(run)) is is_needed
    assert shipping.needs_trainers(make_task("true", setup=run)) is is_needed


def test_archive_depends_on_the_content_of_the_files_alone(tmp_path: Path) -> None:
    for place, time_s in (("one", 1_000_000_000), ("two", 1_700_000_000)):
        folder = tmp_path / place / "trainers"
        (folder / "__pycache__").mkdir(parents=True)
        (folder / "__pycache__" / "a.cpython-311.pyc").write_text(place)
        for name in ("b.py", "a.py") if place == "one" else ("a.py", "b.py"):
            (folder / name).write_text(name)
            os.utime(folder / name, (time_s, time_s))
    one, two = (shipping.pack(tmp_path / place / "trainers") for place in ("one", "two"))
    assert one == two and zipfile.ZipFile(BytesIO(one.content)).namelist() == ["trainers/a.py", "trainers/b.py"]
    (tmp_path / "two" / "trainers" / "a.py").write_text("changed")
    assert shipping.pack(tmp_path / "two" / "trainers").digest != one.digest


def unpack(home: Path, content: bytes, archive: shipping.Archive) -> subprocess.CompletedProcess[bytes]:
    argv = [sys.executable, "-I", "-S", "-c", shipping.UNPACK, archive.digest, archive.name]
    return subprocess.run(argv, input=content, env={"HOME": str(home)}, capture_output=True)


def test_damaged_archive_leaves_nothing_and_a_whole_one_is_kept(tmp_path: Path) -> None:
    archive = shipping.pack_trainers()
    done = unpack(tmp_path, archive.content[:-1], archive)
    assert done.returncode and b"checksum" in done.stderr and not list(tmp_path.iterdir())
    for _ in range(2):
        assert unpack(tmp_path, archive.content, archive).returncode == 0
    (folder,) = (tmp_path / ".broker/trainers").iterdir()
    assert (folder / "trainers/lm.py").read_bytes() == (
        Path(shipping.__file__).parents[2] / "trainers/lm.py"
    ).read_bytes()


def test_missing_trainers_are_an_error_that_names_the_package_to_reinstall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StateError, match="trainers are not installed") as caught:
        shipping.pack_trainers.__wrapped__()
    assert caught.value.hints
