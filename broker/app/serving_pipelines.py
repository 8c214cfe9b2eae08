"""Pipelines that end in a service: the earlier tasks are managed jobs, for which the service's replicas wait.

    train -> export -> serve     `train` and `export` run as jobs; each replica needs both, and reads their results from
                                 `BROKER_PIPELINE_DIR`

A version of the service belongs to one run of its pipeline. If a job fails, the replicas that need it fail too, and the
service returns to the version that was ready before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from broker.app import canaries, gateways, service_checks, services
from broker.app.container import Context
from broker.app.jobs import JobTarget
from broker.app.launching import Callbacks, check_cluster_name, prepare
from broker.app.limits import LaunchSize
from broker.errors import UsageError
from broker.pipelines.ordering import find_needs, name_tasks, order_indexes
from broker.state.people import Owned
from broker.types import Job, Service, Task, UpdateMode


def split_pipeline(tasks: Sequence[Task]) -> tuple[tuple[Task, ...], Task]:
    """Return the tasks before the service, and the one to serve.

    Raises UsageError unless the last task, and no other, is a service.
    """
    *before, last = tasks
    if before and last.service is None:
        raise UsageError(
            "the last task of the pipeline has no `service:`",
            hints=["add `service:` to it", "or run the pipeline without one: `broker jobs launch`"],
        )
    if early := next((each for each in before if each.service is not None), None):
        raise UsageError(
            f"task `{early.name}` has a `service:`, but is not the last of its pipeline",
            hints=["move it to the end of the file, after every task that it requires"],
        )
    return tuple(before), last


def submit_before(context: Context, before: Sequence[Task], last: Task) -> tuple[Task, Sequence[Job]]:
    """Submit the tasks before the service as managed jobs; return the service's task, which names their run.

    Call within a transaction that also records the service: neither exists without the other.
    Raises UsageError for circular dependencies, or a dependency on an unknown task.
    """
    if not before:
        return replace(last, pipeline=None), ()
    tasks = (*before, last)
    has_needs = any(each.needs for each in tasks)
    needs = (
        [list(each) for each in find_needs(tasks)] if has_needs else [[i - 1] if i else [] for i in range(len(tasks))]
    )
    if any(len(before) in each for each in needs):
        raise UsageError(
            "a task of the pipeline depends on the service", hints=["a service does not end; remove that dependency"]
        )
    store, names, jobs = context.store, name_tasks(tasks), dict[int, Job]()
    pipeline = f"{last.pipeline or last.name or 'pipeline'}-{store.draw_uid()}"  # it names a folder
    for index in order_indexes(before):
        jobs[index] = store.jobs.add(
            names[index], before[index], needs=[jobs[other].id for other in needs[index]], pipeline=pipeline
        )
    return replace(last, pipeline=pipeline), [jobs[index] for index in sorted(jobs)]


def record_service(
    context: Context,
    before: Sequence[Task],
    task: Task,
    *,
    service: str,
    host: str,
    port: int | None,
    callbacks: Callbacks,
    is_dryrun: bool,
) -> tuple[Service | None, Sequence[Job]]:
    """Submit the jobs before a service and record the service, in one transaction; neither in a dry run.

    The caller starts the daemon, which carries out both. Raises UsageError.
    """
    check_cluster_name(service)
    if (known := context.store.services.get(service)) is not None:
        _check_stays(known, known)
        hint = f"change it with `broker serve update {service} TASK.yaml`"
        raise UsageError(f"service `{service}` already exists", hints=[hint])
    service_checks.check_exposure(service_checks.check_service(task), host)
    if plans := gateways.plan_gateways(context, task):
        callbacks.show(plans)
    ready = _prepare(context, service, before, task, callbacks, is_dryrun=is_dryrun)
    if ready is None:
        return None, ()
    spec = service_checks.check_service(ready[-1])
    host, chosen = gateways.choose_address(context, ready[-1], host, port)
    with context.store.transaction():
        last, jobs = submit_before(context, ready[:-1], ready[-1])
        context.own(Owned.SERVICE, service)
        made = context.store.services.add(service, last, host=host, port=chosen, wanted=spec.policy.replicas_min)
    return made, jobs


def record_version(
    context: Context,
    before: Sequence[Task],
    task: Task,
    *,
    service: str,
    mode: UpdateMode,
    callbacks: Callbacks,
    canary_share: float | None = None,
) -> tuple[int, Sequence[Job]]:
    """Submit the jobs that precede a version of a service, and record the version.

    A canary gets only this share of the requests.

    Returns the number of the version and the jobs. The caller starts the daemon. Raises UsageError.
    """
    found = services.find_service(context, service)
    _check_stays(found, found)
    canaries.check_no_canary(context, found)
    gateways.check_gateways_stay(context, found, task)
    spec = service_checks.check_service(task)
    service_checks.check_same_path(context.store.services.get_task(found.name, found.version).service, spec)
    service_checks.check_exposure(spec, found.host)
    if canary_share is not None:
        service_checks.check_canary(spec)
    ready = _prepare(context, found.name, before, task, callbacks, is_dryrun=False)
    assert ready is not None
    with context.store.transaction():
        context.check_owner(Owned.SERVICE, found.name)
        _check_stays(found, services.find_service(context, service))  # the user may have read the price for long
        last, jobs = submit_before(context, ready[:-1], ready[-1])
        if canary_share is not None:
            version = canaries.add_canary_version(context, found, last, canary_share)
        else:
            version = context.store.services.add_version(found.name, last, mode=mode)
            context.store.services.add_event(found.name, services.UPDATED, detail=str(version))
    if canary_share is not None:
        canaries.start_canary(context, found, version, canary_share)
    return version, jobs


def _check_stays(found: Service, now: Service) -> None:
    """Raise UsageError for a service that is being terminated, or that another one has replaced under its name."""
    if now.down_requested:
        raise UsageError(
            f"service `{now.name}` is being terminated",
            hints=[f"once `broker serve status` no longer lists it: `broker serve up -n {now.name} TASK.yaml`"],
        )
    if now.uid != found.uid:
        raise UsageError(
            f"service `{now.name}` was terminated and started again while the update was prepared",
            hints=["repeat the command to update the new one"],
        )


def _prepare(
    context: Context, name: str, before: Sequence[Task], task: Task, callbacks: Callbacks, *, is_dryrun: bool
) -> tuple[Task, ...] | None:
    """Check, plan and upload the tasks of a pipeline, the service last; return None for a dry run."""
    spec = service_checks.check_service(task)
    service_checks.check_library(spec)
    count = services.count_replicas(spec)
    head: tuple[Task, ...] = ()
    if before:
        target = JobTarget(context=context)
        head = prepare(context, before, target, callbacks=callbacks, is_dryrun=is_dryrun).tasks
    known = context.store.services.get(name)
    names = (name,) if known is None else (name, known.uid)
    last = prepare(
        context, [services.drop_notice(task)], services.ServiceTarget(context=context), callbacks=callbacks,
        is_dryrun=is_dryrun,
        demand=LaunchSize(kind=Owned.SERVICE, names=names, parallel=count, total=count),
    )  # fmt: skip
    return None if is_dryrun else (*head, last.tasks[0])
