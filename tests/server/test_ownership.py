"""What belongs to whom while verbs overlap: a verb waits for prices and machines, and others act meanwhile."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.app.jobs import check_names
from broker.app.mapping import MapDriver, MapRequest
from broker.app.sweeping import SweepDriver, SweepRequest, name_sweep
from broker.app.verbs.clusters import terminate_clusters
from broker.app.verbs.jobs import cancel_jobs, retry_group, retry_job
from broker.app.verbs.launching import launch, launch_jobs, schedule_job
from broker.app.verbs.services import bring_up_service, terminate_services
from broker.client.wire import VERBS
from broker.errors import BrokerError, DeniedError, UsageError
from broker.provision.lifecycle import Provisioner
from broker.server.authorisation import list_changed
from broker.server.context import Policy, ServerContext
from broker.server.running import RunningVerb
from broker.state.people import Owned
from broker.state.store import Store
from broker.types import (
    Cluster,
    ClusterStatus,
    GroupRole,
    Job,
    JobStatus,
    Placement,
    ReadinessProbe,
    Resources,
    ScheduleSpec,
    ServiceSpec,
    Task,
)
from tests.server.conftest import Hosted
from tests.simulation.world import make_offer

TASK = Task(run="true", resources=(Resources(cloud="local"),))
NAMES = (f"shared{number}" for number in itertools.count())


@contextmanager
def open_context(hosted: Hosted, user: str) -> Iterator[ServerContext]:
    """Open the context of a request, whose check of owners at the start of a verb has passed."""
    token = next(each for each in hosted.context.store.tokens.list() if each.user == user)
    policy = Policy(has_controller=False, has_local_cloud=True)
    context = ServerContext(hosted.home, policy=policy, token=token)
    yield context
    context.close()


@pytest.fixture
def other(hosted: Hosted) -> Iterator[ServerContext]:
    with open_context(hosted, "other") as context:
        yield context


def submit(hosted: Hosted, user: str, *, request_id: str | None, tasks: tuple[Task, ...] = (TASK,)) -> tuple[Job, ...]:
    found: tuple[Job, ...] = hosted.open(user).call(
        launch_jobs, tasks=tasks, name="named", request_id=request_id, hedge=1, is_dryrun=False,
        show=lambda plans: None, confirm=lambda plans: None, on_submitted=lambda jobs: None,
    )  # fmt: skip
    return found


def bring_up(hosted: Hosted, user: str, name: str, *, confirm: Callable[[Any], None], is_dryrun: bool = False) -> None:
    hosted.open(user).call(
        launch, task=TASK, cluster=name, autostop=None, hedge=1, retry_until_up=False, is_dryrun=is_dryrun,
        show=lambda plans: None, confirm=confirm, on_stage=lambda text: None,
    )  # fmt: skip


def put_cluster(store: Store, name: str) -> None:
    """Record a cluster as the launch of `user` does: its owner, then its row."""
    placement = Placement(offer=make_offer("east1a"), is_spot=False, node_count=1)
    store.owners.put(Owned.CLUSTER, name, "user")
    store.clusters.put(Cluster(name=name, placement=placement, status=ClusterStatus.UP, attempt=1))


@pytest.mark.parametrize("count", [1, 2])
def test_request_id_of_another_user_is_refused(hosted: Hosted, count: int) -> None:
    """The second user would get the job of the first one, and none of its own."""
    name = next(NAMES)
    tasks = (TASK,) * count
    first = submit(hosted, "user", request_id=name, tasks=tasks)
    with pytest.raises(DeniedError, match=rf"`{name}[/0]*` was used by another user, for job {first[0].id}"):
        submit(hosted, "other", request_id=name, tasks=tasks)
    assert [each.id for each in submit(hosted, "user", request_id=name, tasks=tasks)] == [each.id for each in first]
    for each in first:
        assert hosted.context.store.owners.get(Owned.JOB, str(each.id)) == "user"


def test_job_of_a_repeated_request_counts_once_towards_limits(hosted: Hosted) -> None:
    name, store = next(NAMES), hosted.context.store
    (job,) = submit(hosted, "other", request_id=name)
    submit(hosted, "other", request_id=name)
    found = [each for each in store.commitments.list() if str(job.id) in each.names]
    assert len(found) == 1 and not any(each.is_pending for each in store.commitments.list())


def test_request_id_takes_over_no_job_started_on_the_server_itself(hosted: Hosted, other: ServerContext) -> None:
    name, store = next(NAMES), hosted.context.store
    job = store.jobs.add("unowned", TASK, name)
    with pytest.raises(DeniedError):
        submit(hosted, "other", request_id=name)
    own = store.jobs.add("own", TASK)
    store.owners.put(Owned.JOB, str(own.id), "other")
    store.jobs.set_status(own.id, JobStatus.CANCELLED)
    with pytest.raises(DeniedError, match="started on the server itself"):
        retry_job(other, job=str(own.id), secrets={}, request_id=name)
    assert store.owners.get(Owned.JOB, str(job.id)) is None


def test_request_id_of_another_users_schedule_is_refused(hosted: Hosted) -> None:
    name = next(NAMES)
    task = Task(run="true", resources=TASK.resources, schedule=ScheduleSpec(cron="0 2 * * *"))

    def add(user: str, schedule: str, confirm: Callable[[Any], None] = lambda plans: None) -> None:
        hosted.open(user).call(
            schedule_job, task=task, schedule=schedule, request_id=name, hedge=1, is_dryrun=False,
            show=lambda plans: None, confirm=confirm,
        )  # fmt: skip

    with pytest.raises(DeniedError):  # added while the other reads the price
        add("other", f"{name}-b", confirm=lambda plans: add("user", f"{name}-a"))
    with pytest.raises(DeniedError):
        add("other", f"{name}-b")
    hosted.context.store.schedules.remove(hosted.context.store.schedules.get(f"{name}-a"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "request_id", ["service/web/k7wq2/3", "service", "schedule/nightly/k7/1", "map-k7wq2/1/1", "sweep-0a1b2c3d"]
)
def test_request_ids_of_replicas_and_other_own_jobs_are_reserved(hosted: Hosted, request_id: str) -> None:
    """A job under the ID of a replica would get the service's requests, and need no slot."""
    with pytest.raises(UsageError, match="replicas, schedules, maps and sweeps"):
        submit(hosted, "other", request_id=request_id)
    check_names(None, f"nightly-{request_id}")


