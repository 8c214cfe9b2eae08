"""For any file content, the user gets tasks or our error with a position; never a stack trace."""

from __future__ import annotations

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from broker.errors import TaskError
from broker.task.diagnostics import render_issue
from broker.task.fields import TASK
from broker.task.loader import load_tasks_text
from broker.task.notices import refuse_blocking, render_notice
from tests.tiers import examples

VALID = """\
name: whole
---
name: prepare
envs: {SIZE: 8b, TOKEN: }
resources:
  infra: aws/us-east-1
  accelerators: {A100:8, H100: 8}
  memory: 32GB+
  any_of: [&spot {use_spot: true}, {<<: *spot, use_spot: false, image_id: {us-east-1: ami-1}}]
outputs: {s3://bucket/data: 120GB}
file_mounts: {/data: {name: "data-${SIZE}", mode: MOUNT}}
run: |
  echo hello
---
name: train
needs: {prepare: 1.5TB}
num_nodes: 2
resources: {ports: [8080, 9000-9010], autostop: 10m, job_recovery: {max_restarts_on_errors: 3}}
goal: {work: {hours: 100, on: A100:8}, deadline: 1d12h, budget: 50}
checkpoint: {every: 10m, stall: 0}
service: {readiness_probe: {path: /}, replica_policy: {min_replicas: 1}}
run: python train.py
"""
WORDS = [*TASK.fields, "any_of", "&a", "*a", "<<", "null", "{", "}", "[", "]", ": ", "- ", "\n", "  ", "---\n", "!!int",
         "9" * 70, "1e400", ".inf", "'", '"', "|", ">", "#", "%", "\t", "${SIZE}", "\u2028", "\x85", "é"]  # fmt: skip
FUZZ = settings(max_examples=examples(250), deadline=None, suppress_health_check=list(HealthCheck))


def check(text: str) -> None:
    try:
        tasks = load_tasks_text(text, "any.yaml", envs={"A": "b"})
    except TaskError as error:
        assert 0 < len(error.issues) <= 100
        for issue in error.issues:
            assert issue.line <= text.count("\n") + text.count("\r") + text.count("\x85") + text.count("\u2028") + 2
            assert render_issue(issue).isprintable() or "\n" in render_issue(issue)
        return
    for task in tasks:
        assert task.resources
        for notice in task.notices:
            assert "\n" not in render_notice(notice)
        if not any(notice.blocks_launch for notice in task.notices):
            refuse_blocking(task.notices)


@FUZZ
@given(st.text(max_size=300))
@example("a: &a [*a]")
@example("\ud800")
@example("resources: {memory: 4x, cpus: 0+}")
@example("x: !!map y")
@example("x: !!int {}")
@example("!!set {name}")
@example("? [a]\n: b")
@example("needs: []\n---\nneeds: {}")
@example("\ufeff\ufeffrun: x")
@example("--- |\n text")
@example("%YAML 1.1\n---\nrun: yes")
def test_any_text_is_loaded_or_refused_with_a_position(text: str) -> None:
    check(text)


@FUZZ
@given(st.lists(st.sampled_from(WORDS), max_size=40).map("".join))
def test_any_words_of_the_dialect(text: str) -> None:
    check(text)


@FUZZ
@given(data=st.data())
def test_valid_file_with_a_part_replaced(data: st.DataObject) -> None:
    text = VALID
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(start, min(len(text), start + 20)))
        part = data.draw(st.sampled_from(WORDS) | st.text(max_size=5))
        text = text[:start] + part + text[end:]
    check(text)


@FUZZ
@given(data=st.data())
def test_valid_file_with_lines_moved(data: st.DataObject) -> None:
    lines = VALID.splitlines()
    for _ in range(data.draw(st.integers(1, 4))):
        line = lines.pop(data.draw(st.integers(0, len(lines) - 1)))
        lines.insert(data.draw(st.integers(0, len(lines))), " " * data.draw(st.integers(0, 4)) + line)
    check("\n".join(lines))


def test_the_file_that_is_mutated_is_valid() -> None:
    prepare, train = load_tasks_text(VALID, "valid.yaml")
    assert len(prepare.resources) == 4
    assert dict(train.needs) == {"prepare": 1536.0}
    assert [each.image_id for each in prepare.resources] == [None, None, "ami-1", "ami-1"]
