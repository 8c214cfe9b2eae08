"""Use a bucket of any provider through obstore, and translate that library's errors to ours."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from broker.errors import AuthError, BrokerError, InvalidRequestError, MissingPackageError, TransientError
from broker.storage.base import StoredKey

Answer = TypeVar("Answer")
PARTS_MAX = 10_000  # of an object, in S3's limits
PART_BYTES_MIN = 8 << 20
PARTS_AT_ONCE = 4  # of each file: parts are held in memory, and many files are sent at once
READ_BYTES = 8 << 20
CREATE_TRIES = 3
EMPTY_PART = (
    "broker cannot copy keys with `//`: rename the object, name a folder without one, or mount it with `mode: MOUNT`"
)

# obstore.exceptions -> ours. FileNotFoundError is obstore's NotFoundError, of an object or of the bucket.
ERRORS: dict[str, type[BrokerError]] = {
    "AlreadyExistsError": InvalidRequestError,
    "BaseError": TransientError,
    "GenericError": TransientError,  # raised after its own retries
    "InvalidPathError": InvalidRequestError,
    "JoinError": TransientError,
    "NotFoundError": InvalidRequestError,
    "NotModifiedError": InvalidRequestError,
    "NotSupportedError": InvalidRequestError,
    "PermissionDeniedError": AuthError,
    "PreconditionError": InvalidRequestError,
    "UnauthenticatedError": AuthError,
    "UnknownConfigurationKeyError": InvalidRequestError,
}
# The services' error codes, for cases in which the library only raises GenericError.
CODES: dict[str, type[BrokerError]] = {
    "NoSuchBucket": InvalidRequestError,
    "ContainerNotFound": InvalidRequestError,
    "PermanentRedirect": InvalidRequestError,
    "AccessDenied": AuthError,
    "InvalidAccessKeyId": AuthError,
    "SignatureDoesNotMatch": AuthError,
    "ExpiredToken": AuthError,
}


class ObjectBucket:
    """Implement `Bucket` for S3, Google Cloud Storage and Azure through obstore."""

    def __init__(self, store: Any, url: str, *, login: str, has_login: bool = True) -> None:
        """Bind to the store's prefix. `login` is the hint for a missing login; `has_login` False: none is known."""
        import obstore

        self._store, self._library, self._url, self._login = store, obstore, url, login
        self._has_login = has_login

    def list_keys(self, prefix: str = "") -> Sequence[StoredKey]:
        """List all pages of keys below the prefix. Raises CloudError.

        Consoles mark folders that have keys by empty objects `FOLDER/`, which the library lists as `FOLDER`; these are
        omitted.
        """

        def list_pages() -> list[StoredKey]:
            pages = self._library.list(self._store, prefix or None, chunk_size=1000)
            return [_describe(each, each["path"]) for page in pages for each in page]

        keys = self._call("list", list_pages)
        if not keys and prefix and (found := self._call("list", lambda: self._look_up(prefix))) is not None:
            keys = [found]  # a listing excludes the object of that exact name
        folders = {str(folder) for each in keys for folder in PurePosixPath(each.key).parents} | {""}
        files = [each for each in keys if each.size_bytes or each.key not in folders]
        return sorted(files, key=lambda each: each.key)

    def read(self, key: str) -> bytes | None:
        """Return the content; None if there is no such object. Raises CloudError."""

        def get() -> bytes | None:
            try:
                return bytes(self._library.get(self._store, key).bytes())
            except FileNotFoundError as error:
                return self._pass_over(error)

        return self._call("read from", get)

    def write(self, key: str, content: bytes) -> None:
        """Put the object. Raises CloudError."""
        self._call("write to", lambda: self._library.put(self._store, key, content))

    def write_if_absent(self, key: str, content: bytes) -> bool:
        """Put the object if it does not exist; return whether it was created.

        The library repeats this call after refusals, but not after a timeout, which leaves the outcome unknown: an
        object of the same content is ours then.
        """

        def put() -> bool:
            for number in range(1, CREATE_TRIES + 1):
                try:
                    self._library.put(self._store, key, content, mode="create")
                except self._library.exceptions.AlreadyExistsError:
                    return number > 1 and bytes(self._library.get(self._store, key).bytes()) == content
                except self._library.exceptions.GenericError:
                    if number == CREATE_TRIES:
                        raise
                else:
                    return True
            raise AssertionError("the last try returns or raises")

        return self._call("write to", put)

    def upload(self, source: Path, key: str) -> None:
        """Upload a file in parts. Raises CloudError."""
        part_bytes = max(PART_BYTES_MIN, -(-source.stat().st_size // PARTS_MAX))
        limits = {"chunk_size": part_bytes, "max_concurrency": PARTS_AT_ONCE}
        self._call("write to", lambda: self._library.put(self._store, key, source, **limits))

    def download(self, key: str, target: Path) -> bool:
        """Stream the object to a file, which is replaced atomically; return False if there is no object."""

        def fetch() -> bool:
            try:
                parts = self._library.get(self._store, key).stream(READ_BYTES)
            except FileNotFoundError as error:
                self._pass_over(error)
                return False
            aside = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
            try:
                with aside.open("wb") as file:
                    for part in parts:
                        file.write(part)
                aside.replace(target)
            finally:
                aside.unlink(missing_ok=True)
            return True

        return self._call("read from", fetch)

    def delete(self, key: str) -> None:
        """Delete the object; already gone is success."""

        def remove() -> None:
            try:
                self._library.delete(self._store, key)
            except FileNotFoundError as error:
                self._pass_over(error)

        self._call("delete from", remove)

    def _look_up(self, key: str) -> StoredKey | None:
        try:
            return _describe(self._library.head(self._store, key), key)
        except FileNotFoundError:
            return None

    @staticmethod
    def _pass_over(error: FileNotFoundError) -> None:
        """Accept a missing object; raise the error if the bucket is missing."""
        if find_code(error) in ("NoSuchBucket", "ContainerNotFound"):
            raise error

    def _call(self, verb: str, call: Callable[[], Answer]) -> Answer:
        try:
            return call()
        except self._library.exceptions.BaseError as error:
            raise self._translate(verb, error) from error
        except FileNotFoundError as error:
            raise self._translate(verb, error) from error
        except ValueError as error:  # of a key that the library cannot express
            raise InvalidRequestError(f"cannot {verb} `{self._url}`: {error}", hints=(EMPTY_PART,)) from error

    def _translate(self, verb: str, error: Exception) -> BrokerError:
        name = "NotFoundError" if isinstance(error, FileNotFoundError) else type(error).__name__
        code = find_code(error)
        kind = CODES.get(code or "") or ERRORS[name]
        first = str(error).strip().partition("\n")[0].partition("<?xml")[0]
        if code is None and name == "GenericError" and not self._has_login:
            # The library looked for the login of an instance, and describes that request.
            kind, first = AuthError, "no login was found"
        message = f"cannot {verb} `{self._url}`: {code or first or name}"
        if name == "InvalidPathError":
            return kind(message, hints=(EMPTY_PART,))
        return kind(message, hints=(self._login,) if kind is AuthError else ())


def _describe(found: Mapping[str, Any], key: str) -> StoredKey:
    """Return what obstore says of an object. Azure quotes ETags in headers, but not in listings."""
    etag = (found["e_tag"] or "").removeprefix("W/").strip('"')
    return StoredKey(key=key, size_bytes=found["size"], modified_s=found["last_modified"].timestamp(), etag=etag)


def find_code(error: Exception) -> str | None:
    """Return the service's error code, if the message contains its XML."""
    match = re.search(r"<Code>(\w+)</Code>", str(error))
    return match[1] if match else None


def open_store(url: str, **options: Any) -> Any:
    """Open obstore's store for a URL. Raises MissingPackageError, and InvalidRequestError for an invalid URL."""
    try:
        from obstore.store import from_url
    except ImportError as error:
        raise MissingPackageError(
            f"`{url}` requires the package obstore", hints=("pip install 'intercloud-broker[storage]'",)
        ) from error
    try:
        return from_url(url.rstrip("/"), **options)
    except (ValueError, _base_error()) as error:
        first = str(error).strip().partition("\n")[0]
        raise InvalidRequestError(f"cannot open `{url}`: {first}") from error


def _base_error() -> type[Exception]:
    from obstore.exceptions import BaseError

    found: type[Exception] = BaseError
    return found
