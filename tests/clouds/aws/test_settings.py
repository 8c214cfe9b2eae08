"""`aws.toml` is parsed strictly, and the cloud exists exactly if there may be a login."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from broker.clock import SystemClock
from broker.clouds.aws import cloud
from broker.clouds.aws.cloud import LOGIN_FILES, LOGIN_VARIABLES, AwsCloud, make_cloud
from broker.clouds.aws.settings import Settings, load_settings
from broker.config import Config
from broker.errors import UsageError


def test_without_a_file_all_is_left_to_the_account(tmp_path: Path) -> None:
    assert load_settings(tmp_path) == Settings()


def test_every_documented_key_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "aws.toml").write_text(
        """
        regions = ["us-east-1", "eu-central-1"]
        ssh_from = ["203.0.113.0/24", "2001:db8::/32"]
        user = "ec2-user"
        instance_profile = "reader"
        uses_private_addresses = true
        address_url = "http://127.0.0.1/"
        vpcs = {us-east-1 = "vpc-1"}
        images = {us-east-1 = "ami-1"}
        """
    )
    assert load_settings(tmp_path) == Settings(
        regions=("us-east-1", "eu-central-1"),
        ssh_from=("203.0.113.0/24", "2001:db8::/32"),
        user="ec2-user",
        instance_profile="reader",
        uses_private_addresses=True,
        address_url="http://127.0.0.1/",
        vpcs={"us-east-1": "vpc-1"},
        images={"us-east-1": "ami-1"},
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('region = "us-east-1"', "unknown setting `region`"),
        ('regions = "us-east-1"', "`regions` must be a list"),
        ("regions = [1]", "`regions` must contain strings"),
        ('vpcs = ["vpc-1"]', "`vpcs` must be a table"),
        ("user = 1", "`user` must be a string"),
        ('uses_private_addresses = "yes"', "`uses_private_addresses` must be `true` or `false`"),
        ('ssh_from = ["everybody"]', "`ssh_from`: 'everybody' does not appear to be an IPv4 or IPv6 network"),
        ('ssh_from = ["10.0.0.1/8"]', "`ssh_from`: 10.0.0.1/8 has host bits set"),
        ("regions = [", "aws.toml: "),
    ],
)
def test_error_names_file_and_key(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "aws.toml").write_text(text)
    with pytest.raises(UsageError) as caught:
        load_settings(tmp_path)
    assert told in caught.value.message and str(tmp_path / "aws.toml") in caught.value.message


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder without any login."""
    for variable in (*LOGIN_VARIABLES, *LOGIN_FILES):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED", raising=False)
    monkeypatch.setattr(cloud, "VENDOR", tmp_path / "vendor")
    monkeypatch.setattr(cloud, "XEN_UUID", tmp_path / "uuid")
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def make(home: Path) -> AwsCloud | None:
    return make_cloud(Config(home=home, owner="o"), clock=SystemClock())


def test_missing_login_disables_the_cloud(bare: Path) -> None:
    assert make(bare) is None


@pytest.mark.parametrize("variable", LOGIN_VARIABLES)
def test_credentials_in_variables_are_a_login(bare: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "x")
    assert isinstance(make(bare), AwsCloud)


@pytest.mark.parametrize("path", LOGIN_FILES.values())
def test_credentials_in_a_file_are_a_login(bare: Path, path: str) -> None:
    (bare / path).parent.mkdir()
    (bare / path).touch()
    assert isinstance(make(bare), AwsCloud)


@pytest.mark.parametrize(
    ("file", "text", "is_enough"),
    [
        ("vendor", "Amazon EC2\n", True),
        ("uuid", "ec2a7c11-2f4c-11e9-b210-d663bd873d93\n", True),
        ("vendor", "Google\n", False),
        ("uuid", "45e12aec-2f4c-11e9-b210-d663bd873d93\n", False),
    ],
)
def test_machine_of_ec2_is_enough(bare: Path, file: str, text: str, *, is_enough: bool) -> None:
    """Its instance profile, if it has one, is a login without files or variables."""
    (bare / file).write_text(text)
    assert (make(bare) is not None) is is_enough


def test_metadata_service_may_be_switched_off(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bare / "vendor").write_text("Amazon EC2\n")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert make(bare) is None


def test_file_elsewhere_is_enough_where_a_variable_names_it(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CONFIG_FILE", str(bare / "mine"))
    assert make(bare) is None
    (bare / "mine").touch()
    assert isinstance(make(bare), AwsCloud)


def test_cloud_is_made_without_the_sdk(bare: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from broker.clock import SystemClock; from broker.config import Config;"
        "from broker.clouds.aws.cloud import make_cloud;"
        "assert make_cloud(Config(home=Path('/nowhere'), owner='o'), clock=SystemClock());"
        "print([name for name in ('boto3', 'botocore', 'urllib3', 'http.client') if name in sys.modules])"
    )
    environment = {"AWS_PROFILE": "x", "PYTHONPATH": str(Path(__file__).parents[3]), "HOME": str(bare)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert (done.stdout, done.stderr) == ("[]\n", "")
