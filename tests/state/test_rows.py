"""Round trips of rows: jobs, clusters, intents, bills, run ids and leaders are read as they were written."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from broker.errors import FencedError, StateError
from broker.state.history import StepRange
from broker.state.jobs import LogOffset
from broker.state.store import Store
from broker.types import (
    Attempt,
    Cluster,
    ClusterStatus,
    EventKind,
    IntentEnd,
    Job,
    JobStatus,
    NodeRequest,
    NodeState,
    Progress,
    Secret,
    Task,
    make_event,
)
from tests.state.samples import NODE, PLACEMENT, START_S, Hands


def get(store: Store, job: Job) -> Job:
    found = store.jobs.get(job.id)
    assert found is not None
    return found


def make_attempt(job_id: int, number: int = 1, **fields: object) -> Attempt:
    attempt = Attempt(job_id=job_id, number=number, cluster=f"c{number}", placement=PLACEMENT, started_s=START_S)
    return replace(attempt, **fields)  # type: ignore[arg-type]


# -- jobs -----------------------------------------------------------------------------------------------------------


def test_a_stored_job_is_read_back_with_its_updates(store: Store, clock: Hands) -> None:
    task = Task(name="train", run="true", envs={"A": "1"})
    job = store.jobs.add("train", task, "r", needs=(3, 4), pipeline="p", hedge=5)
    assert job == Job(
        id=job.id, name="train", status=JobStatus.PENDING, task=task, submitted_s=START_S,
        needs=(3, 4), pipeline="p", hedge=5, uid=job.uid,
    )  # fmt: skip
    assert job.uid, "its names are those of no other life of this store"
    attempt, progress = make_attempt(job.id), Progress(step=3, total=9, loss=0.5, checkpoint_step=2)
    store.jobs.put_attempt(attempt)
    store.jobs.set_progress(job.id, progress)
    clock.time_s += 10.0
    store.jobs.set_status(job.id, JobStatus.RUNNING)
    running = replace(job, status=JobStatus.RUNNING, attempts=(attempt,), progress=progress)
    assert get(store, job) == running == store.jobs.list()[0]
    store.jobs.request_cancel(job.id)
    assert get(store, job).cancel_requested and store.jobs.is_cancel_requested(job.id)
    assert store.jobs.set_status(job.id, JobStatus.FAILED, "code 3")
    ended = get(store, job)
    assert (ended.ended_s, ended.failure, ended.status) == (START_S + 10.0, "code 3", JobStatus.FAILED)


def test_a_live_status_has_no_end_and_an_unknown_job_cannot_be_cancelled(store: Store) -> None:
    job = store.jobs.add("j", Task())
    assert store.jobs.set_status(job.id, JobStatus.RECOVERING)
    assert get(store, job).ended_s is None and not get(store, job).cancel_requested
    assert store.jobs.request_cancel(job.id) and not store.jobs.request_cancel(99)
    assert not store.jobs.is_cancel_requested(99)


def test_a_retry_continues_checkpoint_names_and_attempt_numbers(store: Store) -> None:
    first = store.jobs.add("j", Task())
    store.jobs.put_attempt(make_attempt(first.id))
    second = store.jobs.add("j", Task(), resumes=get(store, first))
    store.jobs.put_attempt(make_attempt(second.id, 2))
    third = store.jobs.add("j", Task(), resumes=get(store, second))
    assert (first.resumes, first.first_attempt, first.hedge) == (None, 1, 2)
    assert (second.resumes, second.first_attempt) == (first.id, 2)
    assert (third.resumes, third.first_attempt) == (first.id, 3)
    assert first.uid == second.uid == third.uid != store.jobs.add("j", Task()).uid


def test_requests_are_found_by_their_id_alone(store: Store) -> None:
    one, two = store.jobs.add("a", Task(), "r1"), store.jobs.add("a", Task(), "r2")
    assert one.id != two.id != store.jobs.add("a", Task()).id != store.jobs.add("a", Task()).id
    found = store.jobs.find_request("r2")
    assert found is not None and found.id == two.id
    assert (
        store.jobs.find_request("r3") is None
        and store.jobs.find_request(None) is None
        and store.jobs.find_request("") is None
    )


def test_ended_job_with_an_attempt_or_a_cluster_is_unfinished(store: Store) -> None:
    live, ended, open_attempt, has_cluster, _ = (store.jobs.add(name, Task()) for name in "abcde")
    store.jobs.put_attempt(make_attempt(live.id))
    store.jobs.put_attempt(make_attempt(open_attempt.id))
    store.jobs.put_attempt(make_attempt(has_cluster.id, ended_s=START_S + 1.0))
    store.jobs.put_attempt(make_attempt(ended.id, ended_s=START_S + 1.0))
    store.clusters.put(make_cluster("c", job_id=has_cluster.id))
    store.clusters.put(make_cluster("mine"))
    for job in (ended, open_attempt, has_cluster):
        store.jobs.set_status(job.id, JobStatus.SUCCEEDED)
    assert store.jobs.list_live_ids() == [1, 5]
    assert store.jobs.list_unfinished_ids() == [1, 3, 4, 5]
    assert store.jobs.count() == 5
    for job_id in (1, 5):
        store.jobs.set_status(job_id, JobStatus.SUCCEEDED)
    assert store.jobs.list_live_ids() == []


def test_a_job_is_unfinished_until_its_last_attempt_is_closed_and_its_cluster_is_gone(store: Store) -> None:
    assert not store.jobs.has_unfinished()
    job = store.jobs.add("a", Task())
    assert store.jobs.has_unfinished(), "it is live"
    store.jobs.put_attempt(make_attempt(job.id))
    store.clusters.put(make_cluster("c", job_id=job.id))
    store.clusters.put(make_cluster("mine"))
    store.jobs.set_status(job.id, JobStatus.SUCCEEDED)
    store.jobs.put_attempt(make_attempt(job.id, ended_s=START_S + 1.0))
    assert store.jobs.has_unfinished(), "it has a cluster"
    store.clusters.delete("c")
    assert not store.jobs.has_unfinished()
    store.jobs.put_attempt(make_attempt(job.id))
    assert store.jobs.has_unfinished(), "its attempt is open"


def test_a_list_shows_the_newest_and_every_live_one(store: Store, clock: Hands) -> None:
    for name in "abcde":
        store.jobs.add(name, Task())
        clock.time_s += 1.0
    store.jobs.put_attempt(make_attempt(2, 1, running_s=START_S))
    store.jobs.put_attempt(make_attempt(2, 2))
    store.jobs.set_progress(2, Progress(step=7, total=9))
    for job_id in (1, 3, 4):
        store.jobs.set_status(job_id, JobStatus.SUCCEEDED)
    assert [line.id for line in store.jobs.list_lines()] == [5, 4, 3, 2, 1]
    assert [line.id for line in store.jobs.list_lines(2)] == [5, 4, 2]
    assert [line.id for line in store.jobs.list_lines(2, limit=2)] == [5, 2], "live jobs come first"
    assert [line.id for line in store.jobs.list_lines(2, limit=9)] == [5, 2, 4]
    line = next(each for each in store.jobs.list_lines() if each.id == 2)
    assert (line.name, line.status, line.step, line.total, line.starts) == ("b", JobStatus.PENDING, 7, 9, 1)
    assert (line.submitted_s, line.ended_s) == (START_S + 1.0, None)
    assert store.jobs.list_lines(1)[1].ended_s is None


def test_steps_are_kept_for_the_newest_attempt_and_never_go_back(store: Store) -> None:
    job = store.jobs.add("j", Task())
    store.jobs.set_progress(job.id, Progress(step=1))
    assert store.jobs.list_steps(job.id) == {}, "no attempt has begun"
    store.jobs.put_attempt(make_attempt(job.id, 1))
    store.jobs.set_progress(job.id, Progress(step=5, checkpoint_step=4))
    store.jobs.set_progress(job.id, Progress(step=3))
    store.jobs.put_attempt(make_attempt(job.id, 2))
    store.jobs.set_progress(job.id, Progress(step=4))
    assert store.jobs.list_steps(job.id) == {
        1: StepRange(first_step=5, last_step=5, checkpoint_step=4),
        2: StepRange(first_step=4, last_step=4, checkpoint_step=None),
    }


def test_log_offsets_are_kept_by_job(store: Store) -> None:
    assert store.jobs.get_log_offset(1) == LogOffset() == LogOffset(attempt=0, source_bytes=0, file_bytes=0)
    store.jobs.set_log_offset(1, LogOffset(attempt=2, source_bytes=30, file_bytes=40))
    store.jobs.set_log_offset(1, LogOffset(attempt=3, source_bytes=31, file_bytes=41))
    assert store.jobs.get_log_offset(1) == LogOffset(attempt=3, source_bytes=31, file_bytes=41)
    assert store.jobs.get_log_offset(2) == LogOffset()


def test_secrets_live_as_long_as_their_job(store: Store) -> None:
    job = store.jobs.add("j", Task(secrets={"A": Secret(value="1"), "B": Secret(value="2")}))
    store.jobs.set_status(job.id, JobStatus.RUNNING)
    assert {name: each.value for name, each in get(store, job).task.secrets.items()} == {"A": "1", "B": "2"}
    store.jobs.set_status(job.id, JobStatus.CANCELLED)
    assert {name: each.value for name, each in get(store, job).task.secrets.items()} == {"A": "", "B": ""}


# -- clusters and intents -------------------------------------------------------------------------------------------


def make_cluster(name: str, job_id: int | None = None) -> Cluster:
    return Cluster(
        name=name, status=ClusterStatus.UP, placement=PLACEMENT, attempt=1, nodes=(NODE,), created_s=5.0, job_id=job_id
    )


def test_clusters_come_back_by_name_and_go_with_their_run_numbers(store: Store) -> None:
    one, two = make_cluster("b"), make_cluster("a", job_id=4)
    store.clusters.put(one)
    store.clusters.put(two)
    assert (store.clusters.get("b"), store.clusters.get("x")) == (one, None)
    assert list(store.clusters.list()) == [two, one]
    store.clusters.put(replace(one, status=ClusterStatus.TERMINATING))
    found = store.clusters.get("b")
    assert found is not None and found.status is ClusterStatus.TERMINATING
    assert (store.clusters.next_run_id("a"), store.clusters.next_run_id("b"), store.clusters.next_run_id("b")) == (
        1,
        1,
        2,
    )
    store.clusters.delete("b")
    assert list(store.clusters.list()) == [two]
    assert (store.clusters.newest_run_id("a"), store.clusters.newest_run_id("b")) == (1, 0)


def test_intents_are_open_until_their_first_outcome_each_by_its_token(store: Store, clock: Hands) -> None:
    requests = [
        NodeRequest(owner="me", cluster=cluster, attempt=1, token=token, placement=PLACEMENT)
        for cluster, token in (("c", "t1"), ("c", "t2"), ("d", "t3"))
    ]
    for request in requests:
        store.intents.put(request)
        clock.time_s += 1.0
    store.intents.put(replace(requests[0], attempt=9))
    opened = store.intents.list_open()
    assert [(each.request, each.created_s) for each in opened] == [
        (request, START_S + index) for index, request in enumerate(requests)
    ]
    store.intents.close("t1", IntentEnd.UP)
    assert [store.intents.is_open(token) for token in ("t1", "t2", "t3", "t4")] == [False, True, True, False]
    assert [each.request.token for each in store.intents.list_open("c")] == ["t2"]
    assert [each.request.token for each in store.intents.list_open()] == ["t2", "t3"]
    assert store.intents.list_tokens("c") == {"t1", "t2"}
    assert (store.intents.count_closed("c"), store.intents.count_closed("d")) == (1, 0)


def test_the_first_outcome_of_an_intent_stands(store: Store) -> None:
    store.intents.put(NodeRequest(owner="me", cluster="c", attempt=1, token="t", placement=PLACEMENT))
    store.intents.close("t", IntentEnd.UP)
    store.intents.close("t", IntentEnd.TERMINATED)
    assert [row[0] for row in store.rows("SELECT outcome FROM intents")] == ["up"]


def test_an_intent_keeps_the_account_and_the_nodes_that_were_made_for_it(store: Store) -> None:
    requests = [
        NodeRequest(owner="me", cluster="c", attempt=1, token=token, placement=PLACEMENT) for token in ("t1", "t2")
    ]
    for request in requests:
        store.intents.put(request)
    assert (store.intents.get_request("t2"), store.intents.get_request("t3")) == (requests[1], None)
    assert not store.intents.list_nodes("t1") and not store.intents.list_nodes("t3")
    store.intents.note_account("t1", "an account")
    store.intents.note_nodes("t1", [NODE])
    assert store.intents.get_request("t1") == replace(requests[0], account="an account")
    assert (list(store.intents.list_nodes("t1")), list(store.intents.list_nodes("t2"))) == ([NODE], [])
    assert store.intents.get_request("t2") == requests[1]


def test_requested_cancellations_are_listed_while_their_job_is_live(store: Store) -> None:
    for name in "abc":
        store.jobs.add(name, Task())
    for job_id in (2, 3):
        store.jobs.request_cancel(job_id)
    store.jobs.set_status(3, JobStatus.CANCELLED)
    assert store.jobs.list_cancel_requested_ids() == [2]


# -- bills ----------------------------------------------------------------------------------------------------------


def test_spending_is_summed_by_cluster_by_job_and_in_all(store: Store) -> None:
    store.clusters.put(make_cluster("c", job_id=7))
    store.clusters.put(make_cluster("own"))
    assert [each.name for each in store.clusters.list(with_jobs=False)] == ["own"]
    store.bills.record(NODE)
    store.bills.record(replace(NODE, id="m", ended_s=1800.0))
    store.bills.record(replace(NODE, id="o", cluster="d", usd_hour=1.0))
    assert store.bills.spend_usd(cluster="c", now_s=3600.0) == pytest.approx(3.0)
    assert store.bills.spend_usd(job_id=7, now_s=3600.0) == pytest.approx(3.0)
    assert store.bills.spend_usd(cluster="d", job_id=7, now_s=3600.0) == 0.0
    assert store.bills.spend_usd(now_s=3600.0) == pytest.approx(4.0)
    assert store.bills.spend_usd(now_s=-5.0) == 0.5 * 2.0, (
        "a node created before the clock was set back costs nothing yet"
    )
    assert store.bills.list_spend_usd(now_s=3600.0) == {7: pytest.approx(3.0)}
    assert store.bills.list_spend_usd([7, 8], now_s=3600.0) == {7: pytest.approx(3.0)}
    assert store.bills.list_spend_usd([8], now_s=3600.0) == store.bills.list_spend_usd([], now_s=3600.0) == {}
    sums = store.bills.sum_spend(midnight_s=1800.0, month_s=0.0, now_s=3600.0)
    assert (sums.today_usd, sums.month_usd) == pytest.approx((1.5, 4.0)), "one node ended at that moment"
    assert store.bills.sum_spend(midnight_s=7200.0, month_s=7200.0, now_s=3600.0).month_usd == 0.0
    assert [(bill.node, bill.job_id, bill.ended_s) for bill in store.bills.list()] == [
        ("n", 7, None), ("m", 7, 1800.0), ("o", None, None),
    ]  # fmt: skip


def test_a_bill_ends_once_and_restarts_after_a_stop(store: Store, clock: Hands) -> None:
    store.bills.record(replace(NODE, created_s=START_S))
    clock.time_s += 3600.0
    store.bills.close(NODE)
    clock.time_s += 3600.0
    store.bills.close(NODE)
    assert store.bills.spend_usd(now_s=clock.time_s) == pytest.approx(2.0), "it has not grown since the first close"
    store.bills.reopen(NODE)
    store.bills.reopen(NODE)
    stopped = replace(NODE, state=NodeState.STOPPED, created_s=START_S, ended_s=START_S + 3600.0)
    store.bills.record(stopped)
    clock.time_s += 1800.0
    assert store.bills.spend_usd(now_s=clock.time_s) == pytest.approx(3.0), "a list from before does not close it"
    store.bills.record(replace(stopped, state=NodeState.TERMINATED, ended_s=clock.time_s))
    clock.time_s += 1800.0
    assert store.bills.spend_usd(now_s=clock.time_s) == pytest.approx(3.0)
    assert len(store.bills.list()) == 2


def test_a_machine_costs_nothing_between_its_stop_and_its_termination(store: Store, clock: Hands) -> None:
    node = replace(NODE, created_s=START_S)
    store.bills.record(node)
    clock.time_s += 3600.0
    store.bills.close(node)
    for state, ended_s in ((NodeState.STOPPED, START_S + 3700.0), (NodeState.TERMINATED, START_S + 90_000.0)):
        store.bills.record(replace(node, state=state, ended_s=ended_s))
    assert store.bills.spend_usd(now_s=START_S + 100_000.0) == pytest.approx(2.0)


def test_a_change_of_one_bill_leaves_other_nodes_and_clouds_alone(store: Store, clock: Hands) -> None:
    others = [replace(NODE, id="m"), replace(NODE, cloud="y")]
    for node in (NODE, *others):
        store.bills.record(node)
    clock.time_s = 3600.0
    store.bills.close(NODE)
    assert [bill.ended_s for bill in store.bills.list()] == [3600.0, None, None]
    for node in others:
        store.bills.close(node)
    clock.time_s = 7200.0
    store.bills.reopen(NODE)
    opened = [bill for bill in store.bills.list() if bill.ended_s is None]
    assert [(bill.cloud, bill.node, bill.created_s) for bill in opened] == [("x", "n", 7200.0)]
    assert sorted((bill.cloud, bill.node) for bill in store.bills.list())[1:] == [
        ("x", "n"),
        ("x", "n@0.0"),
        ("y", "n"),
    ]


def test_a_terminated_node_ends_its_bill_even_before_it_is_reopened(store: Store, clock: Hands) -> None:
    store.bills.record(replace(NODE, created_s=START_S))
    store.bills.record(replace(NODE, state=NodeState.TERMINATED, ended_s=START_S - 60.0))
    assert store.bills.spend_usd(now_s=START_S + 3600.0) == 0.0


def test_a_node_takes_its_job_from_its_cluster_once_that_is_known(store: Store) -> None:
    store.bills.record(NODE)
    store.clusters.put(make_cluster("c", job_id=7))
    store.bills.record(replace(NODE, usd_hour=4.0))
    store.clusters.delete("c")
    store.bills.record(replace(NODE, usd_hour=4.0))
    (bill,) = store.bills.list()
    assert (bill.job_id, bill.usd_hour, bill.cloud, bill.cluster, bill.created_s) == (7, 4.0, "x", "c", 0.0)


# -- leaders --------------------------------------------------------------------------------------------------------


def test_a_new_leader_fences_the_old_one_and_a_command_leads_nothing(tmp_path: Path, clock: Hands) -> None:
    old, new, command = (Store(tmp_path / "state.db", clock=clock) for _ in range(3))
    assert old.leader.measure_beat_age_s() == START_S
    assert (old.leader.lead(), new.leader.lead()) == (1, 2)
    with pytest.raises(FencedError):
        old.events.add(make_event(EventKind.NOTE, text="late"))
    with pytest.raises(FencedError):
        old.leader.beat()
    with pytest.raises(FencedError):
        old.intents.is_open("t")
    new.events.add(make_event(EventKind.NOTE, text="in time"))
    command.events.add(make_event(EventKind.NOTE, text="by a user"))
    assert [event.message for event in command.events.list()] == ["in time", "by a user"]
    clock.time_s += 5.0
    assert command.leader.measure_beat_age_s() == 5.0
    new.leader.beat()
    assert command.leader.measure_beat_age_s() == 0.0
    new.leader.resign()
    assert command.leader.measure_beat_age_s() == clock.time_s
    with pytest.raises(FencedError):
        old.leader.lead()
    assert command.leader.lead() == 3
    new.events.add(make_event(EventKind.NOTE, text="who resigned is a command again"))


# -- the store itself -----------------------------------------------------------------------------------------------


def test_a_cloud_is_adopted_after_two_lists_far_enough_apart(store: Store, clock: Hands) -> None:
    store.meta.forget_adoptions()

    def note(cloud: str = "x") -> bool:
        return store.meta.note_listed(cloud, settled_after_s=60.0)

    assert not note() and not store.meta.is_adopted("x")
    clock.time_s += 59.0
    assert not note() and not store.meta.is_adopted("x")
    clock.time_s += 1.0
    assert note() and store.meta.is_adopted("x") and not store.meta.is_adopted("y")
    store.meta.forget_adoptions()
    assert not store.meta.is_adopted("x")
    assert not note("y")
    clock.time_s -= 1000.0
    assert not note("y"), "the clock was set back: this is the first one"
    clock.time_s += 60.0
    assert note("y")


def test_a_restored_copy_drops_unfinished_operations(store: Store) -> None:
    job = store.jobs.add("j", Task())
    store.clusters.put(make_cluster("up"))
    store.clusters.put(replace(make_cluster("coming"), status=ClusterStatus.INIT))
    for token in ("t1", "t2"):
        store.intents.put(NodeRequest(owner="me", cluster="c", attempt=1, token=token, placement=PLACEMENT))
    store.intents.close("t1", IntentEnd.UP)
    store.meta.forget_half_done(attempts_skipped=100)
    assert [cluster.name for cluster in store.clusters.list()] == ["up"]
    assert store.intents.list_tokens("c") == {"t1"}
    assert get(store, job).next_attempt == 101


# -- events ---------------------------------------------------------------------------------------------------------


def test_events_are_chosen_by_job_by_cluster_and_by_what_was_read_already(store: Store, clock: Hands) -> None:
    store.events.add(make_event(EventKind.NOTE, text="one"), job_id=1)
    clock.time_s += 1.0
    store.events.add(make_event(EventKind.NOTE, text="two"), cluster="c")
    store.events.add(make_event(EventKind.NOTE, text="three"), job_id=1, cluster="c")
    assert [event.message for event in store.events.list(job_id=1)] == ["one", "three"]
    assert [event.message for event in store.events.list(cluster="c")] == ["two", "three"]
    assert [event.message for event in store.events.list(job_id=1, cluster="c")] == ["three"]
    first, *others = store.events.list()
    assert (first.kind, first.time_s, first.job_id, first.cluster) == (EventKind.NOTE, START_S, 1, None)
    assert store.events.list(after=first.id) == others


def test_recent_events_cannot_be_deleted(store: Store, clock: Hands) -> None:
    clock.time_s = time.time() - 80 * 86400
    store.events.add(make_event(EventKind.NOTE, text="some weeks ago"))
    with pytest.raises(StateError, match="append-only"):
        store.write("DELETE FROM events")


def test_overview_counts_jobs_bills_and_the_newest_events(store: Store) -> None:
    first, second = store.jobs.add("a", Task()), store.jobs.add("b", Task())
    store.jobs.set_status(second.id, JobStatus.SUCCEEDED)
    assert store.jobs.count_by_status() == {"PENDING": 1, "SUCCEEDED": 1}
    assert store.events.get_newest_id() == 0
    for text in ("old", "new"):
        store.events.add(make_event(EventKind.NOTE, text=text), job_id=first.id)
    newest = store.events.list_newest([first.id, second.id])
    assert {job_id: event.message for job_id, event in newest.items()} == {first.id: "new"}
    assert store.events.get_newest_id() == newest[first.id].id
    assert store.events.list_newest([]) == {}
    assert store.events.list_newest([first.id], kinds=[EventKind.NOTE, EventKind.LATE]) == newest
    assert store.events.list_newest([first.id], kinds=[EventKind.LATE]) == {}
    known = store.events.get_newest_id()
    assert (store.events.get_newest_id(first.id), store.events.get_newest_id(second.id)) == (known, 0)
    for job_id in (second.id, first.id, second.id):
        store.events.add(make_event(EventKind.NOTE, text="newer"), job_id=job_id)
    ids = [first.id, second.id]
    assert store.events.list_newest_ids(ids, after=known) == {first.id: known + 2, second.id: known + 3}
    assert store.events.list_newest_ids(ids, after=known + 2) == {second.id: known + 3}
    assert store.events.list_newest_ids([], after=0) == {}
    store.bills.record(replace(NODE, usd_hour=2.0, created_s=1000.0, ended_s=None))
    sums = store.bills.sum_spend(midnight_s=2800.0, month_s=0.0, now_s=4600.0)
    assert (sums.today_usd, sums.month_usd, sums.usd_hour) == (1.0, 2.0, 2.0)


# -- work that a killed process has left ------------------------------------------------------------------------------


def test_terminations_and_launches_that_a_killed_command_left_are_found(store: Store) -> None:
    cluster = Cluster(name="c", status=ClusterStatus.INIT, placement=PLACEMENT, attempt=1)
    request = NodeRequest(owner="me", cluster="c", attempt=1, token="t", placement=PLACEMENT)

    def look(status: ClusterStatus) -> tuple[bool, bool]:
        store.clusters.put(replace(cluster, status=status))
        return store.clusters.has_terminating(), store.intents.has_surplus()

    assert look(ClusterStatus.TERMINATING) == (True, False)
    store.intents.put(request)
    assert [look(each) for each in (ClusterStatus.INIT, ClusterStatus.UP)] == [(False, False), (False, True)]
    store.intents.close("t", IntentEnd.TERMINATED)
    assert look(ClusterStatus.UP) == (False, False)


def test_events_of_a_kind_are_found_after_a_number_and_since_a_time(store: Store, clock: Hands) -> None:
    job = store.jobs.add("train", Task())
    store.events.add(make_event(EventKind.LATE), job_id=job.id)
    newest, since_s = store.events.get_newest_id(), clock.now_s()

    def has(kind: EventKind, *, after: int = 0, since_s: float = since_s) -> bool:
        return store.events.has_notable((kind,), after=after, since_s=since_s)

    assert has(EventKind.LATE) and not has(EventKind.ENDED)
    assert not has(EventKind.LATE, after=newest) and not has(EventKind.LATE, since_s=since_s + 1.0)