def test_cluster_created_while_another_reads_the_price_stays_its_owners(hosted: Hosted) -> None:
    name = next(NAMES)
    with pytest.raises(DeniedError, match=f"cluster `{name}` belongs to user"):
        bring_up(hosted, "other", name, confirm=lambda plans: put_cluster(hosted.context.store, name))
    assert hosted.context.store.owners.get(Owned.CLUSTER, name) == "user"
    hosted.context.store.clusters.delete(name)


def test_cluster_created_just_before_the_name_is_claimed_stays_its_owners(
    hosted: Hosted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launch has compared owners, and waits for the lock of the name."""
    name, up = next(NAMES), Provisioner.up

    async def up_later(self: Provisioner, *given: Any, on_claimed: Callable[[], None], **more: Any) -> Cluster:
        def put_and_claim() -> None:
            put_cluster(self._store, name)
            on_claimed()

        return await up(self, *given, on_claimed=put_and_claim, **more)

    monkeypatch.setattr(Provisioner, "up", up_later)
    with pytest.raises(DeniedError, match=f"cluster `{name}` belongs to user"):
        bring_up(hosted, "other", name, confirm=lambda plans: None)
    assert hosted.context.store.owners.get(Owned.CLUSTER, name) == "user"
    hosted.context.store.clusters.delete(name)


@pytest.mark.parametrize("is_dryrun", [True, False])
def test_launch_that_starts_nothing_owns_nothing(hosted: Hosted, *, is_dryrun: bool) -> None:
    name, store = next(NAMES), hosted.context.store

    def refuse(plans: object) -> None:
        raise UsageError("no")

    store.owners.put(Owned.CLUSTER, name, "user")  # whose launch has just begun
    try:
        bring_up(hosted, "other", name, confirm=refuse, is_dryrun=is_dryrun)
    except UsageError:
        assert not is_dryrun
    assert store.owners.get(Owned.CLUSTER, name) == "user"


def test_service_recorded_while_another_reads_the_price_stays_its_owners(hosted: Hosted) -> None:
    name, store = next(NAMES), hosted.context.store
    spec = ServiceSpec(probe=ReadinessProbe(path="/"), port=8080)
    task = Task(run="true", resources=TASK.resources, service=spec)

    def put(plans: object) -> None:
        store.owners.put(Owned.SERVICE, name, "user")
        store.services.add(name, task, host="127.0.0.1", port=30123, wanted=1)

    with pytest.raises(BrokerError):
        hosted.open("other").call(
            bring_up_service, task=task, service=name, host="127.0.0.1", port=30124, is_dryrun=False,
            show=lambda plans: None, confirm=put,
        )  # fmt: skip
    assert store.owners.get(Owned.SERVICE, name) == "user"


def test_names_are_compared_with_owners_again_when_a_verb_acts(hosted: Hosted, other: ServerContext) -> None:
    """Jobs and clusters of others may get a name after the owners of that name were compared."""
    name, store = next(NAMES), hosted.context.store
    job = store.jobs.add(name, TASK)
    store.owners.put(Owned.JOB, str(job.id), "user")
    put_cluster(store, name)
    store.owners.put(Owned.SERVICE, name, "user")
    store.services.add(name, TASK, host="127.0.0.1", port=30125, wanted=1)
    with pytest.raises(DeniedError):
        cancel_jobs(other, names=(name,))
    with pytest.raises(DeniedError):
        retry_job(other, job=name, secrets={}, request_id=None)
    with pytest.raises(DeniedError):
        terminate_clusters(other, names=(f"{name[:-1]}?",), on_down=lambda cluster: None)
    with pytest.raises(DeniedError):
        terminate_services(other, names=(name,))
    found = store.jobs.get(job.id)
    assert found is not None and found.status is JobStatus.PENDING
    service = store.services.get(name)
    assert service is not None and not service.down_requested
    store.clusters.delete(name)


def test_group_that_has_got_the_name_is_not_retried_for_another_user(hosted: Hosted, other: ServerContext) -> None:
    name, store = next(NAMES), hosted.context.store
    task = replace(TASK, group=GroupRole(name=name))
    for member in ("a", "b"):
        job = store.jobs.add(member, task, pipeline=name)
        store.owners.put(Owned.JOB, str(job.id), "user")
        store.jobs.set_status(job.id, JobStatus.CANCELLED)
    count = store.jobs.count()
    with pytest.raises(DeniedError, match="belongs to user"):
        retry_group(other, job=name, secrets={}, request_id=None)
    assert store.jobs.count() == count


def test_map_of_another_user_is_not_continued(hosted: Hosted, other: ServerContext, tmp_path: Path) -> None:
    """To continue it would start workers beside the owner's, and cancel the owner's that have not started."""
    (tmp_path / "in.jsonl").write_text('{"id": 1}\n' * 4)
    task = Task(run="python -m trainers.map_worker embed.py", resources=TASK.resources)
    request = MapRequest(task=task, input=f"file://{tmp_path}/in.jsonl", output=f"file://{tmp_path}/out", workers=1)
    with open_context(hosted, "user") as own:
        owners = MapDriver(own, request)
        owners.begin()
        (job,) = owners.submit(owners.read_view().workers)
        with pytest.raises(DeniedError, match=f"job `{job.id}` belongs to user"):
            MapDriver(other, request).begin()
        again = MapDriver(own, request)
        assert not again.begin() and again.read_view().workers.job_ids == (job.id,)


def test_map_that_two_users_begin_at_once_has_one_owner(hosted: Hosted, other: ServerContext, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"id": 1}\n' * 4)
    task = Task(run="python -m trainers.map_worker embed.py", resources=TASK.resources)
    request = MapRequest(task=task, input=f"file://{tmp_path}/in.jsonl", output=f"file://{tmp_path}/out", workers=1)
    with open_context(hosted, "user") as own:
        owners, others = MapDriver(own, request), MapDriver(other, replace(request, workers=2))
        assert others.begin() and not owners.begin(), "no worker has an owner yet"
        early = others.read_view().workers
        (job,) = owners.submit(owners.read_view().workers)
        with pytest.raises(DeniedError, match="used by another user"):
            others.submit(early)
        with pytest.raises(DeniedError, match=f"job `{job.id}` belongs to user"):
            others.read_view()
        assert owners.read_view().workers.job_ids == (job.id,)


def test_sweep_of_a_user_is_not_affected_by_jobs_of_others_unless_it_is_the_same_sweep(
    hosted: Hosted, other: ServerContext
) -> None:
    store, task = hosted.context.store, Task(run="true", name=next(NAMES), resources=TASK.resources)
    request = SweepRequest(task=task, parameters=["LR=0.1,0.2"], parallel=2)

    def list_own() -> list[tuple[Owned, str]]:
        return list(list_changed(other, VERBS["run_sweep"], {"request": request}))

    store.owners.put(Owned.JOB, str(store.jobs.add("theirs", task, pipeline="sweep-0").id), "user")
    assert list_own() == []
    same = store.jobs.add("theirs", task, pipeline=name_sweep(request))
    assert list_own() == [(Owned.JOB, str(same.id))]


def test_sweep_does_not_get_the_runs_that_another_user_has_just_submitted(hosted: Hosted, other: ServerContext) -> None:
    task = Task(run="true", name=next(NAMES), resources=TASK.resources)
    request = SweepRequest(task=task, parameters=["LR=0.1,0.2"], parallel=2)
    driver, store = SweepDriver(other, request), hosted.context.store
    add = store.jobs.add("theirs", task, f"{driver.group}/1", pipeline=driver.group)
    store.owners.put(Owned.JOB, str(add.id), "user")
    find = other.store.jobs.find_request
    missed = [f"{driver.group}/1"]  # submitted after the driver has looked

    def find_late(request_id: str | None) -> Job | None:
        if request_id in missed:
            missed.remove(request_id)
            return None
        return find(request_id)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(DeniedError, match="used by another user"):
        patch.setattr(other.store.jobs, "find_request", find_late)
        driver.advance()
    assert store.owners.get(Owned.JOB, str(add.id)) == "user"


def test_only_the_user_who_asked_answers_the_question_of_a_price(
    hosted: Hosted, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[int] = []
    ids: list[str] = []
    run = RunningVerb.run

    def run_noted(self: RunningVerb) -> None:
        ids.append(self._request.id)
        run(self)

    monkeypatch.setattr(RunningVerb, "run", run_noted)

    def let_another_answer(plans: object) -> None:
        path = f"/v1/answers/{ids[0]}"
        for user in ("other", "viewer"):
            refused.append(hosted.ask(path, {"is_accepted": True}, token=hosted.tokens[user])[0])
        raise UsageError("no")

    with pytest.raises(UsageError):
        bring_up(hosted, "user", next(NAMES), confirm=let_another_answer)
    assert refused == [403, 403]
