"""One contract for every bucket: folder, S3 (moto's, on the loopback), and the library's own in memory."""

from __future__ import annotations

import os
import threading
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from broker.environment import read_aws_environment
from broker.errors import AuthError, InvalidRequestError
from broker.storage import BUCKETS, node_objects, open_bucket, s3, upload
from broker.storage.base import Bucket
from broker.storage.folder import FolderBucket
from broker.storage.objects import ERRORS, ObjectBucket
from tests.testbed.s3 import BUCKET, LateAnswer, S3Server, put_marker, serve_s3
from trainers import buckets


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with serve_s3() as server:
        yield server


def open_memory() -> Bucket:
    from obstore.store import MemoryStore

    return ObjectBucket(MemoryStore(), "memory://", login="log in")


@pytest.fixture(params=["file", "s3", "memory"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path, server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    if request.param == "memory":
        return open_memory()
    place = {"file": f"file://{tmp_path}/deep/bucket", "s3": f"s3://{BUCKET}/{uuid.uuid4().hex}"}[request.param]
    return open_bucket(place)


def test_written_objects_are_read_listed_and_deleted(bucket: Bucket) -> None:
    assert bucket.list_keys() == [] and bucket.read("a") is None
    bucket.write("a/b", b"one")
    bucket.write("a/b", b"three")
    bucket.write("a/c/d", b"")
    bucket.write("ab", b"x")
    assert bucket.read("a/b") == b"three"
    assert [(each.key, each.size_bytes) for each in bucket.list_keys()] == [("a/b", 5), ("a/c/d", 0), ("ab", 1)]
    assert [each.key for each in bucket.list_keys("a")] == ["a/b", "a/c/d"]
    assert [each.key for each in bucket.list_keys("a/b")] == ["a/b"]
    assert bucket.list_keys("none") == []
    bucket.delete("a/b")
    bucket.delete("a/b")
    assert [each.key for each in bucket.list_keys()] == ["a/c/d", "ab"]


def test_key_with_an_empty_part_is_refused_with_the_way_out(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    prefix = uuid.uuid4().hex
    put_marker(server, f"{prefix}//raw")
    bucket = open_bucket(f"s3://{BUCKET}/{prefix}")
    for call in (bucket.list_keys, lambda: bucket.read("a//b"), lambda: bucket.write("a//b", b"")):
        with pytest.raises(InvalidRequestError, match="empty path segment") as caught:
            call()
        assert "keys with `//`" in caught.value.hints[0]


def test_empty_objects_by_which_a_console_marks_folders_are_no_keys(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    prefix = uuid.uuid4().hex
    bucket = open_bucket(f"s3://{BUCKET}/{prefix}")
    bucket.write("deep/b", b"")
    for name in ("", "deep/"):
        put_marker(server, f"{prefix}/{name}")
    assert [each.key for each in bucket.list_keys()] == ["deep/b"]
    assert [each.key for each in open_bucket(f"s3://{BUCKET}").list_keys(prefix)] == [f"{prefix}/deep/b"]


def test_of_many_writers_at_once_one_is_first(bucket: Bucket) -> None:
    heard: dict[int, bool] = {}

    def write(number: int) -> None:
        heard[number] = bucket.write_if_absent("lock/1", str(number).encode())

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    winners = [number for number, is_first in heard.items() if is_first]
    assert len(heard) == 8 and len(winners) == 1
    assert bucket.read("lock/1") == str(winners[0]).encode()
    assert [each.key for each in bucket.list_keys()] == ["lock/1"]


def test_conditional_write_whose_answer_does_not_arrive_in_time_is_ours(server: S3Server) -> None:
    answer = LateAnswer(server, "late")
    bucket = ObjectBucket(answer.open_store(server), f"s3://{BUCKET}", login="")
    try:
        assert bucket.write_if_absent("late", b"ours") and answer.held == 1
        assert not bucket.write_if_absent("late", b"ours"), "the second call did not create it"
        assert bucket.read("late") == b"ours"
    finally:
        answer.release()


def test_files_go_up_and_come_down_whole(bucket: Bucket, tmp_path: Path) -> None:
    content = bytes(range(256)) * 40_000
    (tmp_path / "source").write_bytes(content)
    bucket.upload(tmp_path / "source", "deep/file")
    assert bucket.download("deep/file", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == content
    assert not bucket.download("deep/none", tmp_path / "none")
    assert not bucket.download("deep", tmp_path / "none"), "a folder is not an object"
    assert not list(tmp_path.glob(".*.partial"))
    assert {each.name for each in tmp_path.iterdir()} - {"deep"} == {"source", "target"}


def test_listing_of_several_pages_is_whole() -> None:
    bucket = open_memory()
    for number in range(1001):
        bucket.write(f"{number:04d}", b"")
    assert [each.key for each in bucket.list_keys()] == [f"{number:04d}" for number in range(1001)]


def test_folder_lists_no_interrupted_write_and_keeps_what_it_wrote_through_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is renamed before its content is on the disk may be empty after a power cut."""
    bucket, synced = FolderBucket(tmp_path), list[str]()
    sync = os.fsync

    def note(descriptor: int) -> None:
        synced.append((tmp_path / "a").read_text() if (tmp_path / "a").exists() else "")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    bucket.write("a", b"one")
    bucket.write("a", b"two")
    assert synced == ["", "one"], "on the disk before it takes the place of the old content"
    (tmp_path / ".b.0123.partial").write_bytes(b"ha")
    assert [each.key for each in bucket.list_keys()] == ["a"]


def test_missing_bucket_is_an_error_instead_of_an_empty_one(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    gone = open_bucket("s3://no-such-bucket/x")
    for verb in (gone.list_keys, lambda: gone.read("a"), lambda: gone.write("a", b"")):
        with pytest.raises(InvalidRequestError, match=r"cannot [a-z ]+ `s3://no-such-bucket/x`: NoSuchBucket"):
            verb()


def test_every_error_of_the_library_has_one_of_ours() -> None:
    from obstore import exceptions

    assert {name for name in dir(exceptions) if name.endswith("Error")} == set(ERRORS)


class Refusal(BaseHTTPRequestHandler):
    """An S3 that accepts no login."""

    def do_GET(self) -> None:
        content = b"<Error><Code>InvalidAccessKeyId</Code></Error>"
        self.send_response(403)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def test_refused_login_explains_how_to_log_in(monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusal) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, value in S3Server(port=server.server_port).variables.items():
            monkeypatch.setenv(name, value)
        bucket = open_bucket("s3://bucket/x")
        for verb in (bucket.list_keys, lambda: bucket.read("a")):
            with pytest.raises(AuthError, match="InvalidAccessKeyId") as caught:
                verb()
            assert "aws configure" in caught.value.hints[0]
        server.shutdown()


def test_unknown_scheme_and_a_way_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="unsupported storage `ftp://`"):
        open_bucket("ftp://host/x")
    with pytest.raises(InvalidRequestError, match="is outside"):
        open_bucket(f"file://{tmp_path}/in").write("../out", b"")
    assert set(BUCKETS) == {"file", "s3", "gs", "az", "r2"}


def test_a_file_that_is_deleted_during_a_listing_does_not_fail_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("before", "kept", "after"):
        (tmp_path / name).write_text(name)
    look = Path.stat

    def delete_and_look(path: Path, **options: bool) -> os.stat_result:
        if path.name == "before":
            path.unlink(missing_ok=True)
        found = look(path, **options)
        if path.name == "after":
            path.unlink()
        return found

    monkeypatch.setattr(Path, "stat", delete_and_look)
    assert {"kept"} <= {each.key for each in FolderBucket(tmp_path).list_keys()} <= {"kept", "after"}


@pytest.mark.parametrize("size_gib", [0, 1, 312, 2048])
def test_upload_of_many_large_files_needs_little_memory_and_few_parts(size_gib: int, tmp_path: Path) -> None:
    """By default the library holds 12 parts of each file: 16 files in parts of 32 MiB took 6 GiB."""
    seen: dict[str, int] = {}
    bucket = open_memory()
    assert isinstance(bucket, ObjectBucket)
    bucket._library = SimpleNamespace(  # type: ignore[assignment]
        put=lambda store, key, source, **limits: seen.update(limits), exceptions=bucket._library.exceptions
    )
    with (tmp_path / "large").open("wb") as file:
        file.truncate(size_gib << 30)
    bucket.upload(tmp_path / "large", "key")
    parts = (size_gib << 30) / seen["chunk_size"]
    assert parts <= 10_000
    if parts < 10_000 / 4:  # up to 20 GiB, as files of which there are many
        assert upload.WORKERS * seen["max_concurrency"] * seen["chunk_size"] <= 512 << 20


def test_bucket_is_used_in_its_own_region_whatever_the_variables_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """AWS_REGION is often that of other work, and S3 answers such requests with a redirect that the library refuses."""
    monkeypatch.setattr(s3, "find_region", {"b": "eu-central-1"}.get)
    login = {"AWS_ACCESS_KEY_ID": "key", "AWS_REGION": "us-west-2"}
    assert s3.find_options("b", login) == {"region": "eu-central-1"}
    assert s3.find_options("unreachable", login) == {}, "the library reads the variable"
    endpoint = s3.find_options("b", {**login, "AWS_ENDPOINT_URL": "https://storage.example"})
    assert endpoint["endpoint"] == "https://storage.example" and "region" not in endpoint


@pytest.mark.parametrize("find_region", [s3.find_region, node_objects.find_region, buckets.find_region])
@pytest.mark.parametrize(
    ("bucket", "named", "url"),
    [
        ("data", "us-west-2", "https://data.s3.amazonaws.com/"),
        ("my.data", "us-west-2", "https://s3.amazonaws.com/my.data"),
        # A bucket of the same name in the public partition belongs to another account.
        ("data", "cn-north-1", "https://data.s3.cn-north-1.amazonaws.com.cn/"),
        ("my.data", "us-gov-west-1", "https://s3.us-gov-west-1.amazonaws.com/my.data"),
    ],
)
def test_region_is_asked_at_an_address_of_the_partition_that_the_certificate_covers(
    bucket: str, named: str, url: str, *, find_region: Callable[[str], str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_REGION", named)
    headers = Message()
    headers["x-amz-bucket-region"] = "eu-central-1"

    def refuse(request: urllib.request.Request, timeout: float) -> None:
        assert request.full_url == url
        raise urllib.error.HTTPError(url, 403, "Forbidden", headers, None)

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    assert find_region(bucket) == "eu-central-1"
    del headers["x-amz-bucket-region"]
    assert find_region(bucket) == (None if named == "us-west-2" else named)


@pytest.mark.parametrize(
    "find",
    [
        lambda: s3.find_options("b", read_aws_environment()),
        lambda: node_objects.find_s3_options("b"),
        lambda: buckets.find_s3_options("b"),
    ],
)
def test_bucket_in_china_is_used_at_the_domain_of_that_partition(
    find: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library has one domain for all regions."""
    monkeypatch.setenv("AWS_REGION", "cn-north-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")

    def fail(request: urllib.request.Request, timeout: float) -> None:
        raise urllib.error.URLError("unreachable")

    monkeypatch.setattr(urllib.request, "urlopen", fail)
    expected = {"region": "cn-north-1", "endpoint": "https://s3.cn-north-1.amazonaws.com.cn"}
    assert find() == expected


def test_missing_login_is_named_instead_of_the_request_for_an_instances_login(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("boto3")
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")  # boto3 asks no metadata service, the library does
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(s3, "find_region", lambda bucket: "us-east-1")
    bucket = s3.make_bucket("s3://bucket/texts")
    bucket._library = SimpleNamespace(list=refuse_generically, exceptions=bucket._library.exceptions)
    with pytest.raises(AuthError, match="cannot list `s3://bucket/texts`: no login was found") as raised:
        bucket.list_keys()
    assert "aws configure" in raised.value.hints[0]


def refuse_generically(*arguments: object, **options: object) -> None:
    from obstore.exceptions import GenericError

    raise GenericError("Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 7 ms")
