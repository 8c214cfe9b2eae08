"""`trainers.bridge`: a folder is a checkpoint only when it is complete; notices and progress reach both sides."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from trainers import bridge

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith(("BROKER_", "SKYPILOT_", "OMPI_"))]:
        monkeypatch.delenv(name)
    for name in ("RANK", "LOCAL_RANK", "CHECKPOINTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("BROKER_CHECKPOINT_DIR", str(tmp_path / "checkpoints"))
    monkeypatch.setattr(bridge, "_State", type("_State", (), dict(vars(bridge._State))))


def save(step: int, text: str = "weights") -> Path:
    folder = bridge.folder_of(step)
    (folder / "state").write_text(text)
    return folder


def test_first_start_has_no_checkpoint() -> None:
    assert bridge.resume() == (0, None)


def test_interrupted_checkpoint_is_never_resumed_from() -> None:
    first = save(20)
    bridge.commit(20)
    save(40)
    assert bridge.resume() == (20, first)


def test_step_that_a_later_attempt_repeated_counts_once_and_as_the_later(monkeypatch: pytest.MonkeyPatch) -> None:
    save(20)
    bridge.commit(20)
    monkeypatch.setenv("BROKER_ATTEMPT", "2")
    again = save(20)
    bridge.commit(20)
    assert bridge.resume() == (20, again)


def test_checkpoint_that_is_written_again_is_incomplete_until_it_is_committed_again() -> None:
    """A kill in between left a torn checkpoint that counted, and every later start failed on it."""
    first = save(20)
    bridge.commit(20)
    again = save(40)
    bridge.commit(40)
    assert save(40, "half") == again and bridge.resume() == (20, first)
    bridge.commit(40)
    assert bridge.resume() == (40, again)


def test_new_folder_is_on_the_disk_before_older_ones_are_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    save(20)
    bridge.commit(20, keep=1)
    events: list[str] = []
    flush, remove = bridge._flush, bridge.shutil.rmtree
    monkeypatch.setattr(bridge, "_flush", lambda path: (events.append(path.name), flush(path)))
    monkeypatch.setattr(bridge.shutil, "rmtree", lambda path, **named: (events.append("rmtree"), remove(path)))
    folder = save(40)
    bridge.commit(40, keep=0)  # the new one stays whatever is asked for
    assert events == ["state", folder.name, folder.parent.name, "rmtree"]
    assert bridge.resume() == (40, folder)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_mount_that_cannot_flush_folders_holds_checkpoints_but_a_failed_flush_is_an_error(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    flush = os.fsync

    def refuse(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(number, os.strerror(number))
        flush(fd)

    save(20)
    monkeypatch.setattr(os, "fsync", refuse)
    if number == errno.EIO:
        with pytest.raises(OSError, match="rror"):
            bridge.commit(20)
    else:
        bridge.commit(20)
        assert bridge.resume()[0] == 20


def test_newest_checkpoints_are_kept_and_others_deleted() -> None:
    for step in (9, 10, 100):
        save(step)
        bridge.commit(step, keep=2)
    assert [path.name[:13] for path in sorted(bridge.checkpoint_folder().iterdir())] == [
        "step-00000010",
        "step-00000100",
    ]


def test_folders_that_earlier_attempts_left_incomplete_are_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each interrupted save would fill the disk."""
    save(20)
    bridge.commit(20)
    save(40)
    monkeypatch.setenv("BROKER_ATTEMPT", "2")
    under_way = save(60)
    later = bridge.checkpoint_folder() / "step-00000070-attempt-0003"
    later.mkdir()
    save(30)
    bridge.commit(30)
    assert [path.name[:13] for path in sorted(bridge.checkpoint_folder().iterdir())] == [
        "step-00000020",
        "step-00000030",
        "step-00000060",
        "step-00000070",
    ]
    assert under_way.exists() and later.exists()


def test_bucket_url_is_passed_on_and_a_folder_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROKER_CHECKPOINT_DIR", "gs://bucket/job")
    assert bridge.checkpoint_dir() == "gs://bucket/job"
    with pytest.raises(ValueError, match="CHECKPOINTS"):
        bridge.checkpoint_folder()


