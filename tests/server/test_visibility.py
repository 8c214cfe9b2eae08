"""Lists on a server: the caller's own clusters and jobs, or with `--all-users` those of everyone with their owners."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker.cli.main import main
from broker.client.login import save_login
from broker.config import LOGIN
from broker.state.people import Owned
from broker.types import Cluster, ClusterStatus, JobStatus, Placement, Task
from tests.server.conftest import Hosted
from tests.simulation.world import make_offer

NEWEST = 50  # that `jobs queue` shows

Ask = Callable[..., str]


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    """A server with a cluster and an ended job of `user`, of `other`, and of neither."""
    hosted = Hosted(tmp_path_factory.mktemp("team"))
    store = hosted.context.store
    placement = Placement(offer=make_offer("east1a"), is_spot=False, node_count=1)
    for user in ("user", "other", None):
        name = f"of-{user}"
        store.clusters.put(Cluster(name=name, placement=placement, status=ClusterStatus.UP, attempt=1))
        job = store.jobs.add(name, Task(run="true"))
        store.jobs.set_status(job.id, JobStatus.SUCCEEDED)
        if user is not None:
            store.owners.put(Owned.CLUSTER, name, user)
            store.owners.put(Owned.JOB, str(job.id), user)
    yield hosted
    hosted.stop()


@pytest.fixture
def ask(team: Hosted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Run a command as a user of the server, and return its output."""

    def run(user: str, *arguments: str) -> str:
        monkeypatch.setenv("BROKER_HOME", str(tmp_path))
        save_login(tmp_path / LOGIN, team.login(user))
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        assert not ended.value.code
        return capsys.readouterr().out

    return run


def read_names(table: str) -> list[str]:
    return [word for word in table.split() if word.startswith("of-")]


def test_own_jobs_are_listed_and_those_of_others_counted(ask: Ask) -> None:
    shown = ask("user", "jobs", "queue")
    assert read_names(shown) == ["of-user"] and "USER" not in shown
    assert "2 jobs of other users; show them with `--all-users`" in shown


def test_all_users_are_listed_with_the_owners_of_their_jobs(ask: Ask) -> None:
    header, *rows = ask("user", "jobs", "queue", "--all-users").splitlines()
    assert header.split()[:3] == ["ID", "NAME", "USER"]
    assert [row.split()[1:3] for row in rows[:3]] == [["of-None", "-"], ["of-other", "other"], ["of-user", "user"]]
    assert not any("other users" in row for row in rows)


def test_viewer_without_jobs_sees_the_number_of_other_users_jobs(ask: Ask) -> None:
    shown = ask("viewer", "jobs", "queue")
    assert shown.startswith("No managed jobs; ") and "3 jobs of other users" in shown


def test_administrator_also_sees_jobs_that_no_user_started(ask: Ask) -> None:
    shown = ask("admin", "jobs", "queue")
    assert read_names(shown) == ["of-None"] and "2 jobs of other users" in shown


def test_clusters_are_listed_the_same_way(ask: Ask) -> None:
    own = ask("other", "status")
    assert read_names(own) == ["of-other"] and "2 clusters of other users; show them with `--all-users`" in own
    assert "Total cost so far of all users: " in own
    every = ask("other", "status", "-u")
    assert sorted(read_names(every)) == ["of-None", "of-other", "of-user"]
    assert "of other users" not in every and "Total cost so far: " in every


def test_cluster_of_a_job_is_listed_for_the_owner_of_the_job(team: Hosted, ask: Ask) -> None:
    store = team.context.store
    job_id = next(each.id for each in store.jobs.list() if each.name == "of-other")
    placement = Placement(offer=make_offer("east1a"), is_spot=False, node_count=1)
    store.clusters.put(Cluster(name="of-job", placement=placement, status=ClusterStatus.UP, attempt=1, job_id=job_id))
    try:
        assert sorted(read_names(ask("other", "status"))) == ["of-job", "of-other"]
        assert read_names(ask("user", "status")) == ["of-user"]
        every = json.loads(ask("user", "status", "--all-users", "--json"))["clusters"]
        assert {each["name"]: each["user"] for each in every}["of-job"] == "other"
    finally:
        store.clusters.delete("of-job")


def test_json_of_all_users_names_each_owner(ask: Ask) -> None:
    (job,) = json.loads(ask("other", "jobs", "queue", "--json"))
    assert (job["name"], job["user"]) == ("of-other", "other")
    clusters = json.loads(ask("other", "status", "--all-users", "--json"))["clusters"]
    assert {each["name"]: each["user"] for each in clusters} == {
        "of-user": "user", "of-other": "other", "of-None": None,
    }  # fmt: skip


def test_newest_own_jobs_are_shown_however_many_others_have_started_since(team: Hosted, ask: Ask) -> None:
    store = team.context.store
    added = [store.jobs.add("of-another", Task(run="true")).id for _ in range(NEWEST + 1)]
    for job_id in added:
        store.jobs.set_status(job_id, JobStatus.SUCCEEDED)
        store.owners.put(Owned.JOB, str(job_id), "admin")
    assert read_names(ask("user", "jobs", "queue")) == ["of-user"]
    shown = ask("admin", "jobs", "queue")
    assert len(read_names(shown)) == NEWEST and "... and 2 older; show them with `--all`" in shown
    assert len(read_names(ask("admin", "jobs", "queue", "--all"))) == NEWEST + 2


def test_clusters_of_replicas_and_gateways_are_listed_for_the_owner_of_the_service(team: Hosted, ask: Ask) -> None:
    store = team.context.store
    store.services.add("web", Task(run="true"), host="127.0.0.1", port=30001, wanted=1)
    store.owners.put(Owned.SERVICE, "web", "other")
    service = store.services.get("web")
    assert service is not None
    placement = Placement(offer=make_offer("east1a"), is_spot=False, node_count=1)
    for name, number in (("of-replica", "1"), ("of-gateway", "gateway-1/1")):
        job_id = store.jobs.add(name, Task(), request_id=f"service/web/{service.uid}/{number}").id
        store.clusters.put(Cluster(name=name, placement=placement, status=ClusterStatus.UP, attempt=1, job_id=job_id))
        store.jobs.set_status(job_id, JobStatus.CANCELLED)
    try:
        assert sorted(read_names(ask("other", "status"))) == ["of-gateway", "of-other", "of-replica"]
        assert read_names(ask("user", "status")) == ["of-user"]
        every = json.loads(ask("user", "status", "--all-users", "--json"))["clusters"]
        users = {each["name"]: each["user"] for each in every}
        assert users["of-replica"] == users["of-gateway"] == "other"
    finally:
        for name in ("of-replica", "of-gateway"):
            store.clusters.delete(name)
