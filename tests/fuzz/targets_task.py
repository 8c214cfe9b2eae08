"""Hostile task files and command lines: the result is a task or one of our errors, never a stack trace."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from broker.cli.main import main
from broker.errors import TaskError
from broker.task.checking import check_task
from broker.task.codec import decode_task, encode_task
from broker.task.diagnostics import render_issue
from broker.task.fields import TASK
from broker.task.loader import load_tasks
from broker.task.notices import render_notice
from tests.fuzz.registry import Target

EXIT_CODES = (0, 1, 2, 3, 4, 5, 130)
FAULT = "this is a fault of broker"
_FOLDER = Path(tempfile.mkdtemp(prefix="fuzz-task-"))
_VALID = b"""\
name: train
num_nodes: 2
envs: {SIZE: 8b, TOKEN: }
secrets: {KEY: "a\\tb"}
resources:
  infra: aws/us-east-1
  accelerators: {A100:8, H100: 8}
  labels: {team: x}
  any_of: [&spot {use_spot: true}, {<<: *spot, use_spot: false, image_id: {us-east-1: ami-1}}]
  ports: [8080, 9000-9010]
  autostop: 10m
file_mounts: {/data: {name: "data-${SIZE}", store: s3, mode: MOUNT}, ~/x: s3://bucket/x}
goal: {work: {hours: 100, on: A100:8}, deadline: 1d12h, budget: 50}
checkpoint: {every: 10m, to: s3://b/c}
run: |
  echo hello
"""
_PIPELINE = b"name: whole\n---\nname: a\nrun: x\noutputs: {s3://b/d: 1GB}\n---\nname: b\nneeds: {a: 1TB}\nrun: y\n"
_LAUGHS = b"a: &a [x, x, x]\nb: &b [*a, *a, *a, *a]\nc: &c [*b, *b, *b, *b]\nd: [*c, *c, *c, *c]\n"


def fuzz_yaml(data: bytes) -> None:
    """Check that only TaskError comes out; a task that loads is allowed in full, and survives the store's encoding."""
    path = _FOLDER / "task.yaml"
    path.write_bytes(data)
    try:
        tasks = load_tasks(path)
    except TaskError as error:
        assert 0 < len(error.issues) <= 100
        for issue in error.issues:
            render_issue(issue).encode()
        return
    for task in tasks:
        check_task(task)
        for notice in task.notices:
            assert "\n" not in render_notice(notice)
        assert decode_task(encode_task(task), {key: each.value for key, each in task.secrets.items()}) == task


# Commands that change nothing outside the state folder, which is thrown away, and start nothing.
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("plan",), ("launch", "--dryrun"), ("jobs", "launch", "--dryrun"), ("schema",), ("prices",), ("history",),
    ("gpus",), ("status",), ("queue",), ("logs",), ("jobs", "queue"), ("jobs", "why"), ("jobs", "events"),
    ("jobs", "logs"),
    ("cost",), ("advise",), ("catalog", "info"), ("exec",), ("cancel",), ("down",), ("stop",), ("start",),
    ("autostop",),
    ("catalog", "import"), ("simulate",), ("jobs", "wait"), ("jobs", "retry"),
)  # fmt: skip
FLAGS = (
    "--infra", "--gpus", "--cpus", "--memory", "--instance-type", "--num-nodes", "--use-spot", "--name", "--env",
    "--env-file", "--secret", "--json", "--all", "--yes", "--output", "--what-if", "--pareto", "--explain", "--plot",
    "--max-price", "--minimize", "--deadline-hours", "--params", "--tokens", "-c", "--request-id", "--hedge", "--for",
    "--timeout", "--region", "--spot", "--limit", "--help", "--workdir", "--days",
)  # fmt: skip
VALUES = (
    "aws", "gcp/us-central1", "local", "H100:8", "A100", "4+", "32GB+", "1", "0", "-1", "1e9", "nan", "inf",
    "deadline=24h", "A=b", "A", "=", "", "-", "--", "x" * 200, "7B", "20B", "json", "m5.large", "1-2", "RUNNING",
    "\udcff", "\x1b[31m",
    "é", "task.yaml", "missing.yaml", "folder", "/dev/null", "../..", "binary", "%s", "{}",
)  # fmt: skip
WORDS = (*FLAGS, *VALUES, *TASK.fields)


def fuzz_arguments(data: bytes) -> None:
    """Fuzz arguments.

    The first byte picks the command; each further one a word, or 0xff a text of the bytes up to the next.
    """
    words = list(COMMANDS[data[0] % len(COMMANDS)]) if data else []
    for part in data[1:].split(b"\xff"):
        words += [WORDS[each % len(WORDS)] for each in part[:12]]
        if len(part) > 12:
            words.append(part[12:200].decode("utf-8", "surrogateescape").replace("\0", ""))
    run_command(words[:24])


def run_command(words: Sequence[str]) -> None:
    """Run a command in a folder of its own, without logins."""
    _prepare()
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.chdir(_FOLDER):
        try:
            main(words)
        except SystemExit as leave:
            code = leave.code or 0
    assert code in EXIT_CODES and FAULT not in err.getvalue(), (words, code, err.getvalue()[-2000:])


def _prepare() -> None:
    os.environ.update(
        BROKER_HOME=str(_FOLDER / "home"), XDG_CACHE_HOME=str(_FOLDER / "cache"), AWS_CONFIG_FILE="/nowhere",
        AWS_SHARED_CREDENTIALS_FILE="/nowhere", AWS_EC2_METADATA_DISABLED="true", CLOUDSDK_CONFIG="/nowhere",
        BROKER_SKY_PYTHON="/nowhere",
    )  # fmt: skip
    (_FOLDER / "folder").mkdir(exist_ok=True)
    (_FOLDER / "task.yaml").write_bytes(_VALID.replace(b"infra: aws/us-east-1", b"infra: aws"))
    (_FOLDER / "binary").write_bytes(bytes(range(256)))


FUZZ_TARGETS: dict[str, Target] = {"yaml": fuzz_yaml, "arguments": fuzz_arguments}
SEEDS = {
    "yaml": [_VALID, _PIPELINE, _LAUGHS, b"[" * 3000, b"x: " + b"y" * 60_000, b"\xff\xfea\0", b"run: x\n"],
    "arguments": [bytes([each]) for each in range(len(COMMANDS))],
}
