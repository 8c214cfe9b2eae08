"""Pipelines that end in a service: their shape, and the jobs that replicas wait for."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.app.container import Context
from broker.app.serving_pipelines import split_pipeline, submit_before
from broker.errors import UsageError
from broker.serve.replicas import find_needs
from broker.task.loader import load_tasks, load_tasks_text
from broker.types import JobStatus, Task

ROOT = Path(__file__).parent.parent.parent
PLAIN = "resources: {infra: local}\nrun: echo\n"
SERVED = PLAIN + "service: {readiness_probe: /}\n"


def read(*documents: str) -> tuple[Task, ...]:
    return tuple(load_tasks_text("\n---\n".join(documents), "task"))


def test_template_is_a_pipeline_that_ends_in_a_service() -> None:
    before, last = split_pipeline(load_tasks(ROOT / "task_templates/serving/train_and_serve.yaml"))
    assert [each.name for each in before] == ["train", "export"] and last.name == "lm"


def test_service_must_be_the_last_task_and_the_only_one() -> None:
    with pytest.raises(UsageError, match="is not the last of its pipeline"):
        split_pipeline(read(SERVED, SERVED))
    with pytest.raises(UsageError, match="has no `service:`"):
        split_pipeline(read(PLAIN, PLAIN))
    assert split_pipeline(read(SERVED))[0] == ()


def test_replicas_need_every_job_of_their_run_and_only_the_last_retry_of_a_job(tmp_path: Path) -> None:
    context = Context(tmp_path)
    tasks = read("name: first\n" + PLAIN, "name: second\n" + PLAIN, SERVED)
    try:
        task, jobs = submit_before(context, tasks[:2], tasks[2])
        _, others = submit_before(context, tasks[:2], tasks[2])
        assert [each.needs for each in jobs] == [(), (jobs[0].id,)]
        assert find_needs(context.store, task) == [each.id for each in jobs]
        again = context.store.jobs.add("first", tasks[0], pipeline=jobs[0].pipeline)
        assert find_needs(context.store, task) == [jobs[1].id, again.id]
        assert {each.status for each in (*jobs, *others)} == {JobStatus.PENDING}
        assert find_needs(context.store, tasks[2]) == ()
    finally:
        context.close()
