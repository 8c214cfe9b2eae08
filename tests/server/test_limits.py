"""Budgets and GPU limits: what counts, what a refusal says, and launches at the same time."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from broker.app.limits import LaunchSize, admit, list_uses, measure_use
from broker.app.reporting import read_month
from broker.app.verbs.launching import launch_jobs
from broker.clock import SystemClock
from broker.errors import LimitError
from broker.server.answers import find_status
from broker.state.clusters import Bill
from broker.state.database import SqliteDatabase
from broker.state.limits import EVERYONE, Limit, LimitScope
from broker.state.people import Owned
from broker.state.store import Store
from broker.types import Cluster, ClusterStatus, Estimate, JobStatus, Placement, Resources, Task
from tests.clouds.beds import make_node
from tests.server.conftest import Hosted
from tests.simulation.world import make_offer
from tests.state.conftest import OpenStore, clock, open_postgres, open_sqlite, open_store, postgres, store
from tests.state.samples import Hands

__all__ = ["clock", "open_postgres", "open_sqlite", "open_store", "postgres", "store"]
HOUR_S = 3600.0


def make_estimate(*, usd: float | None = None, gpus: float = 8, nodes: int = 1) -> Estimate:
    """Make an estimate at 2 USD/h for each node."""
    offer = replace(make_offer("east1a"), accelerator="H100", accelerator_count=gpus, ondemand_usd_hour=2.0)
    return Estimate(placement=Placement(offer=offer, is_spot=False, node_count=nodes), expected_usd=usd)


def limit(store: Store, *, usd: float | None = None, gpus: float | None = None, project: bool = False) -> None:
    scope, name = (LimitScope.PROJECT, "vision") if project else (LimitScope.USER, "ada")
    store.limits.put(Limit(scope=scope, name=name, usd_month=usd, gpus=gpus))


def ask(store: Store, choices: Sequence[Estimate], demand: LaunchSize | None = None, *, user: str = "ada") -> int:
    return admit(store, choices, demand or LaunchSize(), user=user, project="vision")


def test_refusal_names_the_limit_its_use_the_request_and_who_can_change_it(store: Store) -> None:
    limit(store, usd=100.0, gpus=16)
    ask(store, [make_estimate(usd=60.0)])
    with pytest.raises(LimitError) as refused:
        ask(store, [make_estimate(usd=50.0)])
    assert refused.value.message == (
        "over the monthly budget of user ada: 100.00 USD, of which 60.00 USD are spent or expected; "
        "this would add 50.00 USD"
    )
    assert "administrator" in refused.value.hints[1] and "broker server limits set" in refused.value.hints[1]
    with pytest.raises(LimitError, match=r"16 GPUs, of which 8 are in use; this would add 16"):
        ask(store, [make_estimate(usd=1.0, nodes=2)])
    ask(store, [make_estimate(usd=500.0, nodes=9)], user="ben")  # has no limit


def test_work_that_adds_nothing_is_admitted_over_a_limit_that_was_lowered(store: Store) -> None:
    limit(store, usd=100.0, gpus=16)
    ask(store, [make_estimate(usd=60.0)])
    limit(store, usd=10.0, gpus=4)
    own = make_estimate(usd=0.0, gpus=0)
    ask(store, [replace(own, placement=replace(own.placement, offer=replace(own.placement.offer, accelerator=None)))])
    for choice in (make_estimate(usd=0.0, gpus=1), make_estimate(usd=1.0, gpus=0)):
        with pytest.raises(LimitError):
            ask(store, [choice])


def test_limit_of_a_project_counts_all_of_its_users(store: Store) -> None:
    limit(store, gpus=16, project=True)
    ask(store, [make_estimate()], user="ada")
    ask(store, [make_estimate()], user="ben")
    with pytest.raises(LimitError, match="project vision"):
        ask(store, [make_estimate()], user="cleo")


def test_limit_holds_for_every_spelling_of_an_address(store: Store) -> None:
    """Issuers may send the address as it was typed, and a limit names it as the administrator did."""
    limit(store, gpus=8)
    ask(store, [make_estimate()], user="Ada")
    with pytest.raises(LimitError, match="of which 8 are in use"):
        ask(store, [make_estimate()], user="ADA")


def test_limit_of_everyone_holds_for_each_without_own_limits(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """With logins through an issuer, users are unknown until they log in."""
    reads: list[Store] = []
    list_bills = store.bills.list

    def note() -> Sequence[Bill]:
        reads.append(store)
        return list_bills()

    monkeypatch.setattr(store.bills, "list", note)
    store.limits.put(Limit(scope=LimitScope.USER, name=EVERYONE, usd_month=None, gpus=8))
    store.limits.put(Limit(scope=LimitScope.PROJECT, name=EVERYONE, usd_month=None, gpus=32))
    store.limits.put(Limit(scope=LimitScope.USER, name="Ada", usd_month=None, gpus=16))
    for user in ("ben", "cleo", "ada", "ada"):
        ask(store, [make_estimate()], user=user)
    for user, whose in (("Ben", "user Ben"), ("ada", "user Ada"), ("dora", "project vision")):
        with pytest.raises(LimitError, match=f"over the limit of {whose}"):
            ask(store, [make_estimate()], user=user)
    admit(store, [make_estimate()], LaunchSize(), user="dora", project="")
    reads.clear()
    assert [(each.limit.name, each.used.gpus) for each in list_uses(store)] == [
        ("*", 0), ("vision", 32), ("*", 0), ("Ada", 16), ("ben", 8), ("cleo", 8), ("dora", 8),
    ]  # fmt: skip
    assert len(reads) == 1, "however many users there are"


def test_job_counts_until_it_ends_and_its_unspent_estimate_is_free_again(store: Store, clock: Hands) -> None:
    limit(store, usd=100.0, gpus=8)
    job = store.jobs.add("train", Task(run="true"))
    commitment = ask(store, [make_estimate(usd=60.0)])
    store.commitments.bind(commitment, [str(job.id)])
    store.commitments.settle(commitment)
    with pytest.raises(LimitError):
        ask(store, [make_estimate(usd=1.0)])
    store.jobs.set_status(job.id, JobStatus.CANCELLED)
    ask(store, [make_estimate(usd=100.0)])


def test_request_that_started_nothing_is_forgotten(store: Store) -> None:
    limit(store, gpus=8)
    store.commitments.settle(ask(store, [make_estimate()]))
    assert store.commitments.list() == []
    ask(store, [make_estimate()])


def test_request_whose_server_was_killed_counts_for_a_day(store: Store, clock: Hands) -> None:
    limit(store, gpus=8)
    ask(store, [make_estimate()])
    clock.time_s += 23 * HOUR_S
    with pytest.raises(LimitError):
        ask(store, [make_estimate()])
    clock.time_s += HOUR_S
    ask(store, [make_estimate()])


def test_cluster_counts_a_day_ahead_and_its_bills_until_another_takes_its_name(store: Store, clock: Hands) -> None:
    limit(store, usd=200.0)
    (found,) = store.limits.list()
    demand = LaunchSize(kind=Owned.CLUSTER, names=("dev",))
    estimate = make_estimate()
    commitment = ask(store, [estimate], demand)
    cluster = Cluster(name="dev", placement=estimate.placement, status=ClusterStatus.UP, attempt=1)
    store.clusters.put(cluster)
    node = replace(make_node("n1"), cluster="dev", usd_hour=2.0, created_s=clock.now_s())
    store.bills.record(node)
    store.commitments.settle(commitment)
    clock.time_s += 3 * HOUR_S
    month = read_month(None, now_s=clock.now_s())

    def measure() -> float:
        return round(measure_use(store, found, store.commitments.list(), month).usd, 6)

    assert measure() == 6.0 + 48.0
    store.bills.close(node)
    store.clusters.put(replace(cluster, status=ClusterStatus.STOPPED))
    assert measure() == 6.0
    ask(store, [estimate], demand)
    assert measure() == 6.0 + 48.0, "the restarted cluster counts once"


def test_job_over_the_end_of_a_month_counts_what_this_month_pays_and_the_rest_of_its_estimate(
    store: Store, clock: Hands
) -> None:
    limit(store, usd=1000.0)
    (found,) = store.limits.list()
    month = read_month(None, now_s=clock.now_s())
    now_s, clock.time_s = clock.time_s, month.begin_s - 20 * HOUR_S
    commitment = ask(store, [make_estimate(usd=100.0)])
    job = store.jobs.add("train", Task(run="true"))
    store.commitments.bind(commitment, [str(job.id)])
    store.commitments.settle(commitment)
    placement = make_estimate().placement
    store.clusters.put(Cluster(name="job-1", placement=placement, status=ClusterStatus.UP, attempt=1, job_id=job.id))
    store.bills.record(replace(make_node("n1"), cluster="job-1", usd_hour=2.0, created_s=clock.now_s()))
    for hours, expected in ((10.0, 20.0 + 40.0), (30.0, 60.0 + 0.0), (now_s / HOUR_S - month.begin_s / HOUR_S, None)):
        clock.time_s = month.begin_s + hours * HOUR_S
        used = measure_use(store, found, store.commitments.list(), month)
        assert used.usd == pytest.approx(2.0 * hours if expected is None else expected), "never less than was paid"


def test_service_counts_for_the_rest_of_the_month(store: Store, clock: Hands) -> None:
    month = read_month(None, now_s=clock.now_s())
    left_usd = 2.0 * 3 * (month.end_s - clock.now_s()) / HOUR_S
    demand = LaunchSize(kind=Owned.SERVICE, names=("web",), parallel=3)
    limit(store, usd=left_usd - 1.0)
    with pytest.raises(LimitError, match=f"would add {left_usd:,.2f}"):
        ask(store, [make_estimate()], demand)
    limit(store, usd=left_usd)
    ask(store, [make_estimate()], demand)


def test_unknown_work_counts_a_day_of_all_its_machines(store: Store) -> None:
    limit(store, usd=4 * 24 * 2.0 - 1.0)
    with pytest.raises(LimitError, match=r"would add 192\.00 USD"):
        ask(store, [make_estimate()], LaunchSize(parallel=4))
    limit(store, usd=4 * 24 * 2.0)
    ask(store, [make_estimate()], LaunchSize(parallel=4))


def test_workers_and_replicas_count_together(store: Store) -> None:
    limit(store, gpus=31)
    with pytest.raises(LimitError, match="would add 32"):
        ask(store, [make_estimate()], LaunchSize(parallel=4, total=20))
    limit(store, usd=79.0)
    with pytest.raises(LimitError, match=r"would add 80\.00 USD"):
        ask(store, [make_estimate(usd=4.0)], LaunchSize(parallel=4, total=20))


def test_only_one_of_simultaneous_launches_passes(open_store: OpenStore, clock: Hands) -> None:
    """Each thread has a connection of its own, as each request of a server has."""
    first = open_store()
    limit(first, gpus=8)
    stores = [open_store() for _ in range(6)] if first.is_shared else [None] * 6
    begin = threading.Barrier(len(stores))
    outcomes: list[str] = []

    def launch(given: Store | None) -> None:
        own = given or Store(first.path, clock=clock)  # SQLite's connections stay in their thread
        begin.wait()
        try:
            ask(own, [make_estimate()])
            outcomes.append("admitted")
        except LimitError:
            outcomes.append("refused")
        if given is None:
            own.close()

    threads = [threading.Thread(target=launch, args=(each,)) for each in stores]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sorted(outcomes) == ["admitted", *["refused"] * 5]


def test_server_refuses_before_the_price_prompt_and_counts_what_it_started(hosted: Hosted) -> None:
    task = Task(run="true", resources=(Resources(cloud="local"),))
    prompts: list[str] = []

    def submit() -> int:
        (job,) = hosted.open("other").call(
            launch_jobs, tasks=(task,), name="limited", request_id=None, hedge=1, is_dryrun=False,
            show=lambda plans: None, confirm=lambda plans: prompts.append("asked"), on_submitted=lambda jobs: None,
        )  # fmt: skip
        return job.id

    store = hosted.context.store
    store.limits.put(Limit(scope=LimitScope.USER, name="other", usd_month=0.0, gpus=None))
    with pytest.raises(LimitError, match="over the monthly budget of user other"):
        submit()
    assert prompts == [] and not [each for each in store.jobs.list() if each.name == "limited"]
    assert store.audit.list()[-1].outcome == "LimitError" and store.commitments.list() == []
    store.limits.put(Limit(scope=LimitScope.USER, name="other", usd_month=1000.0, gpus=None))
    job_id = submit()
    (commitment,) = store.commitments.list()
    assert commitment.names == (str(job_id),) and not commitment.is_pending and prompts == ["asked"]
    status, answer = hosted.ask("/v1/show_cost", {"by": "job"}, token=hosted.tokens["other"])
    assert status == 200 and answer["result"]
    store.jobs.request_cancel(job_id)


def test_limits_survive_the_end_of_the_process(tmp_path: Path) -> None:
    first = Store(tmp_path / "state.db", clock=SystemClock())
    limit(first, usd=5.0)
    limit(first, usd=6.0, gpus=1)
    first.close()
    again = Store(tmp_path / "state.db", clock=SystemClock())
    assert [(each.usd_month, each.gpus) for each in again.limits.list()] == [(6.0, 1.0)]
    assert again.limits.delete(LimitScope.USER, "ada") and not again.limits.delete(LimitScope.USER, "ada")
    again.close()


def test_request_over_a_limit_is_forbidden_over_http() -> None:
    assert find_status("LimitError") == 403


def test_job_has_its_owner_and_its_project_from_its_first_commit(
    hosted: Hosted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Controllers see a job as soon as it is committed, so a limit of its project must count it from then on."""
    seen: list[tuple[int, list[tuple[str]], list[tuple[str]]]] = []
    commit = SqliteDatabase._commit

    def watch(self: SqliteDatabase) -> None:
        commit(self)
        with closing(sqlite3.connect(hosted.context.store.path)) as reader:
            jobs = reader.execute("SELECT id FROM jobs WHERE name = 'owned'").fetchall()
            if jobs and not seen:
                (job_id,) = jobs[0]
                owners = reader.execute("SELECT person FROM owners WHERE kind = 'job' AND name = ?", (str(job_id),))
                names = reader.execute("SELECT names FROM commitments WHERE is_pending")
                seen.append((job_id, owners.fetchall(), names.fetchall()))

    monkeypatch.setattr(SqliteDatabase, "_commit", watch)
    task = Task(run="true", resources=(Resources(cloud="local"),))
    (job,) = hosted.open("other").call(
        launch_jobs, tasks=(task,), name="owned", request_id=None, hedge=1, is_dryrun=False,
        show=lambda plans: None, confirm=lambda plans: None, on_submitted=lambda jobs: None,
    )  # fmt: skip
    hosted.context.store.jobs.request_cancel(job.id)
    assert seen == [(job.id, [("other",)], [(f'["{job.id}"]',)])]
