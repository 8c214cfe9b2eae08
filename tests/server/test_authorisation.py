"""Who may do what: every role and every verb, and the owner of everything that a verb changes."""

from __future__ import annotations

from typing import Any

import pytest

from broker.app.verbs.shells import find_owned
from broker.client.wire import VERBS
from broker.errors import DeniedError
from broker.server.authorisation import check_verb
from broker.state.people import Owned, Role
from broker.types import Cluster, ClusterStatus, Payee, Placement, Resources, ScheduleSpec, Task
from tests.server.conftest import Hosted
from tests.simulation.world import make_offer

# The matrix, written out: whatever is not here is refused.
READS = {
    "show_status", "check_up", "find_run", "follow_run", "list_runs", "preview_down", "name_target",
    "describe_interrupted", "list_queue", "list_jobs", "show_job", "follow_log", "list_events", "explain_job",
    "find_members", "wait_for_job", "show_cost", "check_clouds", "plan_tasks", "report_month", "score_forecasts",
    "list_forecasts",
    "inspect_clouds", "inspect_cloud", "list_startable", "watch_jobs", "read_job_history", "list_services",
    "explain_service", "wait_for_service", "follow_service_log", "preview_services_down", "read_sweep",
    "show_overview", "list_locations", "find_node", "list_schedules", "list_due_times",
}  # fmt: skip
WRITES = {
    "cancel_runs", "stop_cluster", "start_cluster", "set_autostop", "terminate_clusters", "launch", "exec_task",
    "launch_jobs", "cancel_jobs", "retry_job", "retry_group", "bring_up_service", "start_service_controller",
    "update_service", "terminate_services", "run_map", "run_sweep", "schedule_job", "pause_schedule",
    "resume_schedule", "remove_schedule", "run_on_node", "open_shell",
}  # fmt: skip
ALLOWED = {"viewer": READS, "user": READS | WRITES, "admin": READS | WRITES}


def test_matrix_covers_every_verb() -> None:
    assert set(VERBS) == READS | WRITES and not READS & WRITES


@pytest.mark.parametrize("role", ALLOWED)
def test_role_decides_which_verbs_answer(hosted: Hosted, role: str) -> None:
    """No arguments are sent, so that a verb with required ones answers 400 where the role admits it."""
    statuses = {verb: hosted.ask(f"/v1/{verb}", {}, token=hosted.tokens[role])[0] for verb in VERBS}
    assert {verb for verb, status in statuses.items() if status != 403} == ALLOWED[role]
    assert 401 not in statuses.values() and 500 not in statuses.values()


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_requires_a_valid_token(hosted: Hosted, verb: str) -> None:
    for token in (None, "broker_wrong", hosted.tokens["admin"] + "x"):
        status, answer = hosted.ask(f"/v1/{verb}", {}, token=token)
        assert status == 401 and "expired or revoked" in answer["error"]["message"]


@pytest.mark.parametrize("path", ["/metrics", "/v1/handshake", f"/v1/files/{'0' * 64}"])
def test_other_routes_require_a_token(hosted: Hosted, path: str) -> None:
    assert hosted.ask(path)[0] == 401
    assert hosted.ask(path, token=hosted.tokens["viewer"])[0] == 200


def test_health_requires_no_token(hosted: Hosted) -> None:
    assert hosted.ask("/healthz") == (200, {"status": "ok"})
    assert hosted.ask("/readyz") == (200, {"status": "ready"})


@pytest.fixture(scope="module")
def owned(hosted: Hosted) -> str:
    """Record a cluster and a job of `user`; return the job's id."""
    store = hosted.context.store
    placement = Placement(offer=make_offer("east1a"), is_spot=False, node_count=1)
    store.clusters.put(Cluster(name="dev", placement=placement, status=ClusterStatus.UP, attempt=1))
    job = store.jobs.add("train", Task(run="true", resources=(Resources(cloud="local"),)))
    store.owners.put(Owned.CLUSTER, "dev", "user")
    store.owners.put(Owned.JOB, str(job.id), "user")
    store.services.add("dev", Task(run="true"), host="127.0.0.1", port=30001, wanted=1)
    store.owners.put(Owned.SERVICE, "dev", "user")
    spec = ScheduleSpec(cron="0 2 * * *")
    store.schedules.add("dev", Task(run="true"), spec, next_s=1e10, payee=Payee(user="user"))
    return str(job.id)


