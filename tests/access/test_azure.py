"""Access to Azure's containers: signatures equal to those of Azure's own library, enforced by a Blob service on the
wire."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Iterator
from datetime import datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import parse_qs

import pytest

from broker.access import azure
from broker.access.base import Need
from broker.access.granting import Grants
from broker.access.needs import list_needs
from broker.agent import agent_bucket
from broker.clock import SystemClock
from broker.config import Config
from broker.errors import AuthError, InvalidRequestError, TransientError
from broker.types import Secret, StorageMount
from tests.access.plans import make_task, plan_on
from tests.testbed import objects
from tests.testbed.objects import AZURE_ACCOUNT, AZURE_KEY, BUCKET, Objects, serve_azure

PLACE = f"az://{BUCKET}/runs"
# azure-storage-blob 12.14.1: generate_container_sas("account", "testbed", account_key=AZURE_KEY, permission="racwdl",
# start=2026-01-01, expiry=2026-01-09)
THEIRS = "/hWxmCKX3g3NZYkhb/8mt8zkqZV3A0bie72+dSmckyU="


@pytest.fixture
def service(config: Config, monkeypatch: pytest.MonkeyPatch) -> Iterator[Objects]:
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", AZURE_ACCOUNT)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", AZURE_KEY)
    # The fake accepts only one signature; ours are compared with Azure's below.
    known = parse_qs(objects.AZURE_SIGNATURE)["sig"][0]
    monkeypatch.setattr(azure.base64, "b64encode", lambda digest: known.encode())
    with serve_azure() as (served, variables):
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", variables["AZURE_STORAGE_ENDPOINT"])
        yield served


def test_signature_equals_that_of_azures_library() -> None:
    token = azure.make_signature(
        AZURE_ACCOUNT, AZURE_KEY, BUCKET, permissions="racwdl", start_s=1767225600.0, end_s=1767916800.0
    )
    fields = {name: values[0] for name, values in parse_qs(token).items()}
    assert fields.pop("sig") == THEIRS
    assert fields == {
        "sv": "2021-08-06", "sr": "c", "sp": "racwdl", "st": "2026-01-01T00:00:00Z", "se": "2026-01-09T00:00:00Z",
    }  # fmt: skip


def test_nodes_get_a_signature_and_not_the_key(config: Config, service: Objects, tmp_path: Path) -> None:
    (sentence,) = Grants(config, clock=SystemClock()).check([plan_on(make_task(PLACE), "aws")])
    assert "a signature for the container `testbed` of `account`, for 8 days at a time" in sentence
    assert not service.content and not service.forbidden_count
    grant = azure.make_granter(config, clock=SystemClock()).issue(list_needs(make_task(PLACE), "0wner"))
    shown = {**grant.envs, **{name: secret.value for name, secret in grant.secrets.items()}}
    assert AZURE_KEY not in str(shown) and "sig=" not in repr(grant)
    agent_bucket.put(f"{PLACE}/0wner-job/outcomes/1.json", b"{}", shown)
    assert service.content == {"runs/0wner-job/outcomes/1.json": b"{}"}


@pytest.mark.parametrize(("is_read_only", "permissions"), [(False, "racwdl"), (True, "rl")])
def test_signature_begins_before_now_and_permits_no_more_than_the_task_needs(
    config: Config, service: Objects, is_read_only: bool, permissions: str
) -> None:
    """A service whose clock is slow would refuse one that begins now."""
    need = Need(scheme="az", bucket=BUCKET, path="data", is_read_only=is_read_only)
    clock = SystemClock()
    grant = azure.make_granter(config, clock=clock).issue([need])
    fields = {name: values[0] for name, values in parse_qs(grant.secrets["AZURE_STORAGE_SAS_TOKEN"].value).items()}
    assert fields["sp"] == permissions
    begin_s = datetime.fromisoformat(fields["st"].replace("Z", "+00:00")).timestamp()
    assert begin_s < clock.now_s() - 600.0 < grant.issued_s < grant.expires_s


def test_login_without_a_key_and_several_containers_are_refused_with_remedies(
    config: Config, service: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = (StorageMount(target="/d", source=("az://another/data",), mode="COPY"),)
    with pytest.raises(InvalidRequestError, match="2 containers"):
        Grants(config, clock=SystemClock()).check([plan_on(make_task(PLACE, storage_mounts=mounts), "aws")])
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    with pytest.raises(AuthError, match="no storage account key") as refused:
        Grants(config, clock=SystemClock()).check([plan_on(make_task(PLACE), "aws")])
    assert "AZURE_STORAGE_ACCOUNT_KEY" in refused.value.hints[0]
    own = make_task(PLACE, secrets={"AZURE_STORAGE_SAS_TOKEN": Secret(value="x")})
    assert Grants(config, clock=SystemClock()).check([plan_on(own, "aws")]) == []


@pytest.mark.parametrize(
    "endpoint", ["account.blob.core.windows.net", "ftp://account.example", "https://", "https://a b"]
)
def test_endpoint_that_is_no_url_is_named_and_no_signature_is_in_the_error(
    config: Config, service: Objects, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    """urllib's own error quotes the whole URL, which would put the signature into a terminal or a server's log."""
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", endpoint)
    with pytest.raises(InvalidRequestError, match="AZURE_STORAGE_ENDPOINT is not a URL"):
        Grants(config, clock=SystemClock()).check([plan_on(make_task(PLACE), "aws")])


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/c?sig=CANARY", "nowhere/c?sig=CANARY", "http://[::1/c?sig=CANARY"])
def test_errors_of_a_request_never_show_its_signature(url: str) -> None:
    with pytest.raises(TransientError) as failed:
        azure._send_request("GET", url, Need(scheme="az", bucket="c"))
    assert "CANARY" not in "".join(traceback.format_exception(failed.value))


def test_redirects_with_a_login_are_refused(service: Objects) -> None:
    class Redirecting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(302)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    asked: list[str] = []
    with HTTPServer(("127.0.0.1", 0), Redirecting) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        with pytest.raises(TransientError, match="HTTP 302"):
            azure._send_request(
                "GET", f"http://127.0.0.1:{server.server_port}/c?sig=CANARY", Need(scheme="az", bucket="c")
            )
    assert asked == ["/c?sig=CANARY"]
