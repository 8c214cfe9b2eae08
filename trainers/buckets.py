"""Checkpoints in a bucket of S3, Google Cloud Storage or Azure, through obstore.

A bucket requires no rename: an object appears whole or not at all, and `create` is one conditional write.
"""

import contextlib
import hashlib
import io
import json
import os
import re
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from trainers.errors import TrainerError
from trainers.s3_credentials import find_s3_provider

SCHEMES = ("s3", "gs", "az")
# Size of one part of an upload. S3 accepts 10,000 parts, so a file may have up to 312 GiB.
PART_BYTES = 32 * 2**20
# Size of one ranged read, and how many are in flight: a single one reaches 100 to 250 MB/s.
READ_BYTES = 16 * 2**20
READS_AHEAD = 4
CREATE_TRIES = 3
REGION_TIMEOUT_S = 10.0


class BucketStorage:
    """A bucket, or a folder in one. The library retries every call on network errors."""

    def __init__(self, store: Any, url: str) -> None:
        """Use the objects below the prefix of `store`; messages show `url`."""
        import obstore

        self._store, self._url, self._library = store, url, obstore
        self._seals: dict[str, tuple[str, int]] = {}

    def list_names(self, path: str) -> list[str]:
        """Return the names of objects and prefixes directly under `path`."""
        listing = self._call("list", self._library.list_with_delimiter, self._store, path or None)
        paths = [*listing["common_prefixes"], *(entry["path"] for entry in listing["objects"])]
        return sorted(name.rstrip("/").rsplit("/", 1)[-1] for name in paths)

    def list_sizes(self) -> dict[str, int]:
        """Return the size in bytes of each object directly under the prefix, by name."""
        listing = self._call("list", self._library.list_with_delimiter, self._store)
        return {entry["path"].rsplit("/", 1)[-1]: entry["size"] for entry in listing["objects"]}

    def read(self, path: str) -> bytes | None:
        """Return the content of an object, or None if it does not exist."""
        try:
            return bytes(self._call("read from", lambda: self._library.get(self._store, path).bytes()))
        except FileNotFoundError:
            return None

    def create(self, path: str, content: bytes) -> bool:
        """Write an object unless it exists; return whether it was written.

        The condition is If-None-Match on S3 and Azure, generation 0 on Google.
        """
        try:
            is_ours: bool = self._call("write to", create_object, self._store, path, content)
        except FileNotFoundError as error:  # the bucket itself
            raise self._explain("write to", error) from error
        return is_ours

    def stream(self, path: str) -> Iterator[bytes]:
        """Yield the object in order, by ranged reads, a few of them ahead of the caller.

        A single request would hit the library's limit of 30 s per request, however fast the data arrives.
        """
        size: int = self._call("read from", self._library.head, self._store, path)["size"]
        with ThreadPoolExecutor(READS_AHEAD) as pool:
            coming: deque[Future[bytes]] = deque()
            for start in range(0, size, READ_BYTES):
                if len(coming) == READS_AHEAD:
                    yield coming.popleft().result()
                coming.append(pool.submit(self.read_range, path, start, min(READ_BYTES, size - start)))
            while coming:
                yield coming.popleft().result()

    def read_range(self, path: str, start: int, length: int) -> bytes:
        """Return `length` bytes of an object from `start`."""
        get = self._library.get_range
        return bytes(self._call("read from", lambda: get(self._store, path, start=start, length=length)))

    def checksum(self, path: str) -> tuple[str, int] | None:
        """Read the whole object; return its SHA-256 and size in bytes, or None if it does not exist."""
        digest, size = hashlib.sha256(), 0
        try:
            for part in self.stream(path):
                digest.update(part)
                size += len(part)
        except FileNotFoundError:
            return None
        return digest.hexdigest(), size

    def seal(self, path: str) -> tuple[str, int] | None:
        """Return SHA-256 and size of the sent bytes, which are not read back because TLS protects the transfer."""
        return self._seals.pop(path, None)

    def delete(self, path: str) -> None:
        """Delete an object, or all objects under a prefix."""
        names = [entry["path"] for page in self._library.list(self._store, path) for entry in page]
        with contextlib.suppress(FileNotFoundError):
            self._call("delete from", self._library.delete, self._store, names or [path])

    def open_writer(self, path: str) -> Any:
        """Return a writer of one object for each rank, which is sent in parts as it is produced."""
        from torch.distributed.checkpoint import FileSystemWriter

        writer: Any = FileSystemWriter(path, sync_files=False)
        writer.fs, writer.path = BucketFiles(self._store, self._seals), path
        return writer

    def _call(self, verb: str, call: Any, *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except (FileNotFoundError, self._library.exceptions.AlreadyExistsError):
            raise
        except self._library.exceptions.BaseError as error:
            raise self._explain(verb, error) from error

    def _explain(self, verb: str, error: Exception) -> OSError:
        # The service's own error code if the message contains one; otherwise the library's first line.
        code = re.search(r"<Code>(\w+)</Code>", str(error))
        first = str(error).strip().partition("\n")[0].partition("<?xml")[0]
        return OSError(f"could not {verb} `{self._url}`: {code[1] if code else first or type(error).__name__}")


class BucketFiles:
    """The file system interface of torch.distributed.checkpoint."""

    def __init__(self, store: Any, seals: dict[str, tuple[str, int]]) -> None:
        """Record in `seals` the checksum and size of each file that is written."""
        self._store, self._seals = store, seals

    @contextlib.contextmanager
    def create_stream(self, path: str, mode: str) -> Iterator[Any]:
        """Return an object to write sequentially; a failure midway leaves no object."""
        import obstore

        assert mode == "wb", "checkpoints are read by `BucketStorage.stream`"
        writer = Writer(obstore.open_writer(self._store, path, buffer_size=PART_BYTES))
        yield writer  # an exception passes through, and the upload is never completed
        writer.finish()
        self._seals[path] = writer.digest.hexdigest(), writer.size

    def concat_path(self, path: str, suffix: str) -> str:
        """Join with a slash."""
        return f"{path}/{suffix}"

    def init_path(self, path: str) -> str:
        """Return the path unchanged."""
        return path

    def mkdir(self, path: str) -> None:
        """Do nothing: buckets have no folders."""

    def exists(self, path: str) -> bool:
        """Return whether the object exists."""
        import obstore

        try:
            obstore.head(self._store, path)
        except FileNotFoundError:
            return False
        return True

    def rename(self, path: str, new_path: str) -> None:
        """Rename an object; buckets do this by copying and deleting. Its recorded checksum moves with it."""
        import obstore

        obstore.rename(self._store, path, new_path)
        if path in self._seals:
            self._seals[new_path] = self._seals.pop(path)

    def rm_file(self, path: str) -> None:
        """Delete an object, if it exists."""
        import obstore

        with contextlib.suppress(FileNotFoundError):
            obstore.delete(self._store, path)


class Writer(io.RawIOBase):
    """Send and count the bytes that are written."""

    def __init__(self, file: Any) -> None:
        """Write to an open upload."""
        self._file, self.digest, self.size = file, hashlib.sha256(), 0

    def writable(self) -> bool:
        """Return True; a writer is never read."""
        return True

    def write(self, data: Any) -> int:
        """Send all bytes, and add them to the digest."""
        content = memoryview(data).cast("B")
        self._file.write(bytes(content))
        self.digest.update(content)
        self.size += len(content)
        return len(content)

    def tell(self) -> int:
        """Return the number of bytes sent so far."""
        return self.size

    def finish(self) -> None:
        """Complete the upload: only now does the object exist."""
        self._file.close()


def create_object(store: Any, path: str, content: bytes) -> bool:
    """Write an object unless it exists; return whether it was written.

    The library repeats this call after refusals, but not after a timeout, which leaves the outcome unknown: an object
    of the same content is ours then.
    """
    import obstore

    for number in range(1, CREATE_TRIES + 1):
        try:
            obstore.put(store, path, content, mode="create")
        except obstore.exceptions.AlreadyExistsError:
            return number > 1 and bytes(obstore.get(store, path).bytes()) == content
        except obstore.exceptions.GenericError:
            if number == CREATE_TRIES:
                raise
        else:
            return True
    raise AssertionError("the last try returns or raises")


def open_bucket(url: str) -> BucketStorage:
    """Return the bucket of an `s3://`, `gs://` or `az://` URL, with the machine's login."""
    return BucketStorage(open_store(url), url)


def open_store(url: str) -> Any:
    """Return obstore's store for such a URL. TrainerError without the package or a bucket's name."""
    try:
        from obstore.store import from_url
    except ImportError as error:
        raise TrainerError(
            f"`{url}` needs the package obstore\n\nhint: `pip install 'intercloud-broker[storage]'`"
        ) from error
    parts = urlsplit(url)
    if not parts.netloc:
        raise TrainerError(f"`{url}` names no bucket")
    options: dict[str, Any] = find_s3_options(parts.netloc) if parts.scheme == "s3" else find_emulator(parts.scheme)
    return from_url(url.rstrip("/"), **options)


def find_emulator(scheme: str) -> dict[str, Any]:
    """Return options for an emulator of Google's or Azure's service, if the variable of their own tools names one."""
    name = "STORAGE_EMULATOR_HOST" if scheme == "gs" else "AZURE_STORAGE_ENDPOINT"
    address = os.environ.get(name, "")
    if not address.startswith("http://"):
        return {}
    options: dict[str, Any] = {"client_options": {"allow_http": True}}
    if scheme == "gs":  # without signing alone, the library still asks the metadata server for a token (obstore 0.12)
        unsigned = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        key = {**unsigned, "gcs_base_url": address, "disable_oauth": True}
        options["service_account_key"] = json.dumps(key)
    return options


def find_s3_options(bucket: str) -> dict[str, Any]:
    """Return the settings that obstore does not find itself: the bucket's region, and logins in files."""
    options: dict[str, Any] = {}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        options["endpoint"] = endpoint
        options["client_options"] = {"allow_http": endpoint.startswith("http://")}
    elif region := find_region(bucket):
        options["region"] = region  # not AWS_REGION, which is often that of other work
        if region.startswith("cn-"):  # the library knows one domain only
            options["endpoint"] = f"https://{find_s3_host(region)}"
    provider = find_s3_provider()
    if provider is not None:
        options["credential_provider"] = provider
    return options


def find_s3_host(named: str) -> str:
    """Return the host of S3 for the region that the login names.

    China and GovCloud are partitions of their own: a bucket of the same name may belong to another account than in the
    public partition.
    """
    domain = "amazonaws.com.cn" if named.startswith("cn-") else "amazonaws.com"
    return f"s3.{named}.{domain}" if named.startswith(("cn-", "us-gov-")) else f"s3.{domain}"


def find_region(bucket: str) -> str | None:
    """Return a bucket's region, which S3 names in a header of every response.

    Without that header, return the region of a variable in China and in GovCloud, otherwise None.
    """
    named = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or ""
    home = find_s3_host(named)
    fallback = named if named.startswith(("cn-", "us-gov-")) else None
    # The certificate of S3 does not cover names with dots.
    host = f"{home}/{bucket}" if "." in bucket else f"{bucket}.{home}/"
    request = urllib.request.Request(f"https://{host}", method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=REGION_TIMEOUT_S) as answer:
            headers = answer.headers
    except urllib.error.HTTPError as error:
        headers = error.headers
    except OSError:
        return fallback
    region: str | None = headers.get("x-amz-bucket-region")
    return region or fallback
