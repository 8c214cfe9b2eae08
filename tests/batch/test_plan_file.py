"""The plan of a map in its output folder: written once, and the conditions under which a command may continue it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from broker.batch.plan_file import LEASE_S, PLAN, MapPlan, begin, decode, digest_program, encode, list_changed_files
from broker.batch.splitting import Shard, Split
from broker.errors import StateError, UsageError
from broker.storage import open_bucket
from broker.storage.base import Bucket
from broker.types import Task

SPLIT = Split(files=("a.jsonl",), sizes=(9,), shards=(Shard(0, 0, 5), Shard(0, 5, 9)), marks=("m1",))
NAMES = iter(f"uid{number}" for number in range(1000))


def start(
    bucket: Bucket, split: Split = SPLIT, *, input_url: str = "s3://in", program: str = "p1"
) -> tuple[MapPlan, bool]:
    return begin(
        bucket, split, input_url=input_url, program=program, draw_uid=lambda: next(NAMES), lease_s=LEASE_S,
        files={"run.py": "d1"},
    )  # fmt: skip


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return open_bucket((tmp_path / "out").as_uri())


def test_the_same_map_is_continued_under_its_first_uid(bucket: Bucket) -> None:
    plan, is_new = start(bucket)
    again, is_new_again = start(bucket)
    assert (is_new, is_new_again) == (True, False) and again == plan
    assert decode(encode(plan)) == plan, "nothing of it is lost in the file that workers read"
    assert plan.lease_s == 60.0, "a lease of no length would let two workers map one shard"


@pytest.mark.parametrize(
    "change",
    [
        {"input_url": "s3://other"},
        {"split": replace(SPLIT, files=("b.jsonl",))},
        {"split": replace(SPLIT, sizes=(10,))},
    ],
)
def test_results_of_another_input_are_refused(bucket: Bucket, change: dict[str, object]) -> None:
    start(bucket)
    with pytest.raises(UsageError, match="results of another input"):
        start(bucket, **change)  # type: ignore[arg-type]


def test_results_of_another_program_and_of_an_input_that_was_written_again_are_refused(bucket: Bucket) -> None:
    start(bucket)
    with pytest.raises(UsageError, match="results of another program"):
        start(bucket, program="p2")
    with pytest.raises(UsageError, match=r"the input before `a\.jsonl` was written again"):
        start(bucket, replace(SPLIT, marks=("m2",)))


def test_folder_that_holds_a_file_is_not_empty(bucket: Bucket) -> None:
    bucket.write("notes.txt", b"x")
    with pytest.raises(UsageError, match="the output folder is not empty"):
        start(bucket)
    assert bucket.read(PLAN) is None
    bucket.delete("notes.txt")
    bucket.write("logs/notes.txt", b"x")
    assert start(bucket)[1], "folders of programs on the nodes, such as their logs, are no results"


@pytest.mark.parametrize("content", [b"{", b"[]", b"{}", b'{"version": 1, "uid": "x"}'])
def test_damaged_plan_is_a_state_error(bucket: Bucket, content: bytes) -> None:
    bucket.write(PLAN, content)
    with pytest.raises(StateError, match="is damaged"):
        start(bucket)


def test_plan_of_another_version_is_not_taken_for_a_damaged_one() -> None:
    with pytest.raises(StateError, match="has version 2"):
        decode(b'{"version": 2}')


def test_digest_follows_commands_and_variables_and_of_a_repository_the_commit_alone() -> None:
    task = Task(run="a", setup="b", envs={"X": "1"})
    others = [replace(task, run="c"), replace(task, setup="c"), replace(task, envs={"X": "2"})]
    assert len({digest_program(each) for each in (task, *others)}) == 4
    git = {"GIT_COMMIT_HASH": "c1", "GIT_BRANCH": "main"}
    named = replace(task, envs=git)
    assert digest_program(named) == digest_program(replace(task, envs={**git, "GIT_BRANCH": "v1"}))
    assert digest_program(named) != digest_program(replace(task, envs={**git, "GIT_COMMIT_HASH": "c2"}))
    branch = replace(task, envs={"GIT_BRANCH": "main"})
    assert digest_program(branch) != digest_program(replace(task, envs={"GIT_BRANCH": "v1"})), "the user's own variable"


def test_files_of_the_program_that_differ_or_are_gone_are_listed() -> None:
    plan = MapPlan(uid="u", input="i", program="p", lease_s=1.0, split=SPLIT, files={"a": "1", "b": "2", "c": "3"})
    assert list_changed_files(plan, {"a": "1", "b": "9", "d": "4"}) == ["b", "c"]