@pytest.mark.parametrize(
    ("variables", "is_first"),
    [
        ({}, True),
        ({"SKYPILOT_NODE_RANK": "1"}, False),
        ({"RANK": "1", "LOCAL_RANK": "1"}, False),
        ({"SKYPILOT_NODE_RANK": "0", "LOCAL_RANK": "1", "RANK": "1"}, False),
        # torchrun's elastic rendezvous gave rank 0 to the second node; broker reads the progress of the first.
        ({"SKYPILOT_NODE_RANK": "0", "LOCAL_RANK": "0", "RANK": "1"}, True),
        ({"SKYPILOT_NODE_RANK": "1", "LOCAL_RANK": "0", "RANK": "0"}, False),
    ],
)
def test_first_rank_is_on_the_node_whose_progress_is_read(
    variables: dict[str, str], is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert bridge.is_first() is is_first


def test_progress_lines_hold_step_loss_and_newest_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "progress.jsonl"
    monkeypatch.setenv("BROKER_PROGRESS_FILE", str(file))
    save(1)
    bridge.commit(1)
    bridge.progress(1, 10, 0.5)
    bridge.progress(2, 10, float("nan"), extra=3)
    first, second = [json.loads(line) for line in file.read_text().splitlines()]
    assert (first["step"], first["total"], first["loss"], first["checkpoint_step"]) == (1, 10, 0.5, 1)
    assert first["start_cpu_s"] > 0 and "start_cpu_s" not in second
    assert second["loss"] is None and second["extra"] == 3


@pytest.mark.parametrize("name", ["RANK", "OMPI_COMM_WORLD_RANK", "SKYPILOT_NODE_RANK"])
def test_only_the_first_rank_reports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.setenv("BROKER_PROGRESS_FILE", str(tmp_path / "progress.jsonl"))
    monkeypatch.setenv(name, "1")
    bridge.progress(1, 10)
    assert not (tmp_path / "progress.jsonl").exists()


def test_notice_is_the_file_or_sigterm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        monkeypatch.setenv("BROKER_PREEMPTION_FILE", str(tmp_path / "preemption"))
        assert not bridge.preempted()
        (tmp_path / "preemption").touch()
        assert bridge.preempted()
        (tmp_path / "preemption").unlink()
        signal.raise_signal(signal.SIGTERM)
        assert bridge.preempted()
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("text", "seconds"), [("", 600.0), ("30", 30.0), ("x", 600.0), ("-1", 600.0)])
def test_interval_is_the_brokers_or_the_default(monkeypatch: pytest.MonkeyPatch, text: str, seconds: float) -> None:
    monkeypatch.setenv("BROKER_CHECKPOINT_EVERY_S", text)
    assert bridge.every_s() == seconds


def test_addresses_are_those_of_the_gang(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (bridge.node_addresses(), bridge.node_count(), bridge.port(1)) == (["127.0.0.1"], 1, 29501)
    monkeypatch.setenv("SKYPILOT_NODE_IPS", "10.0.0.1\n10.0.0.2")
    assert bridge.node_addresses() == ["10.0.0.1", "10.0.0.2"]


def test_each_node_reports_its_own_time_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BROKER_PROGRESS_FILE", str(tmp_path / "progress.jsonl"))
    for rank, local_rank in ((0, 0), (1, 1), (2, 0), (3, 1)):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        bridge.progress(7, 30, 0.5, own_s=0.25 + rank)
        bridge.progress(8, 30, 0.5)
    lines = [json.loads(line) for line in (tmp_path / "progress.jsonl").read_text().splitlines()]
    assert [(line["step"], line.get("own_s"), line.get("total")) for line in lines] == [
        (7, 0.25, 30), (8, None, 30), (7, 2.25, None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("local_rank", "current", "seen", "device"),
    [
        ("3", 0, 8, "cuda:3"),  # the program never made its GPU the current one
        ("3", 3, 8, "cuda:3"),
        ("3", 0, 1, "cuda:0"),  # each process sees its own GPU only
        (None, 5, 8, "cuda:5"),
    ],
)
def test_ranks_agree_on_the_gpu_of_their_local_rank(
    monkeypatch: pytest.MonkeyPatch, local_rank: str | None, current: int, seen: int, device: str
) -> None:
    torch = pytest.importorskip("torch")
    from trainers.bridge_torch import find_device

    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "nccl")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert str(find_device()) == device


PROGRAM = """
import sys
from trainers import bridge
step, folder = bridge.resume()
value = float((folder / "state").read_text()) if folder else 0.0
while step < 30:
    step += 1
    value = value * 1.1 + step
    is_leaving = bridge.preempted()
    if is_leaving or step % 5 == 0:
        (bridge.folder_of(step) / "state").write_text(repr(value))
        bridge.commit(step)
    bridge.progress(step, 30, value)
    if step == int(sys.argv[1]):
        import os; os.kill(os.getpid(), int(sys.argv[2]))
    elif is_leaving:
        bridge.leave()
bridge.finish(30, [repr(value).encode()])
"""


def run(folder: Path, step: int, number: int) -> int:
    variables = {**os.environ, "BROKER_CHECKPOINT_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-c", PROGRAM, str(step), str(int(number))]
    return subprocess.run(argv, env=variables, capture_output=True).returncode


def test_killed_and_preempted_program_ends_like_an_undisturbed_one(tmp_path: Path) -> None:
    assert run(tmp_path / "a", 13, signal.SIGKILL) == -signal.SIGKILL
    assert run(tmp_path / "a", 22, signal.SIGTERM) == bridge.EXIT_CODE_PREEMPTED
    assert run(tmp_path / "a", 0, 0) == run(tmp_path / "b", 0, 0) == 0
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in "ab"]
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]
