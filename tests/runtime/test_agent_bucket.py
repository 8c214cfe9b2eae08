"""The agent signs and sends by itself: compared with Amazon's own library, and refused in words."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from broker.runtime import agent_bucket

LOGIN = {"key": "AKID", "secret": "wJalr", "token": "session"}


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "http://127.0.0.1:9/base/", ""])
def test_signature_is_the_one_that_amazons_library_makes(endpoint: str) -> None:
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    ours = agent_bucket.make_s3_request(
        "bucket", "runs/me job~1/ü+.json", b"content", variables={"AWS_ENDPOINT_URL_S3": endpoint}, login=LOGIN,
        region="eu-west-1",
    )  # fmt: skip
    headers = {name.lower(): value for name, value in ours.header_items()}
    theirs = AWSRequest(method="PUT", url=ours.full_url, data=b"content")
    theirs.context["timestamp"] = headers["x-amz-date"]
    signer = S3SigV4Auth(Credentials("AKID", "wJalr", "session"), "s3", "eu-west-1")
    # The library takes the clock's time; ours is the time that was signed.
    for name in ("host", "x-amz-content-sha256", "x-amz-date", "x-amz-security-token"):
        theirs.headers[name] = headers[name]
    text = signer.string_to_sign(theirs, signer.canonical_request(theirs))
    assert headers["authorization"].endswith(f"Signature={signer.signature(text, theirs)}")
    assert ours.full_url.startswith(endpoint.rstrip("/") or "https://s3.eu-west-1.amazonaws.com/bucket/runs/me%20job~1")


class Metadata:
    """A machine's metadata server and the clouds' storage in one: what came is in `seen`."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, bytes]] = []
        self.codes: list[int] = []
        around = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                around.seen.append((self.command, self.path, body))
                code, text = around.tell(self.path, {k.lower(): v for k, v in self.headers.items()})
                self.send_response(code)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            do_GET = do_PUT = do_POST = answer

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def tell(self, path: str, headers: dict[str, str]) -> tuple[int, str]:
        if path.startswith("/latest/api/token"):
            return 200, "imds"
        if path.startswith("/latest/meta-data/iam"):
            if headers.get("x-aws-ec2-metadata-token") != "imds":
                return 401, ""
            login = '{"AccessKeyId": "ROLE", "SecretAccessKey": "s", "Token": "t"}'
            return 200, "trainer" if path.endswith("/") else login
        if "service-accounts" in path:
            return (200, '{"access_token": "ya29"}') if headers.get("metadata-flavor") == "Google" else (403, "")
        return (self.codes.pop(0) if self.codes else 200), ""

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[Metadata]:
    server = Metadata()
    monkeypatch.setattr(agent_bucket, "METADATA", server.url)
    monkeypatch.setattr(agent_bucket, "PAUSE_S", 0.0)
    yield server
    server.close()


def test_machines_role_signs_where_the_environment_has_no_keys(metadata: Metadata) -> None:
    metadata.codes = [503]
    agent_bucket.put("s3://b/k", b"{}", {"AWS_ENDPOINT_URL": metadata.url})
    assert metadata.seen[-2:] == [("PUT", "/b/k", b"{}")] * 2, "an overloaded service is asked again"
    assert agent_bucket.find_login({})["key"] == "ROLE"


def test_googles_bucket_is_written_as_the_machines_account(metadata: Metadata) -> None:
    agent_bucket.put("gs://b/a/k", b"{}", {"STORAGE_EMULATOR_HOST": metadata.url})
    assert metadata.seen[-1] == ("POST", "/upload/storage/v1/b/b/o?uploadType=media&name=a%2Fk", b"{}")


def test_refusal_is_told_in_a_line(metadata: Metadata) -> None:
    metadata.codes = [403]
    with pytest.raises(agent_bucket.Refused, match="s3://b/k: HTTP 403"):
        agent_bucket.put("s3://b/k", b"{}", {"AWS_ENDPOINT_URL": metadata.url})
    metadata.close()
    with pytest.raises(agent_bucket.Refused, match="no login for S3"):
        agent_bucket.put("s3://b/k", b"{}", {})
    with pytest.raises(agent_bucket.Refused, match="no login for gs://"):
        agent_bucket.put("gs://b/k", b"{}", {})
    with pytest.raises(agent_bucket.Refused, match="az://"):
        agent_bucket.put("az://b/k", b"{}", {})
