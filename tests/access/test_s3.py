"""Access to S3 over the wire: boto3 calls STS, and S3 limits nodes to their grant."""

from __future__ import annotations

import json
import stat
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from broker.access.base import Grant, Need
from broker.access.granting import Grants
from broker.access.needs import list_needs
from broker.access.s3 import S3Granter
from broker.access.s3_policy import POLICY_CHARACTERS_MAX, make_policy
from broker.clock import SystemClock
from broker.clouds.aws.settings import Settings
from broker.config import Config
from broker.errors import AccountError, AuthError, InvalidRequestError
from tests.access.plans import make_task, plan_on
from tests.testbed.sts import FakeStore

ROLE = "arn:aws:iam::123456789012:role/buckets"


ADMIN = "arn:aws:sts::123456789012:assumed-role/AWSReservedSSO_Admin/me"


def make_granter(config: Config, **settings: Any) -> S3Granter:
    return S3Granter(Settings(**settings), config, clock=SystemClock())


def open_client(grant: Grant) -> Any:
    login = json.loads(grant.files["aws.json"].value)
    return boto3.client(
        "s3", aws_access_key_id=login["AccessKeyId"], aws_secret_access_key=login["SecretAccessKey"],
        aws_session_token=login.get("SessionToken"),
    )  # fmt: skip


class AheadClock(SystemClock):
    ahead_s = 0.0

    def now_s(self) -> float:
        return super().now_s() + self.ahead_s


def test_grant_reaches_this_installations_checkpoints_and_nothing_else(store: FakeStore, config: Config) -> None:
    needs = list_needs(make_task(), "0wner")
    client = open_client(make_granter(config).issue(needs))
    client.put_object(Bucket="testbed", Key="runs/0wner-job/a", Body=b"mine")
    assert client.get_object(Bucket="testbed", Key="runs/0wner-job/a")["Body"].read() == b"mine"
    store.objects["testbed/runs/other-job/a"] = b"theirs"
    for call, key in (("get_object", "runs/other-job/a"), ("put_object", "runs/x"), ("delete_object", "runs/x")):
        with pytest.raises(ClientError, match="AccessDenied"):
            getattr(client, call)(Bucket="testbed", Key=key)
    with pytest.raises(ClientError, match="AccessDenied"):
        client.list_objects_v2(Bucket="testbed", Prefix="runs/other-job/")
    with pytest.raises(ClientError, match="NoSuchKey"):  # programs distinguish a missing object from a forbidden one
        client.get_object(Bucket="testbed", Key="runs/0wner-job/none")


def test_copied_data_is_read_only(store: FakeStore, config: Config) -> None:
    store.objects["testbed/data/a"] = b"a"
    need = Need(scheme="s3", bucket="testbed", path="data", is_read_only=True)
    client = open_client(make_granter(config).issue([need]))
    assert [each["Key"] for each in client.list_objects_v2(Bucket="testbed", Prefix="data/")["Contents"]] == ["data/a"]
    assert client.get_object(Bucket="testbed", Key="data/a")["Body"].read() == b"a"
    with pytest.raises(ClientError, match="AccessDenied"):
        client.put_object(Bucket="testbed", Key="data/a", Body=b"")


def test_user_gets_a_session_of_36_hours_that_covers_an_unattended_night(store: FakeStore, config: Config) -> None:
    grants = Grants(config, clock=SystemClock())
    (sentence,) = grants.check([plan_on(make_task(), "gcp")], allowances_s=[12 * 3600.0])
    assert "for 36 h at a time" in sentence and "s3://testbed/runs/0wner-*" in sentence
    assert "ends before" not in sentence
    (asked,) = [asked for action, asked in store.calls if action == "GetFederationToken"]
    assert asked["DurationSeconds"] == "129600" and asked["Name"] == "broker-0wner"
    assert not store.objects, "the object that proves the access is deleted again"


def test_session_shorter_than_the_allowance_is_reported(store: FakeStore, config: Config) -> None:
    (config.home / "aws.toml").write_text(f'bucket_role = "{ROLE}"\n')
    store.arn = ADMIN
    (sentence,) = Grants(config, clock=SystemClock()).check([plan_on(make_task(), "gcp")], allowances_s=[12 * 3600.0])
    assert "for 1 h at a time" in sentence and "access ends before the nodes do (12 h)" in sentence


@pytest.mark.parametrize(("role_s_max", "life_s"), [(43_200, 43_200), (3_600, 3_600)], ids=["12h", "1h"])
def test_user_takes_the_named_role_for_as_long_as_it_allows(
    store: FakeStore, config: Config, role_s_max: int, life_s: int
) -> None:
    store.role_s_max = role_s_max
    grant = make_granter(config, bucket_role=ROLE).issue(list_needs(make_task(), "0wner"))
    assert grant.expires_s - grant.issued_s == pytest.approx(life_s, abs=60)
    assert grant.renew_s - grant.issued_s == pytest.approx(min(3600.0, life_s / 4), abs=60), "long before it expires"
    action, asked = store.calls[-1]
    assert action == "AssumeRole" and asked["RoleArn"] == ROLE and int(asked["DurationSeconds"]) == life_s
    assert ROLE in grant.by


