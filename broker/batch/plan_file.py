"""Keep the plan of a map: a file in its output folder, written once, which every worker and every command reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from hashlib import sha256

from broker.batch.splitting import Split
from broker.errors import StateError, UsageError
from broker.frozen import frozen
from broker.storage.base import Bucket
from broker.types import Task

PLAN = "_map/plan.json"
LEASE_S = 60.0


@frozen
class MapPlan:
    """A map's plan.

    `uid` is part of the names of its jobs; `program` is a digest of the task's commands; `files` has digests of the
    files that they name.
    """

    uid: str
    input: str
    program: str
    lease_s: float
    split: Split
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def group(self) -> str:
        """The name under which the jobs of the map are listed and cancelled together."""
        return f"map-{self.uid}"


def digest_program(task: Task) -> str:
    """Return a digest of the task's commands and variables: if it changes, results may change.

    Of a git repository, the commit counts, however it is named.
    """
    names = {"GIT_BRANCH", "GIT_TAG"} if "GIT_COMMIT_HASH" in task.envs else set[str]()
    envs = sorted((name, value) for name, value in task.envs.items() if name not in names)
    return sha256(json.dumps([task.setup, task.run, envs]).encode()).hexdigest()[:16]


def begin(
    bucket: Bucket,
    wanted: Split,
    *,
    input_url: str,
    program: str,
    draw_uid: Callable[[], str],
    lease_s: float,
    files: Mapping[str, str],
) -> tuple[MapPlan, bool]:
    """Write the plan, or read the existing one; return it, and whether it is new.

    Of concurrent commands, one writes it. Raises UsageError if the output folder has other files, or results of another
    input or program, and StateError if the existing plan is damaged or of another version.
    """
    new = MapPlan(uid=draw_uid(), input=input_url, program=program, lease_s=lease_s, split=wanted, files=files)
    content = bucket.read(PLAN)
    if content is None:
        if any("/" not in each.key for each in bucket.list_keys()):
            raise UsageError("the output folder is not empty", hints=["pass `--output` with a new folder"])
        if bucket.write_if_absent(PLAN, encode(new)):
            return new, True
        content = bucket.read(PLAN)
        assert content is not None
    known = decode(content)
    if (known.input, known.split.files, known.split.sizes) != (input_url, wanted.files, wanted.sizes):
        raise _refuse("another input", known)
    marks = zip(wanted.files, known.split.marks, wanted.marks, strict=False)  # plans of earlier versions have none
    if written := [file for file, old, new in marks if old != new]:
        raise _refuse(f"the input before `{written[0]}` was written again", known)
    if known.program != program:
        raise _refuse("another program", known)
    return known, False


def _refuse(what: str, known: MapPlan) -> UsageError:
    return UsageError(
        f"the output folder has results of {what} ({known.group}, input `{known.input}`)",
        hints=["pass `--output` with a new folder, or delete this one"],
    )


def list_changed_files(known: MapPlan, files: Mapping[str, str]) -> Sequence[str]:
    """Return the files of the program that differ from those with which the map began, or are gone."""
    return sorted(name for name, digest in known.files.items() if files.get(name) != digest)


def encode(plan: MapPlan) -> bytes:
    """Return the plan as JSON, in the form that `decode` and the workers read."""
    text = {
        "version": 1, "uid": plan.uid, "input": plan.input, "program": plan.program, "lease_s": plan.lease_s,
        "files": plan.split.files, "sizes": plan.split.sizes, "shards": plan.split.shards, "marks": plan.split.marks,
        "code": plan.files,
    }  # fmt: skip
    return json.dumps(text, separators=(",", ":")).encode()


def decode(content: bytes) -> MapPlan:
    """Read a plan. Raises StateError if it is damaged or of another version."""
    from broker.batch.splitting import Shard

    try:
        read = json.loads(content)
        if read["version"] != 1:
            raise StateError(f"`{PLAN}` has version {read['version']}", hints=("update broker",))
        split = Split(
            files=tuple(read["files"]), sizes=tuple(read["sizes"]),
            shards=tuple(Shard(*each) for each in read["shards"]), marks=tuple(read.get("marks", ())),
        )  # fmt: skip
        return MapPlan(
            uid=str(read["uid"]), input=str(read["input"]), program=str(read["program"]),
            lease_s=float(read["lease_s"]), split=split, files=dict(read.get("code", {})),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(
            f"`{PLAN}` in the output folder is damaged: {error}", hints=("start again with another `--output`",)
        ) from error
