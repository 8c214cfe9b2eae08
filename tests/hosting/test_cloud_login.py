"""Which login a server's machine gets on its cloud, and which settings the server gets with it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from broker.clouds.aws import settings as aws
from broker.clouds.gcp import settings as gcp
from broker.errors import UsageError
from broker.hosting.cloud_login import choose_login, write_settings
from broker.hosting.record import MachineLogin

OWN = MachineLogin(name="broker-server-me", is_own=True)


def choose(
    cloud: str | None, *, role: str | None = None, buckets: tuple[str, ...] = (), urls: tuple[str | None, ...] = ()
) -> MachineLogin:
    return choose_login(cloud, role=role, buckets=buckets, urls=urls, owner="me")


def test_broker_makes_a_role_on_aws_unless_one_is_named() -> None:
    assert choose("aws") == OWN
    assert choose("aws", role="mine") == MachineLogin(name="mine")
    assert choose("aws", role="none") == MachineLogin()
    assert choose("gcp") == MachineLogin()
    assert choose("gcp", role="server@p.iam.gserviceaccount.com").name == "server@p.iam.gserviceaccount.com"
    assert choose(None) == MachineLogin()


def test_role_may_use_the_buckets_that_the_server_uses() -> None:
    found = choose("aws", buckets=("s3://data/", "runs"), urls=("s3://runs/backups", "gs://other", None, "/mnt/runs"))
    assert found.buckets == ("data", "runs")


@pytest.mark.parametrize(
    ("cloud", "role", "buckets", "told"),
    [
        (None, "mine", (), "require a machine on a cloud"),
        (None, None, ("b",), "require a machine on a cloud"),
        ("gcp", None, ("b",), "requires a role that broker creates"),
        ("aws", "mine", ("b",), "requires a role that broker creates"),
        ("aws", None, ("gs://b",), "invalid bucket `gs://b`"),
        ("aws", None, ("s3://b/path",), "invalid bucket `s3://b/path`"),
    ],
)
def test_options_without_effect_are_refused(
    cloud: str | None, role: str | None, buckets: tuple[str, ...], told: str
) -> None:
    with pytest.raises(UsageError) as caught:
        choose(cloud, role=role, buckets=buckets)
    assert told in caught.value.message


def test_settings_are_read_as_they_were_written(tmp_path: Path) -> None:
    """But for the address of the machine that broker runs on."""
    mine = aws.Settings(
        regions=("us-east-1",), ssh_from=("203.0.113.7/32",), vpcs={"us-east-1": 'vpc-"1"'}, instance_profile="reader",
        bucket_role="arn:aws:iam::1:role/r", uses_private_addresses=True,
    )  # fmt: skip
    (tmp_path / "aws.toml").write_text(write_settings(mine))
    read = aws.load_settings(tmp_path)
    assert read.ssh_from == () and (read.regions, read.vpcs, read.bucket_role) == (
        mine.regions, mine.vpcs, mine.bucket_role
    )  # fmt: skip
    assert read.uses_private_addresses and read.instance_profile == "reader"
    theirs = gcp.Settings(project="vision", images={"gpu": "projects/p/global/images/i"})
    (tmp_path / "gcp.toml").write_text(write_settings(theirs))
    assert gcp.load_settings(tmp_path) == theirs
    assert tomllib.loads(write_settings(aws.Settings())) == {}
