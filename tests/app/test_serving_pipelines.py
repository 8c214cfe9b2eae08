"""Pipelines that end in a service: their shape, and the jobs that replicas wait for."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.app.container import Context
from broker.app.launching import Callbacks
from broker.app.serving_pipelines import record_service, record_version, split_pipeline, submit_before
from broker.errors import UsageError
from broker.serve.replicas import find_needs
from broker.task.loader import load_tasks, load_tasks_text
from broker.types import JobStatus, Task, UpdateMode

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


@pytest.mark.parametrize("is_replaced", [False, True])
def test_update_of_a_service_that_is_terminated_meanwhile_is_refused_and_starts_nothing(
    tmp_path: Path, is_replaced: bool
) -> None:
    context = Context(tmp_path)
    services, (task,) = context.store.services, read(SERVED)
    services.add("web", task, host="127.0.0.1", port=1, wanted=1)

    def terminate(plans: object) -> None:
        services.request_down("web")
        if is_replaced:
            services.delete("web")
            services.add("web", task, host="127.0.0.1", port=1, wanted=1)

    def update() -> None:
        callbacks = Callbacks(show=terminate, confirm=lambda plans: None)
        (before,) = read(PLAIN)
        record_version(context, (before,), task, service="web", mode=UpdateMode.ROLLING, callbacks=callbacks)

    try:
        with pytest.raises(UsageError, match="was terminated" if is_replaced else "is being terminated"):
            update()
        found = services.get("web")
        assert found is not None and found.version == 1 and not context.store.jobs.list()
    finally:
        context.close()


def test_name_of_a_service_that_is_being_terminated_is_not_offered_for_an_update(tmp_path: Path) -> None:
    context = Context(tmp_path)
    (task,) = read(SERVED)
    context.store.services.add("web", task, host="127.0.0.1", port=1, wanted=1)
    context.store.services.request_down("web")
    callbacks = Callbacks(show=lambda plans: None, confirm=lambda plans: None)
    try:
        with pytest.raises(UsageError, match="is being terminated") as caught:
            record_service(
                context, (), task, service="web", host="127.0.0.1", port=1, callbacks=callbacks, is_dryrun=False
            )
        assert "broker serve up -n web" in caught.value.hints[0]
    finally:
        context.close()
