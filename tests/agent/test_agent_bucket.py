"""The agent signs and sends without a library, as Amazon's own does and by Azure's rules; refusals are explained."""

from __future__ import annotations

import base64
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from broker.agent import agent_bucket, agent_login
from tests.testbed.objects import AZURE_KEY, AZURE_SIGNATURE, AZURE_TOKEN, BUCKET, Objects, serve_azure

LOGIN = {"key": "AKID", "secret": "wJalr", "token": "session"}


@pytest.mark.parametrize("content", [b"content", None], ids=["PUT", "GET"])
@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "http://127.0.0.1:9/base/", ""])
def test_signature_equals_that_of_amazons_library(endpoint: str, content: bytes | None) -> None:
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    ours = agent_bucket.make_s3_request(
        "bucket", "runs/me job~1/ü+.json", content, variables={"AWS_ENDPOINT_URL_S3": endpoint}, login=LOGIN,
        region="eu-west-1",
    )  # fmt: skip
    verb = "GET" if content is None else "PUT"
    assert ours.get_method() == verb
    headers = {name.lower(): value for name, value in ours.header_items()}
    theirs = AWSRequest(method=verb, url=ours.full_url, data=content or b"")
    theirs.context["timestamp"] = headers["x-amz-date"]
    signer = S3SigV4Auth(Credentials("AKID", "wJalr", "session"), "s3", "eu-west-1")
    # The library uses the clock's time; ours is the time that was signed.
    for name in ("host", "x-amz-content-sha256", "x-amz-date", "x-amz-security-token"):
        theirs.headers[name] = headers[name]
    text = signer.string_to_sign(theirs, signer.canonical_request(theirs))
    assert headers["authorization"].endswith(f"Signature={signer.signature(text, theirs)}")
    assert ours.full_url.startswith(endpoint.rstrip("/") or "https://s3.eu-west-1.amazonaws.com/bucket/runs/me%20job~1")