@pytest.mark.parametrize(
    ("arn", "why"),
    [
        (ADMIN, "AccessDenied"),
        ("arn:aws:iam::123456789012:root", "root user"),
        ("arn:aws:sts::123456789012:federated-user/x", "federated"),
    ],
)
def test_login_that_cannot_grant_is_refused_with_remedies_before_money_is_spent(
    store: FakeStore, config: Config, arn: str, why: str
) -> None:
    store.arn = arn
    store.forbidden = {"CreateUser"}
    with pytest.raises(AuthError, match=why) as refused:
        Grants(config, clock=SystemClock()).check([plan_on(make_task(), "gcp", "aws")])
    assert "nodes on aws and gcp would have no access to `s3://testbed/runs/0wner-`" in refused.value.message
    hints = " ".join(refused.value.hints)
    for way in ("bucket_role", "instance_profile", "AWS_ACCESS_KEY_ID", 'bucket_access = "own"'):
        assert way in hints


def test_role_login_creates_a_user_for_these_keys_and_each_renewal_extends_its_access(
    store: FakeStore, config: Config
) -> None:
    store.arn = ADMIN
    clock = AheadClock()
    granter = S3Granter(Settings(), config, clock=clock)
    needs = list_needs(make_task(), "0wner")
    grant = granter.issue(needs)
    (name,) = store.users
    assert name in grant.by and grant.expires_s - grant.issued_s == pytest.approx(36 * 3600, abs=300)
    assert ("broker-owner", "0wner") in {
        (asked["Tags.member.1.Key"], asked["Tags.member.1.Value"]) for act, asked in store.calls if act == "CreateUser"
    }
    client = open_client(grant)
    client.put_object(Bucket="testbed", Key="runs/0wner-job/a", Body=b"mine")
    with pytest.raises(ClientError, match="AccessDenied"):
        client.get_object(Bucket="testbed", Key="runs/other-job/a")
    clock.ahead_s = -40 * 3600.0  # the last renewal was that long ago
    again = S3Granter(Settings(), config, clock=clock).issue(needs)
    assert again.files["aws.json"].value == grant.files["aws.json"].value, "the daemon uses the key that is kept"
    with pytest.raises(ClientError, match="AccessDenied"):
        client.put_object(Bucket="testbed", Key="runs/0wner-job/a", Body=b"late")
    clock.ahead_s = 0.0
    granter.issue(needs)
    client.put_object(Bucket="testbed", Key="runs/0wner-job/a", Body=b"renewed")
    (path,) = (config.home / "access").glob("*.json")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.unlink()  # the state folder was lost: its key must not stay valid
    granter.issue(needs)
    with pytest.raises(ClientError, match="InvalidAccessKeyId"):
        client.put_object(Bucket="testbed", Key="runs/0wner-job/a", Body=b"old")
    store.users.clear()  # by hand: the kept key is that of no user
    store.sessions.clear()
    again = granter.issue(needs)
    open_client(again).put_object(Bucket="testbed", Key="runs/0wner-job/a", Body=b"new")
    store.arn = ADMIN.replace(ADMIN.split(":")[4], "999999999999")
    with pytest.raises(AccountError, match=f"in account {ADMIN.split(':')[4]}"):
        granter.sweep()
    assert store.users and list((config.home / "access").glob("*.json"))
    store.arn = ADMIN
    assert granter.sweep() == 1 and not store.users and not store.sessions
    assert granter.sweep() == 0


def test_forbidden_federation_names_the_permission(store: FakeStore, config: Config) -> None:
    store.forbidden = {"GetFederationToken", "CreateUser"}
    with pytest.raises(AuthError, match="AccessDenied") as refused:
        Grants(config, clock=SystemClock()).check([plan_on(make_task(), "aws")])
    assert "sts:GetFederationToken" in refused.value.hints[0]


def test_users_session_that_cannot_federate_makes_a_user(store: FakeStore, config: Config) -> None:
    """As with MFA: AWS lets only a user's long-lived key call GetFederationToken."""
    store.forbidden = {"GetFederationToken"}
    (sentence,) = Grants(config, clock=SystemClock()).check([plan_on(make_task(), "aws")])
    assert "which broker created" in sentence and len(store.users) == 1


def test_grant_that_cannot_write_is_found_by_writing(store: FakeStore, config: Config) -> None:
    store.read_only = True
    with pytest.raises(AuthError, match="cannot write to `s3://testbed/runs/0wner-`"):
        Grants(config, clock=SystemClock()).check([plan_on(make_task(), "aws")])


def test_missing_bucket_is_found_before_money_is_spent(store: FakeStore, config: Config) -> None:
    with pytest.raises(InvalidRequestError, match="NoSuchBucket") as refused:
        Grants(config, clock=SystemClock()).check([plan_on(make_task("s3://typo/runs"), "aws")])
    assert "aws s3 mb s3://typo" in refused.value.hints[0]


def test_other_s3_services_need_keys_of_the_task(
    store: FakeStore, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = make_task(envs={"AWS_ENDPOINT_URL_S3": "https://minio.example"})
    with pytest.raises(AuthError, match=r"minio\.example") as refused:
        Grants(config, clock=SystemClock()).check([plan_on(task, "aws")])
    assert "AWS_ACCESS_KEY_ID" in refused.value.hints[0] and not store.calls


def test_policy_longer_than_aws_allows_is_refused() -> None:
    needs = [Need(scheme="s3", bucket=f"bucket-{n}", path="p" * 40) for n in range(20)]
    with pytest.raises(InvalidRequestError, match="too many bucket paths"):
        make_policy(needs)
    assert len(make_policy(needs[:5], partition="aws-us-gov")) <= POLICY_CHARACTERS_MAX