def list_arguments(verb: str, job_id: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, kind in VERBS[verb].owned.items():
        value = job_id if kind is Owned.JOB else "dev"
        found[name] = (value,) if name == "names" else value
    return found


@pytest.mark.parametrize("verb", [name for name, verb in VERBS.items() if verb.owned])
@pytest.mark.parametrize(("user", "is_allowed"), [("user", True), ("other", False), ("admin", True), ("viewer", False)])
def test_users_change_only_their_own(hosted: Hosted, owned: str, verb: str, user: str, *, is_allowed: bool) -> None:
    token = next(each for each in hosted.context.store.tokens.list() if each.user == user)
    arguments = list_arguments(verb, owned)
    if is_allowed:
        check_verb(hosted.context, token, VERBS[verb], arguments)
        return
    with pytest.raises(DeniedError):
        check_verb(hosted.context, token, VERBS[verb], arguments)


@pytest.mark.parametrize("verb", ["open_shell", "run_on_node"])
def test_nodes_of_a_job_or_a_replica_are_entered_by_the_owner_of_the_job_or_service(
    hosted: Hosted, owned: str, verb: str
) -> None:
    store = hosted.context.store
    users = {each.user: each for each in store.tokens.list()}
    service = store.services.get("dev")
    assert service is not None
    replica = store.jobs.add("replica", Task(run="true"), request_id=f"service/dev/{service.uid}/1").id
    foreign = store.jobs.add("foreign", Task(run="true"), request_id="service/dev/of-an-earlier-one/1").id
    placement = Placement(offer=make_offer("east1a"), is_spot=False, node_count=1)
    for name, job_id in (("of-job", int(owned)), ("of-replica", replica), ("of-none", foreign)):
        store.clusters.put(Cluster(name=name, placement=placement, status=ClusterStatus.UP, attempt=1, job_id=job_id))
    for name, whose in (("of-job", f"job `{owned}`"), ("of-replica", "service `dev`")):
        for user in ("user", "admin"):
            check_verb(hosted.context, users[user], VERBS[verb], {"cluster": name})
        with pytest.raises(DeniedError, match=f"{whose} belongs to user"):
            check_verb(hosted.context, users["other"], VERBS[verb], {"cluster": name})
        with pytest.raises(DeniedError):  # entering is all that this permits
            check_verb(hosted.context, users["user"], VERBS["stop_cluster"], {"cluster": name})
    with pytest.raises(DeniedError, match=f"job `{foreign}` was started on the server itself"):
        check_verb(hosted.context, users["user"], VERBS[verb], {"cluster": "of-none"})
    found = [each for each in store.clusters.list() if each.name.startswith("of-")]
    for each in found:
        store.clusters.delete(each.name)
    assert {find_owned(store, each)[0] for each in found} == {Owned.JOB, Owned.SERVICE}


def test_patterns_and_all_reach_no_cluster_of_others(hosted: Hosted, owned: str) -> None:
    token = next(each for each in hosted.context.store.tokens.list() if each.role is Role.USER and each.user == "other")
    for verb, arguments in (
        ("terminate_clusters", {"names": ("d*",)}),
        ("cancel_jobs", {"names": (), "is_all": True}),
        ("cancel_jobs", {"names": ("train",)}),
        ("retry_job", {"job": "train"}),
    ):
        with pytest.raises(DeniedError):
            check_verb(hosted.context, token, VERBS[verb], arguments)


def test_resources_started_without_the_server_belong_to_administrators(hosted: Hosted) -> None:
    store = hosted.context.store
    job = store.jobs.add("embedded", Task(run="true"))
    users = {each.user: each for each in store.tokens.list()}
    check_verb(hosted.context, users["admin"], VERBS["cancel_jobs"], {"names": (str(job.id),)})
    with pytest.raises(DeniedError, match="started on the server itself"):
        check_verb(hosted.context, users["user"], VERBS["cancel_jobs"], {"names": (str(job.id),)})


def test_write_is_audited_with_its_outcome(hosted: Hosted, owned: str) -> None:
    for user, status in (("other", 403), ("user", 200)):
        assert hosted.ask("/v1/cancel_jobs", {"names": [owned]}, token=hosted.tokens[user])[0] == status
    found = [(each.user, each.verb, each.outcome) for each in hosted.context.store.audit.list()]
    assert ("other", "cancel_jobs", "DeniedError") in found and ("user", "cancel_jobs", "done") in found


def test_revoked_and_expired_tokens_are_refused(hosted: Hosted) -> None:
    from broker.server.tokens import create_token

    store = hosted.context.store
    brief = create_token(store, user="brief", role=Role.ADMIN, days=-1)
    assert hosted.ask("/v1/handshake", token=brief.value.value)[0] == 401
    gone = create_token(store, user="gone", role=Role.ADMIN, days=1)
    assert hosted.ask("/v1/handshake", token=gone.value.value)[0] == 200
    assert store.tokens.revoke(gone.id) and not store.tokens.revoke(gone.id)
    assert hosted.ask("/v1/handshake", token=gone.value.value)[0] == 401


def test_no_token_is_stored_in_clear(hosted: Hosted) -> None:
    for path in hosted.home.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert not any(token.encode() in content for token in hosted.tokens.values()), path
