"""Environment and files show whether there is a login, and for which project."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from broker.clock import SystemClock
from broker.clouds.gcp import callers, login
from broker.clouds.gcp.cloud import GcpCloud, make_cloud
from broker.clouds.gcp.login import Login, find_login
from broker.clouds.gcp.sdk import Sdk
from broker.clouds.gcp.settings import Settings, load_settings
from broker.config import Config
from broker.errors import AuthError, InvalidRequestError, TransientError, UsageError
from tests.testbed.ec2_server import AwsServer


def write_gcloud(folder: Path, *, project: str = "", active: str = "default") -> None:
    (folder / "configurations").mkdir(parents=True, exist_ok=True)
    (folder / "active_config").write_text(f"{active}\n")
    (folder / "configurations" / f"config_{active}").write_text(f"[core]\nproject = {project}\n")


def test_nothing_is_found_in_an_empty_account(tmp_path: Path, no_google: None) -> None:
    assert find_login(Settings()) is None
    assert make_cloud(Config(home=tmp_path, owner="me"), clock=SystemClock()) is None


def test_gclouds_own_login_and_project_are_found(no_google: Path) -> None:
    path = no_google / "application_default_credentials.json"
    path.write_text(json.dumps({"type": "authorized_user", "quota_project_id": "billing"}))
    found = find_login(Settings())
    assert found is not None and (found.project, found.source) == ("billing", str(path))
    write_gcloud(no_google, project="vision", active="work")
    found = find_login(Settings())
    assert found is not None and found.project == "vision"


def test_a_service_accounts_file_names_its_project(
    tmp_path: Path, no_google: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key.json"
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
    assert find_login(Settings()) is None  # the variable is set, the file does not exist: google.auth would fail too
    path.write_text(json.dumps({"type": "service_account", "project_id": "from-key"}))
    write_gcloud(no_google, project="from-gcloud")
    found = find_login(Settings())
    assert found is not None and found.project == "from-key"
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "from-environment")
    found = find_login(Settings())
    assert found is not None and found.project == "from-environment"
    found = find_login(Settings(project="from-settings"))
    assert found is not None and found.project == "from-settings"


def test_a_machine_of_googles_has_a_login_of_its_own(
    tmp_path: Path, no_google: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "product_name").write_text("Google Compute Engine\n")
    monkeypatch.setattr(login, "PRODUCT_NAME", tmp_path / "product_name")
    monkeypatch.delenv("NO_GCE_CHECK")
    found = find_login(Settings())
    assert found is not None and found.source == "this machine's service account"
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    assert find_login(Settings()) is None, "google.auth would not ask the machine either"


def test_an_endpoint_stands_for_a_login(tmp_path: Path, no_google: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROKER_GCP_ENDPOINT", "http://127.0.0.1:9")
    assert isinstance(make_cloud(Config(home=tmp_path, owner="me"), clock=SystemClock()), GcpCloud)


def test_looking_for_a_login_imports_nothing_of_googles(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from broker.clock import SystemClock; from broker.config import Config\n"
        "from broker.clouds.gcp.cloud import make_cloud\n"
        f"assert make_cloud(Config(home=Path({str(tmp_path)!r}), owner='me'), clock=SystemClock()) is not None\n"
        "heavy = {'google.cloud.compute_v1', 'google.auth', 'requests', 'grpc'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    environment = {"PATH": "/usr/bin", "BROKER_GCP_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_settings_are_read_and_faults_name_file_and_key(tmp_path: Path) -> None:
    assert load_settings(tmp_path) == Settings()
    path = tmp_path / "gcp.toml"
    path.write_text(
        'project = "vision"\nssh_from = ["10.0.0.0/8"]\nuses_private_addresses = true\n'
        'network = "projects/p/regions/r/subnetworks/s"\n[images]\ngpu = "projects/p/global/images/i"\n'
    )
    found = load_settings(tmp_path)
    assert (found.project, found.ssh_from, found.uses_private_addresses) == ("vision", ("10.0.0.0/8",), True)
    assert found.images == {"gpu": "projects/p/global/images/i"}
    for text, word in [
        ("projekt = 1", "projekt"),
        ("project = 1", "`project` must be a str"),
        ('ssh_from = ["10.0.0.1/8"]', "ssh_from"),
        ('images = {gpu = "x"}', "images.gpu"),
        ('images = {tpu = "projects/p/global/images/i"}', "images.tpu"),
        ("project =", "gcp.toml"),
    ]:
        path.write_text(text)
        with pytest.raises(UsageError) as caught:
            load_settings(tmp_path)
        assert word in caught.value.message and str(path) in caught.value.message


def test_ssh_comes_from_where_the_settings_say_or_from_where_we_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Login(project="p", source="s", settings=Settings(ssh_from=("10.0.0.0/8", "192.0.2.1/32")))
    assert callers.find_callers(here) == ("10.0.0.0/8", "192.0.2.1/32")
    monkeypatch.setattr(callers, "ECHO_URLS", ("http://127.0.0.1:9/",))
    with pytest.raises(TransientError) as caught:
        callers.find_callers(Login(project="p", source="s"))
    assert "ssh_from" in caught.value.hints[0]


@pytest.mark.parametrize("first", ["nowhere", "a login page"])
def test_the_second_service_reports_our_address_if_the_first_does_not(
    monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """A hotel's network answers every request with a page of its own."""
    page = AwsServer(lambda *_: {}, caller_address="<html>log in first</html>")
    echo = AwsServer(lambda *_: {}, caller_address="198.51.100.9")
    login = Login(project="p", source="s")
    try:
        monkeypatch.setattr(callers, "ECHO_URLS", ("http://127.0.0.1:9/" if first == "nowhere" else page.url, echo.url))
        assert callers.find_callers(login) == ("198.51.100.9/32",)
        monkeypatch.setattr(callers, "ECHO_URLS", (page.url,))
        with pytest.raises(TransientError, match="cannot determine"):
            callers.find_callers(login)
    finally:
        page.close()
        echo.close()


def test_private_nodes_need_a_source_of_ssh_and_a_server_of_our_own_needs_none() -> None:
    private = Settings(uses_private_addresses=True)
    with pytest.raises(InvalidRequestError, match="requires `ssh_from`"):
        callers.find_callers(Login(project="p", source="s", settings=private))
    private = Settings(uses_private_addresses=True, ssh_from=("10.0.0.0/8",))
    assert callers.find_callers(Login(project="p", source="s", settings=private)) == ("10.0.0.0/8",)
    for host in ("127.0.0.1", "localhost"):
        near = Login(project="p", source="s", endpoint=f"http://{host}:8080")
        assert callers.find_callers(near) == ("127.0.0.1/32",)


def test_a_refused_login_is_read_again_by_the_next_call() -> None:
    """The library keeps the credentials that it has read, though the user may have logged in again since."""
    from google.auth.exceptions import RefreshError

    sdk, seen = Sdk(Login(project="pretend", source="test", endpoint="http://127.0.0.1:1")), list[object]()

    def refuse(clients: object) -> None:
        seen.append(clients)
        if len(seen) < 3:
            raise RefreshError("invalid_grant: Token has been expired or revoked")

    async def act() -> None:
        for _ in range(2):
            with pytest.raises(AuthError):
                await sdk.call(refuse)
        await sdk.call(refuse)
        await sdk.call(refuse)

    asyncio.run(act())
    assert len({id(each) for each in seen}) == 3 and seen[2] is seen[3]
