"""Local files into buckets: created if missing, sent once, and again only if changed."""

from __future__ import annotations

import os
import urllib.request
import uuid
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from broker.errors import AuthError, InvalidRequestError
from broker.storage import open_bucket, s3, upload
from broker.storage.r2 import find_login
from broker.storage.upload import ensure_bucket, send_files
from tests.testbed.s3 import S3Server, serve_s3


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with serve_s3() as server:
        yield server


@pytest.fixture(params=["s3", "r2"])
def url(request: pytest.FixtureRequest, server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket that does not exist yet. R2 is moto's server too, reached through R2's variables alone."""
    keys = {"R2_ACCESS_KEY_ID": "key", "R2_SECRET_ACCESS_KEY": "secret", "R2_ENDPOINT_URL": server.url}
    for name, value in (server.variables if request.param == "s3" else keys).items():
        monkeypatch.setenv(name, value)
    return f"{request.param}://made-{uuid.uuid4().hex}"


def test_files_are_sent_once_and_those_that_changed_again(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # S3 has whole seconds: a file as new as that is sent again. The time of the inode cannot be set.
    monkeypatch.setattr(upload, "find_change_s", lambda file: file.stat().st_mtime)
    files = {"a": tmp_path / "a", "deep/b": tmp_path / "b"}
    for name, file in files.items():
        file.write_text(name)
        os.utime(file, (1e9, 1e9))
    progress: list[tuple[int, int]] = []
    first = send_files(url, files, on_sent=lambda sent, total: progress.append((sent, total)))
    assert progress in ([(1, 7), (7, 7)], [(6, 7), (7, 7)]), "bytes sent and in total, after each file"
    assert (first.files, first.sent_files, first.sent_bytes, first.is_new_bucket) == (2, 2, 7, True)
    again = send_files(url, files)
    assert (again.sent_files, again.is_new_bucket) == (0, False)
    files["a"].write_text("A")  # of the same length, and newer
    future_s = files["a"].stat().st_mtime + 60
    os.utime(files["a"], (future_s, future_s))
    assert send_files(url, files).sent_files == 1
    assert (open_bucket(url).read("a"), open_bucket(url).read("deep/b")) == (b"A", b"deep/b")


def test_existing_bucket_is_left_unchanged(url: str) -> None:
    assert [ensure_bucket(url), ensure_bucket(url)] == [True, False]
    assert open_bucket(url).list_keys() == []


@pytest.mark.parametrize(
    ("code", "error"),
    [("BucketAlreadyOwnedByYou", None), ("BucketAlreadyExists", InvalidRequestError), ("AccessDenied", AuthError)],
)
def test_bucket_of_another_account_is_not_taken_for_the_own_one(
    code: str, error: type[Exception] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import boto3
    from botocore.exceptions import ClientError

    class Client:
        def create_bucket(self, **request: object) -> None:
            raise ClientError({"Error": {"Code": code}}, "CreateBucket")

    monkeypatch.setattr(boto3.Session, "client", lambda self, service, **options: Client())
    if error is None:
        return s3.create_bucket("taken")
    with pytest.raises(error, match=f"cannot create bucket `taken`: {code}"):
        s3.create_bucket("taken")


def test_region_of_a_bucket_is_read_even_from_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 answers anonymous requests to a private bucket with 403, and names the region in the same header."""
    headers = Message()
    headers["x-amz-bucket-region"] = "eu-central-1"
    refusal = HTTPError("https://b", 403, "Forbidden", headers, None)
    answers: list[Any] = [refusal, OSError("no route"), refusal]

    def urlopen(request: Any, timeout: float) -> Any:
        assert request.full_url == "https://b.s3.amazonaws.com/" and request.get_method() == "HEAD"
        raise answers.pop(0)

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    assert s3.find_options("b", {"AWS_ACCESS_KEY_ID": "key"}) == {"region": "eu-central-1"}
    assert s3.find_options("b", {"AWS_ACCESS_KEY_ID": "key"}) == {}
    other = {"AWS_ACCESS_KEY_ID": "key", "AWS_REGION": "us-west-2"}
    assert s3.find_options("b", other) == {"region": "eu-central-1"}, "which other work may use"


def test_bucket_elsewhere_is_made_by_hand_with_the_command_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from broker.storage import upload

    class Missing:
        def read(self, key: str) -> bytes:
            raise InvalidRequestError("NoSuchBucket")

    monkeypatch.setattr(upload, "open_bucket", lambda url: Missing())
    with pytest.raises(InvalidRequestError, match="bucket `gs://b` does not exist") as caught:
        ensure_bucket("gs://b/x")
    assert "gcloud storage buckets create gs://b" in caught.value.hints[0]


def test_r2_login_comes_from_variables_then_from_skypilots_files(tmp_path: Path) -> None:
    with pytest.raises(AuthError, match="no login for r2://"):
        find_login({}, tmp_path)
    (tmp_path / "accountid").write_text("acc\n")
    (tmp_path / "r2.credentials").write_text("[r2]\naws_access_key_id = k\naws_secret_access_key = s\n")
    expected = {"endpoint": "https://acc.r2.cloudflarestorage.com", "access_key_id": "k", "secret_access_key": "s"}
    assert find_login({}, tmp_path) == expected
    assert find_login({"R2_ACCOUNT_ID": "other"}, tmp_path)["endpoint"] == "https://other.r2.cloudflarestorage.com"


class Interfering:
    """A bucket that keeps what is uploaded, while a program writes to the file during the first `writes` uploads."""

    def __init__(self, writes: int) -> None:
        self.writes, self.kept = writes, dict[str, bytes]()

    def upload(self, file: Path, key: str) -> None:
        content = file.read_bytes()
        self.kept[key] = content
        if self.writes:
            self.writes -= 1
            stamp_ns = file.stat().st_mtime_ns + 1_000_000
            file.write_bytes(content[::-1])  # of the same size
            os.utime(file, ns=(stamp_ns, stamp_ns))

    def delete(self, key: str) -> None:
        del self.kept[key]


def test_file_that_changes_while_it_is_sent_is_sent_again(tmp_path: Path) -> None:
    (file := tmp_path / "data").write_text("one and two")
    bucket: Any = Interfering(writes=1)
    assert upload._send(bucket, "data", file) == 11
    assert bucket.kept["data"] == file.read_bytes() == b"owt dna eno"


def test_file_that_never_stops_changing_is_refused_and_leaves_no_mixture(tmp_path: Path) -> None:
    (file := tmp_path / "data").write_text("one and two")
    bucket: Any = Interfering(writes=1000)
    with pytest.raises(InvalidRequestError, match="changed during each of 3 uploads"):
        upload._send(bucket, "data", file)
    assert bucket.kept == {}
