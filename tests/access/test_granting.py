"""Which grants are made, for which nodes, and when they are renewed; no service is called."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.access import granting
from broker.access.base import Grant, Need
from broker.access.granting import Grants, join_grants
from broker.access.needs import list_needs
from broker.clock import SystemClock
from broker.config import Config
from broker.errors import AuthError, CloudError, TransientError, UsageError
from broker.types import DataSet, Secret, StorageMount, Task
from broker.wording import describe_event
from tests.access.plans import make_cluster, make_task, plan_on


class FakeGranter:
    """Counts its grants; `own`: clouds whose nodes have access of their own."""

    def __init__(self, own: Sequence[str] = ()) -> None:
        self.own, self.issued, self.proved = own, 0, list[Need]()
        self.now_s, self.life_s = 1000.0, 36 * 3600.0
        self.error: CloudError | None = None

    def find_own(self, task: Task, cloud: str) -> str:
        return "its own" if cloud in self.own else ""

    def issue(self, needs: Sequence[Need], *, endpoint: str = "") -> Grant:
        if self.error:
            raise self.error
        self.issued += 1
        return Grant(
            files={"key": Secret(value=f"key-{self.issued}")}, envs={"KEY": "{access}/key"}, issued_s=self.now_s,
            expires_s=self.now_s + self.life_s, renew_s=self.now_s + 3600.0, by="a fake",
        )  # fmt: skip

    def prove(self, need: Need, grant: Grant) -> None:
        self.proved.append(need)


class GranterClock(SystemClock):
    """The clock of a fake granter."""

    def __init__(self, granter: FakeGranter) -> None:
        self._granter = granter

    def now_s(self) -> float:
        return self._granter.now_s


@pytest.fixture
def granter() -> FakeGranter:
    return FakeGranter()


def make_grants(config: Config, granter: FakeGranter, task: Task | None = None) -> tuple[Grants, list[str]]:
    told: list[str] = []
    grants = Grants(
        config, clock=GranterClock(granter), find_task=lambda _: task,
        record_event=lambda _, event: told.append(describe_event(event)), granters=dict.fromkeys(("s3", "gs"), granter),
    )  # fmt: skip
    return grants, told


def renew(grants: Grants, cloud: str = "gcp") -> list[Mapping[str, Any]]:
    delivered: list[Mapping[str, Any]] = []

    async def deliver(request: Mapping[str, Any]) -> None:
        delivered.append(request)

    asyncio.run(grants.renew(make_cluster(cloud, job_id=1), deliver))
    return delivered


def test_needs_are_the_keys_that_a_task_uses() -> None:
    mounts = (
        StorageMount(target="/d", source=("s3://data/in/",), mode="COPY"),
        StorageMount(target="/o", name="made", store="s3", source=("~/local",)),
        StorageMount(target="/w", source=("file:///nfs",)),
        StorageMount(target="/r", source=("s3://models",), is_read_only=True),
    )
    task = make_task("s3://runs", storage_mounts=mounts, inputs=(DataSet(url="s3://data/in", size_gib=1),))
    checkpoint, data, made, models = list_needs(task, "me")
    assert models.bucket == "models" and models.is_read_only
    assert checkpoint.list_patterns() == ("me-*",) and checkpoint.is_written and not checkpoint.is_read_only
    assert data.list_patterns() == ("in", "in/*") and data.is_read_only and not data.is_optional
    assert made.list_patterns() == ("*",) and made.is_made_later and not made.is_written
    assert list_needs(make_task("/shared/folder"), "me") == ()


@pytest.mark.parametrize(
    "variables", [{"secrets": {"AWS_ACCESS_KEY_ID": Secret(value="x")}}, {"envs": {"AWS_PROFILE": "p"}}]
)
def test_tasks_own_login_is_left_alone(config: Config, variables: dict[str, Any]) -> None:
    from broker.access.s3 import make_granter

    granter = make_granter(config, clock=SystemClock())
    assert granter.find_own(make_task(**variables), "gcp")
    assert granter.find_own(make_task(file_mounts={"~/.aws": "~/.aws"}), "gcp")
    assert not granter.find_own(make_task(), "aws")
    (config.home / "aws.toml").write_text('instance_profile = "mine"\n')
    granter = make_granter(config, clock=SystemClock())
    assert "mine" in granter.find_own(make_task(), "aws") and not granter.find_own(make_task(), "gcp")


def test_no_permission_is_checked_if_no_node_needs_access(config: Config, granter: FakeGranter) -> None:
    granter.error = AuthError("must not be asked")
    grants, _ = make_grants(config, granter)
    assert grants.check([plan_on(make_task(None), "gcp"), plan_on(make_task(), "local")]) == []
    granter.own = ("aws",)
    assert grants.check([plan_on(make_task(), "aws")]) == []
    assert asyncio.run(grants.grant(make_cluster("aws"), make_task())) is None
    (config.home / "config.toml").write_text('bucket_access = "own"\n')
    assert grants.check([plan_on(make_task(), "gcp")]) == []
    (config.home / "config.toml").write_text('bucket_access = "no"\n')
    with pytest.raises(UsageError, match="bucket_access"):
        grants.check([plan_on(make_task(), "gcp")])


def test_one_cloud_of_the_plan_that_lacks_access_is_enough(config: Config, granter: FakeGranter) -> None:
    granter.own, granter.error = ("aws",), AuthError("no", hints=("do this",))
    grants, _ = make_grants(config, granter)
    with pytest.raises(
        AuthError, match="nodes on gcp would have no access to `s3://testbed/runs/0wner-`: no"
    ) as refused:
        grants.check([plan_on(make_task(), "aws", "gcp")])
    assert refused.value.hints[0] == "do this"


def test_data_that_a_task_merely_names_does_not_block_a_launch(config: Config, granter: FakeGranter) -> None:
    granter.error = AuthError("not yours")
    grants, _ = make_grants(config, granter)
    task = make_task(None, inputs=(DataSet(url="s3://public", size_gib=1),))
    assert grants.check([plan_on(task, "gcp")]) == []
    assert asyncio.run(grants.grant(make_cluster("gcp"), task)) is None


def test_local_nodes_start_without_a_grant(config: Config, granter: FakeGranter) -> None:
    granter.error = AuthError("no login")
    grants, _ = make_grants(config, granter)
    assert asyncio.run(grants.grant(make_cluster("local"), make_task())) is None
    with pytest.raises(AuthError):
        asyncio.run(grants.grant(make_cluster("gcp"), make_task()))


def test_jobs_with_the_same_needs_share_a_grant_and_fall_back_on_an_older_one(
    config: Config, granter: FakeGranter
) -> None:
    grants, _ = make_grants(config, granter)
    for name in ("one", "two"):
        request = asyncio.run(grants.grant(replace(make_cluster("gcp"), name=name), make_task()))
        assert request is not None and request["files"] == {"key": "key-1"}
    granter.now_s += 4000.0
    granter.error = AuthError("the login has expired")  # as at night, in the middle of a recovery
    request = asyncio.run(grants.grant(make_cluster("gcp"), make_task()))
    assert request is not None and request["files"] == {"key": "key-1"}
    granter.now_s += granter.life_s
    with pytest.raises(AuthError):
        asyncio.run(grants.grant(make_cluster("gcp"), make_task()))


def test_an_older_grant_is_used_while_it_is_valid_for_another_quarter_of_an_hour(
    config: Config, granter: FakeGranter
) -> None:
    grants, _ = make_grants(config, granter)
    asyncio.run(grants.grant(make_cluster("gcp"), make_task()))
    granter.error, end_s = AuthError("the login has expired"), granter.now_s + granter.life_s
    granter.now_s = end_s - 900.0
    assert asyncio.run(grants.grant(make_cluster("gcp"), make_task())) is not None
    granter.now_s = end_s - 899.0
    with pytest.raises(AuthError):
        asyncio.run(grants.grant(make_cluster("gcp"), make_task()))


def test_only_needs_that_exist_and_must_be_met_are_proved(config: Config, granter: FakeGranter, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    upload = StorageMount(target="/up", source=(str(tmp_path / "data"),), name="new", store="s3", mode="COPY")
    task = make_task("s3://runs/here", inputs=(DataSet(url="s3://public", size_gib=1),), storage_mounts=(upload,))
    make_grants(config, granter)[0].check([plan_on(task, "gcp")])
    assert [need.bucket for need in granter.proved] == ["runs"]


def test_grant_is_renewed_when_due_even_by_a_restarted_daemon(config: Config, granter: FakeGranter) -> None:
    grants, told = make_grants(config, granter, make_task())
    asyncio.run(grants.grant(make_cluster("gcp", job_id=1), make_task()))
    assert renew(grants) == [], "not due yet"
    granter.now_s += 3600.0
    assert [request["files"] for request in renew(grants)] == [{"key": "key-2"}]
    again, _ = make_grants(config, granter, make_task())
    assert [request["files"] for request in renew(again)] == [{"key": "key-3"}]
    assert renew(again) == [] and told == []


def test_grant_that_must_be_renewed_at_once_is_renewed_once_a_minute(config: Config, granter: FakeGranter) -> None:
    """As one from the cache whose time has come: each renewal of the lease would make another key."""
    grants, _ = make_grants(config, granter, make_task())
    asyncio.run(grants.grant(make_cluster("gcp", job_id=1), make_task()))
    granter.now_s += 3600.0
    granter.error = TransientError("no network")
    assert len(renew(grants)) == 1 and renew(grants) == []
    granter.now_s += 60.0
    assert len(renew(grants)) == 1
    granter.now_s += 3000.0
    granter.error = None
    assert len(renew(grants)) == 1, "the newer one, long before the usual hour"


def test_access_to_another_service_is_a_grant_of_its_own(config: Config, granter: FakeGranter) -> None:
    grants, _ = make_grants(config, granter)
    own, other = make_task(), make_task(envs={"AWS_ENDPOINT_URL_S3": "https://s3.example.org"})
    found = [asyncio.run(grants.grant(make_cluster("gcp", job_id=1), task)) for task in (own, other, own, other)]
    assert [each["files"]["key"] for each in found if each] == ["key-1", "key-2", "key-1", "key-2"]


def test_required_bucket_beside_an_optional_one_is_still_required(config: Config, granter: FakeGranter) -> None:
    task = make_task(inputs=(DataSet(url="s3://public", size_gib=1),))
    grants, _ = make_grants(config, granter, task)
    granter.error = TransientError("no network")
    with pytest.raises(TransientError):
        asyncio.run(grants.grant(make_cluster("gcp", job_id=1), task))


def test_a_clock_that_is_set_back_does_not_delay_a_renewal(config: Config, granter: FakeGranter) -> None:
    """The credentials expire by the clock of the service that has issued them."""
    grants, told = make_grants(config, granter, make_task())
    asyncio.run(grants.grant(make_cluster("gcp", job_id=1), make_task()))
    granter.now_s -= 7200.0
    assert [request["files"] for request in renew(grants)] == [{"key": "key-2"}]
    assert renew(grants) == [] and told == []


def test_failed_renewal_is_reported_once_and_retried(config: Config, granter: FakeGranter) -> None:
    grants, told = make_grants(config, granter, make_task())
    granter.error = TransientError("no network")
    assert renew(grants) == renew(grants) == []
    assert told == ["cannot renew the nodes' bucket access: no network"]
    granter.error = None
    assert len(renew(grants)) == 1


def test_login_that_expired_is_reported_while_the_nodes_still_have_access(config: Config, granter: FakeGranter) -> None:
    grants, told = make_grants(config, granter, make_task())
    asyncio.run(grants.grant(make_cluster("gcp", job_id=1), make_task()))
    granter.now_s += 3600.0  # of 36 hours
    granter.error = TransientError("no network")
    assert len(renew(grants)) == 1 and told == [], "it passes; they get the same key again"
    granter.now_s += 60.0
    granter.error = AuthError("the login has expired", hints=("run `gcloud auth application-default login`",))
    assert renew(grants) == renew(grants) == []
    (sentence,) = told
    assert "the login has expired; run `gcloud auth application-default login`" in sentence


def test_times_of_renewal_of_ended_clusters_do_not_stay_in_memory(
    config: Config, granter: FakeGranter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(granting, "CLUSTERS_MAX", 10)
    grants, _ = make_grants(config, granter, make_task())
    for number in range(25):
        asyncio.run(grants.grant(replace(make_cluster("gcp"), name=f"c{number}"), make_task()))
    assert len(grants._renew_s) <= 10 and "c24" in grants._renew_s


def test_grants_show_no_secret(granter: FakeGranter) -> None:
    assert "key-1" not in repr(granter.issue([]))


def test_expired_credentials_do_not_stay_in_memory(config: Config, granter: FakeGranter) -> None:
    grants, _ = make_grants(config, granter)
    for number in range(3):
        grants.check([plan_on(make_task(f"s3://runs-{number}"), "gcp")])
        granter.now_s += granter.life_s * 0.6
    assert len(grants._known) == 2, "the first has expired, the second is still usable"


def test_grants_of_several_schemes_end_and_are_renewed_with_the_first_of_them() -> None:
    day = Grant(files={"a": Secret(value="x")}, issued_s=5.0, expires_s=100.0, renew_s=80.0, by="one")
    week = Grant(
        envs={"B": "y"}, secrets={"C": Secret(value="z")}, issued_s=9.0, expires_s=700.0, renew_s=30.0, by="two"
    )
    both = join_grants([day, week])
    assert (both.issued_s, both.expires_s, both.renew_s, both.by) == (5.0, 100.0, 30.0, "one, two")
    assert (set(both.files), set(both.envs), set(both.secrets)) == ({"a"}, {"B"}, {"C"})


def test_keys_that_a_task_both_reads_and_writes_are_granted_for_writing() -> None:
    place = "s3://data/run"
    task = Task(run="x", inputs=(DataSet(url=place, size_gib=1.0),), outputs=(DataSet(url=place, size_gib=1.0),))
    (need,) = list_needs(task, "me")
    assert (need.is_read_only, need.is_optional) == (False, True)
    mounted = replace(task, storage_mounts=(StorageMount(target="/run", source=(place,), mode="COPY"),))
    (need,) = list_needs(mounted, "me")
    assert (need.is_read_only, need.is_optional, need.source) == (False, False, "file_mounts: /run")


def test_a_grant_that_was_swept_while_a_launch_waited_for_its_price_is_made_again(
    config: Config, granter: FakeGranter
) -> None:
    """The nodes would get the key of a deleted account, and lose every checkpoint."""
    task = make_task("gs://bucket/run")
    (config.home / "access").mkdir()
    launch, _ = make_grants(config, granter)
    launch.check([plan_on(task, "aws")])
    collector, _ = make_grants(config, granter)  # `broker gc`, in another process
    collector.sweep()
    request = asyncio.run(launch.grant(make_cluster("aws"), task))
    assert request is not None and request["files"] == {"key": "key-2"}
    assert asyncio.run(launch.grant(make_cluster("aws"), task)) == request, "once"
