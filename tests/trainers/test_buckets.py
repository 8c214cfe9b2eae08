"""Checkpoints in a bucket: the same promises as on a disk, with a network between."""

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.testbed.objects import Objects, serve_azure, serve_google
from tests.testbed.s3 import BUCKET, LateAnswer, S3Server, Wire, serve_s3
from trainers import buckets
from trainers.checkpoint import FAILURES_MAX, CheckpointManager, find_newest, list_checkpoints
from trainers.errors import CheckpointError, StaleAttemptError, TrainerError
from trainers.map_places import BucketPlace
from trainers.ranks import Ranks
from trainers.storage import Storage, open_storage

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]

ALONE = Ranks(rank=0, world_size=1, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with serve_s3() as server:
        yield server


@pytest.fixture(scope="module")
def google() -> Iterator[tuple[Objects, dict[str, str]]]:
    with serve_google() as served:
        yield served


@pytest.fixture(scope="module")
def azure() -> Iterator[tuple[Objects, dict[str, str]]]:
    with serve_azure() as served:
        yield served


@pytest.fixture(params=["s3", "gs", "az"])
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder of its own in a bucket of each kind."""
    if request.param == "s3":
        variables = request.getfixturevalue("server").variables
    else:
        _, variables = request.getfixturevalue("google" if request.param == "gs" else "azure")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return f"{request.param}://{BUCKET}/{uuid.uuid4().hex}/checkpoints"


@pytest.fixture
def s3_url(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{uuid.uuid4().hex}/checkpoints"


class Weights:
    """A state large enough to be on the wire for a while."""

    def __init__(self, count: int = 1000) -> None:
        self.values = torch.zeros(count)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values.copy_(state["values"])


def open_manager(storage: Storage, weights: Weights, attempt: int = 1, keep: int = 3) -> CheckpointManager:
    return CheckpointManager(storage, ALONE, attempt=attempt, keep=keep, shared={"weights": weights}, own={})


def save_steps(storage: Storage, *steps: int, count: int = 1000, attempt: int = 1, keep: int = 3) -> None:
    weights = Weights(count)
    manager = open_manager(storage, weights, attempt, keep)
    for step in steps:
        weights.values.fill_(step)
        manager.save(step)
        manager.wait_for_copy()
    manager.wait()
    assert manager.step_committed == steps[-1]


def restore(storage: Storage, attempt: int = 9, count: int = 1000) -> int | None:
    weights = Weights(count)
    step = open_manager(storage, weights, attempt).restore()
    assert bool((weights.values == (step or 0)).all())
    return step


def test_newest_is_restored_and_the_last_are_kept(url: str) -> None:
    storage = open_storage(url)
    assert restore(storage, attempt=1) is None
    save_steps(storage, 5, 10, 15, attempt=2, keep=2)
    assert [name.step for name in list_checkpoints(storage)] == [15, 10]
    assert restore(open_storage(url)) == 15


def test_checkpoints_with_any_kind_of_damage_are_skipped(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    storage = open_storage(url)
    save_steps(storage, 5, 10, 15, 20, 25, keep=9)
    torn, short, gone, half = (str(name) for name in list_checkpoints(storage)[:4])
    storage.delete(f"{torn}/manifest.json")
    content = storage.read(f"{short}/__0_0.distcp")
    manifest = storage.read(f"{half}/manifest.json")
    assert content is not None and manifest is not None
    storage.delete(f"{short}/__0_0.distcp")
    assert storage.create(f"{short}/__0_0.distcp", content[:-1])
    storage.delete(f"{gone}/__0_0.distcp")
    storage.delete(f"{half}/manifest.json")
    assert storage.create(f"{half}/manifest.json", manifest[:60])
    assert restore(storage) == 5
    warnings = capsys.readouterr().err
    assert all(f"skipping checkpoint `{name}`" in warnings for name in (torn, short, gone, half))


def test_manifest_seals_what_lies_in_the_bucket(url: str) -> None:
    storage = open_storage(url)
    save_steps(storage, 5, count=3_000_000)
    found = find_newest(open_storage(url))
    assert found is not None and found[0].step == 5


def test_large_file_is_uploaded_in_parts_and_restored(
    google: tuple[Objects, dict[str, str]],
    azure: tuple[Objects, dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(buckets, "PART_BYTES", 6 * 2**20)
    for scheme, (objects, variables) in (("gs", google), ("az", azure)):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        before = objects.part_count
        storage = open_storage(f"{scheme}://{BUCKET}/parts")
        save_steps(storage, 5, count=5_000_000)  # 19 MiB
        assert objects.part_count - before >= 3
        assert restore(open_storage(f"{scheme}://{BUCKET}/parts"), count=5_000_000) == 5


def test_stale_attempt_is_refused_at_start_and_at_commit(url: str) -> None:
    storage = open_storage(url)
    old = open_manager(storage, Weights(), attempt=1)
    open_manager(storage, Weights(), attempt=2)
    old.save(5)
    with pytest.raises(StaleAttemptError, match="attempt 2 of this job has started"):
        old.wait()
    assert old.step_committed is None and restore(storage, attempt=3) is None
    with pytest.raises(StaleAttemptError):
        open_manager(storage, Weights(), attempt=1)


def test_manifest_that_someone_else_wrote_is_not_overwritten(url: str) -> None:
    storage = open_storage(url)
    manager = open_manager(storage, Weights())
    name = f"step-00000005-attempt-0001-{manager._run}"
    assert storage.create(f"{name}/manifest.json", b"{}")
    manager.save(5)
    with pytest.raises(CheckpointError, match="already committed by another process"):
        manager.wait()
    assert storage.read(f"{name}/manifest.json") == b"{}"


def test_connection_cut_in_the_middle_of_an_upload_is_made_again(
    s3_url: str, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = Wire(target=server.port, cuts_left=2)
    wire.open()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{wire.port}")
    try:
        save_steps(open_storage(s3_url), 5, count=500_000)
    finally:
        wire.close()
    assert wire.cuts_made == 2
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")
    assert restore(open_storage(s3_url), count=500_000) == 5


@pytest.mark.parametrize("kind", [buckets.BucketStorage, BucketPlace])
def test_conditional_write_whose_answer_does_not_arrive_in_time_is_ours(server: S3Server, kind: type[Any]) -> None:
    """Otherwise one lost answer ends the worker of a map, or a checkpoint counts as that of another process."""
    key = f"late-{kind.__name__}"
    answer = LateAnswer(server, key)
    storage = kind(answer.open_store(server), f"s3://{BUCKET}")
    try:
        assert storage.create(key, b"ours") and answer.held == 1
        assert not storage.create(key, b"ours"), "the second call did not create it"
        assert storage.read(key) == b"ours"
    finally:
        answer.release()


class Refusing(buckets.BucketStorage):
    """A bucket whose login has expired, for this many manifests."""

    refusals = 0

    def create(self, path: str, content: bytes) -> bool:
        if path.endswith("manifest.json") and self.refusals:
            self.refusals -= 1
            raise OSError("login expired")
        return super().create(path, content)


def test_training_outlives_a_few_failed_checkpoints_but_not_many(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    storage = Refusing(buckets.open_bucket(url)._store, url)
    storage.refusals = FAILURES_MAX - 1
    manager = open_manager(storage, Weights())
    for step in range(1, FAILURES_MAX + 1):
        manager.save(step)
    manager.wait()
    assert manager.step_committed == FAILURES_MAX
    assert capsys.readouterr().err.count("login expired; training continues") == FAILURES_MAX - 1
    storage.refusals = 99
    with pytest.raises(CheckpointError, match="login expired"):
        for step in range(10, 20):
            manager.save(step)
    newest = find_newest(open_storage(url))
    assert newest is not None and newest[0].step == FAILURES_MAX


def test_last_step_is_saved_again_where_it_failed(url: str) -> None:
    storage = Refusing(buckets.open_bucket(url)._store, url)
    storage.refusals = 1
    manager = open_manager(storage, Weights())
    manager.save(5)
    manager.save(5)  # as at the end of a run whose last step was due anyway
    manager.wait()
    assert manager.step_committed == 5


def test_missing_bucket_is_a_one_line_error(s3_url: str) -> None:
    with pytest.raises(
        CheckpointError, match=r"checkpoints cannot be reached: could not write to `s3://no-such-one/x`"
    ):
        open_manager(open_storage("s3://no-such-one/x"), Weights())
    with pytest.raises(TrainerError, match="`s3:///path` names no bucket"):
        open_storage("s3:///path")


def test_bucket_is_used_in_its_own_region_whatever_the_variables_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "find_region", {"b": "eu-central-1"}.get)
    monkeypatch.setattr(buckets, "find_s3_provider", lambda: None)
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    assert buckets.find_s3_options("b") == {"region": "eu-central-1"}
    assert buckets.find_s3_options("unreachable") == {}, "the library reads the variable"