class Metadata:
    """A machine's metadata server and the clouds' storage in one; requests are in `seen`."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, bytes]] = []
        self.codes: list[int] = []
        self.redirect = ""
        around = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                around.seen.append((self.command, self.path, body))
                code, text = around.respond(self.path, {k.lower(): v for k, v in self.headers.items()})
                self.send_response(code)
                self.send_header("Content-Length", str(len(text)))
                if around.redirect:
                    self.send_header("Location", around.redirect)
                self.end_headers()
                self.wfile.write(text.encode())

            do_GET = do_PUT = do_POST = answer

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def respond(self, path: str, headers: dict[str, str]) -> tuple[int, str]:
        if path.startswith("/latest/api/token"):
            return 200, "imds"
        if path.startswith("/latest/meta-data/iam"):
            if headers.get("x-aws-ec2-metadata-token") != "imds":
                return 401, ""
            login = '{"AccessKeyId": "ROLE", "SecretAccessKey": "s", "Token": "t"}'
            return 200, "trainer" if path.endswith("/") else login
        if "service-accounts" in path:
            return (200, '{"access_token": "ya29"}') if headers.get("metadata-flavor") == "Google" else (403, "")
        if path.startswith("/metadata/identity"):
            asked = parse_qs(urlsplit(path).query)
            is_storage = asked["resource"] == ["https://storage.azure.com/"] and headers.get("metadata") == "true"
            return (200, json.dumps({"access_token": AZURE_TOKEN})) if is_storage else (400, "")
        return (self.codes.pop(0) if self.codes else 200), ""

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[Metadata]:
    server = Metadata()
    monkeypatch.setattr(agent_login, "METADATA", server.url)
    monkeypatch.setenv("HOME", "/nowhere")  # hides the logins of the user who runs the tests
    monkeypatch.setattr(agent_bucket, "PAUSE_S", 0.0)
    yield server
    server.close()


def test_machines_role_signs_where_the_environment_has_no_keys(metadata: Metadata) -> None:
    metadata.codes = [503]
    agent_bucket.put("s3://b/k", b"{}", {"AWS_ENDPOINT_URL": metadata.url})
    assert metadata.seen[-2:] == [("PUT", "/b/k", b"{}")] * 2, "an overloaded service is asked again"
    assert agent_login.find_s3_login({})["key"] == "ROLE"


def test_googles_bucket_is_written_as_the_machines_account(metadata: Metadata) -> None:
    agent_bucket.put("gs://b/a/k", b"{}", {"STORAGE_EMULATOR_HOST": metadata.url})
    assert metadata.seen[-1] == ("POST", "/upload/storage/v1/b/b/o?uploadType=media&name=a%2Fk", b"{}")


@pytest.mark.parametrize(
    ("url", "path"), [("s3://b/a/k", "/b/a/k"), ("gs://b/a/k", "/storage/v1/b/b/o/a%2Fk?alt=media")]
)
def test_object_is_read_and_a_missing_one_is_none(metadata: Metadata, url: str, path: str) -> None:
    variables = {"AWS_ENDPOINT_URL": metadata.url, "STORAGE_EMULATOR_HOST": metadata.url}
    metadata.codes = [503]
    assert agent_bucket.get(url, variables) == b"", "an overloaded service is asked again"
    assert metadata.seen[-2:] == [("GET", path, b"")] * 2
    metadata.codes = [404]
    assert agent_bucket.get(url, variables) is None
    metadata.codes = [403]
    with pytest.raises(agent_login.Refused, match="HTTP 403"):
        agent_bucket.get(url, variables)


@pytest.mark.parametrize("url", ["s3://b/k", "gs://b/k"])
def test_redirect_takes_no_login_to_another_server(metadata: Metadata, url: str) -> None:
    other = Metadata()
    variables = {
        "AWS_ENDPOINT_URL": metadata.url, "STORAGE_EMULATOR_HOST": metadata.url, "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "s", "AWS_REGION": "us-east-1",
    }  # fmt: skip
    metadata.redirect = other.url
    metadata.codes = [307]
    with pytest.raises(agent_login.Refused, match="HTTP 307"):
        agent_bucket.get(url, variables)
    with pytest.raises(urllib.error.HTTPError):
        metadata.codes = [302]
        agent_login.fetch_metadata(
            urllib.request.Request(f"{metadata.url}/x", headers={"X-aws-ec2-metadata-token": "imds"})
        )
    assert other.seen == []
    other.close()


@pytest.fixture(scope="module")
def azure() -> Iterator[tuple[Objects, dict[str, str]]]:
    """The server accepts what obstore signs (tests/trainers/test_buckets.py), and nothing that is not signed."""
    with serve_azure() as served:
        yield served


@pytest.mark.parametrize("login", ["key", "signature", "identity"])
def test_azure_container_is_written_with_each_kind_of_login(
    azure: tuple[Objects, dict[str, str]], metadata: Metadata, login: str
) -> None:
    objects, variables = azure
    if login != "key":
        variables = {name: value for name, value in variables.items() if name != "AZURE_STORAGE_ACCOUNT_KEY"}
    if login == "signature":
        variables["AZURE_STORAGE_SAS_TOKEN"] = f"?{AZURE_SIGNATURE}"
    name = f"runs/me job~1/ü+({login}).json"
    for content in (b"{}", b'{"status": "SUCCEEDED"}', b""):
        agent_bucket.put(f"az://{BUCKET}/{name}", content, variables)
        assert objects.content[name] == content, "whatever was there before"
    objects.content[name] = bytes(range(256)) * 100
    assert agent_bucket.get(f"az://{BUCKET}/{name}", variables) == objects.content[name]
    assert agent_bucket.get(f"az://{BUCKET}/none", variables) is None
    asked = [path for _, path, _ in metadata.seen if "/metadata/identity" in path]
    assert len(asked) == (5 if login == "identity" else 0)


@pytest.mark.parametrize(
    "changed",
    [
        {"AZURE_STORAGE_ACCOUNT_KEY": base64.b64encode(b"another key").decode()},
        {"AZURE_STORAGE_ACCOUNT_NAME": "another"},
        {"AZURE_STORAGE_ACCOUNT_KEY": "", "AZURE_STORAGE_SAS_TOKEN": "sig=forged"},
    ],
    ids=["key", "account", "signature"],
)
def test_azure_refuses_a_wrong_signature(azure: tuple[Objects, dict[str, str]], changed: dict[str, str]) -> None:
    objects, variables = azure
    before = dict(objects.content)
    with pytest.raises(agent_login.Refused, match="HTTP 403"):
        agent_bucket.put(f"az://{BUCKET}/forged.json", b"{}", variables | changed)
    assert objects.content == before


def test_azures_own_address_is_the_accounts() -> None:
    login = {"AZURE_STORAGE_ACCOUNT_NAME": "acme", "AZURE_STORAGE_ACCESS_KEY": AZURE_KEY}
    request = agent_bucket.make_azure_request("c", "a/b.json", b"{}", login)
    assert request.full_url == "https://acme.blob.core.windows.net/c/a/b.json"


@pytest.mark.parametrize(
    ("region", "named", "expected"),
    [
        ("eu-central-1", {}, "eu-central-1"),
        ("eu-central-1", {"AWS_REGION": "us-west-2"}, "eu-central-1"),
        (None, {"AWS_DEFAULT_REGION": "us-west-2"}, "us-west-2"),
        (None, {}, "us-east-1"),
        (None, {"AWS_REGION": "eu-north1", "AWS_ENDPOINT_URL": "https://storage.example"}, "eu-north1"),
    ],
)
def test_the_region_of_a_bucket_is_read_from_any_answer_of_s3(
    region: str | None, named: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = Message()
    if region:
        headers["x-amz-bucket-region"] = region

    def refuse(request: urllib.request.Request, timeout: float) -> None:
        raise urllib.error.HTTPError(request.full_url, 403, "Forbidden", headers, None)

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    assert agent_bucket.find_region("b", named) == expected


@pytest.mark.parametrize(
    ("named", "asked", "host"),
    [
        ("eu-central-1", "s3.amazonaws.com", "s3.eu-central-1.amazonaws.com"),
        ("cn-north-1", "s3.cn-north-1.amazonaws.com.cn", "s3.cn-north-1.amazonaws.com.cn"),
        ("us-gov-west-1", "s3.us-gov-west-1.amazonaws.com", "s3.us-gov-west-1.amazonaws.com"),
    ],
)
def test_a_bucket_of_the_same_name_in_the_public_partition_is_not_asked(
    named: str, asked: str, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = []

    def refuse(request: urllib.request.Request, timeout: float) -> None:
        urls.append(request.full_url)
        raise urllib.error.HTTPError(request.full_url, 404, "Not Found", Message(), None)

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    region = agent_bucket.find_region("b", {"AWS_REGION": named})
    assert (region, urls) == (named, [f"https://{asked}/b"])
    login = {"key": "k", "secret": "s"}
    request = agent_bucket.make_s3_request("b", "k", None, variables={}, login=login, region=region)
    assert request.full_url == f"https://{host}/b/k"


def test_refusal_is_reported_in_one_line(metadata: Metadata) -> None:
    metadata.codes = [403]
    with pytest.raises(agent_login.Refused, match="s3://b/k: HTTP 403"):
        agent_bucket.put("s3://b/k", b"{}", {"AWS_ENDPOINT_URL": metadata.url})
    metadata.close()
    with pytest.raises(agent_login.Refused, match="no login for S3"):
        agent_bucket.put("s3://b/k", b"{}", {})
    with pytest.raises(agent_login.Refused, match="no login for gs://"):
        agent_bucket.put("gs://b/k", b"{}", {})
    with pytest.raises(agent_login.Refused, match="AZURE_STORAGE_ACCOUNT_NAME is not set"):
        agent_bucket.put("az://b/k", b"{}", {})
    with pytest.raises(agent_login.Refused, match="no login for az://"):
        agent_bucket.put("az://b/k", b"{}", {"AZURE_STORAGE_ACCOUNT_NAME": "a"})
    with pytest.raises(agent_login.Refused, match="not base64"):
        agent_bucket.put("az://b/k", b"{}", {"AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_STORAGE_ACCOUNT_KEY": "k"})
    with pytest.raises(agent_login.Refused, match="r2://"):
        agent_bucket.put("r2://b/k", b"{}", {})


# -- logs ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_bucket, "LOG_BYTES_MAX", 100)
    monkeypatch.setattr(agent_bucket, "LOG_HEAD_BYTES", 30)


def test_long_log_keeps_head_and_tail_and_names_the_omitted_part(tmp_path: Path, small: None) -> None:
    path = tmp_path / "log"
    assert agent_bucket.read_bounded(path) == b""
    path.write_bytes(bytes(range(100)))
    assert agent_bucket.read_bounded(path) == bytes(range(100))
    path.write_bytes(b"h" * 30 + b"c" * 45 + b"t" * 70)
    found = agent_bucket.read_bounded(path)
    assert found == b"h" * 30 + b"[broker: 45 bytes of the log were cut here]\n" + b"t" * 70


def test_first_megabytes_of_a_long_log_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.write(b"the command\n")
        file.seek(8 << 20)
        file.write(b"the configuration\n")
        file.truncate(100 << 20)
    found = agent_bucket.read_bounded(path)
    assert found.startswith(b"the command\n") and b"the configuration\n" in found
    assert len(found) <= (64 << 20) + 100


def test_log_whose_omitted_part_is_not_named_is_read_all_the_same(small: None) -> None:
    content = b"h" * 30 + b"a damaged note\n" + b"t" * 70
    assert agent_bucket.find_rest(content, 0) == (content, 100)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.integers(0, 400), offset=st.integers(0, 400))
def test_reader_continues_where_it_was_without_gap_or_repeat(
    tmp_path: Path, small: None, size: int, offset: int
) -> None:
    log = bytes(97 + index % 23 for index in range(size))
    (tmp_path / "log").write_bytes(log)
    rest, length = agent_bucket.find_rest(agent_bucket.read_bounded(tmp_path / "log"), offset)
    assert length == max(size, offset)
    cut = size - 100
    if cut <= 0 or offset >= 30 + cut:
        assert rest == log[offset:]
    else:
        note = f"[broker: {cut} bytes of the log were cut here]\n".encode()
        assert rest == log[offset:30] + note + log[30 + cut :]
    assert agent_bucket.find_rest(agent_bucket.read_bounded(tmp_path / "log"), length) == (b"", length)


def test_log_has_a_text_content_type_in_the_bucket(metadata: Metadata) -> None:
    for key, kind in (("a/logs/1.log", "text/plain; charset=utf-8"), ("a/outcomes/1.json", "application/json")):
        login = {"key": "k", "secret": "s", "token": ""}
        ours = agent_bucket.make_s3_request("b", key, b"", variables={}, login=login, region="r")
        assert ours.get_header("Content-type") == kind
