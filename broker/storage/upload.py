"""Upload local files into a task's bucket, creating the bucket if it does not exist."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from broker.errors import InvalidRequestError
from broker.frozen import frozen
from broker.storage import open_bucket
from broker.storage.base import Bucket, StoredKey

WORKERS = 16
TRIES = 3  # for a file that changes while it is sent
# scheme -> function that creates an empty bucket by name. Other clouds require a project or an account: the user
# creates it.
CREATORS: dict[str, str] = {
    "s3": "broker.storage.s3:create_bucket",
    "r2": "broker.storage.r2:create_bucket",
}
BY_HAND = {
    "gs": "gcloud storage buckets create gs://{name}",
    "az": "az storage container create --name {name}",
}


@frozen
class UploadResult:
    """The number of files, and how many files and bytes of them were uploaded."""

    files: int
    sent_files: int
    sent_bytes: int
    is_new_bucket: bool


def ensure_bucket(url: str) -> bool:
    """Create the URL's bucket if it does not exist; return whether it was created.

    Raises AuthError, and InvalidRequestError if it cannot be created or is not readable.
    """
    scheme, _, rest = url.partition("://")
    name = rest.partition("/")[0]
    try:
        open_bucket(f"{scheme}://{name}").read("broker-is-it-there")
        return False
    except InvalidRequestError as error:
        if scheme not in CREATORS:
            command = BY_HAND.get(scheme, "").format(name=name)
            raise InvalidRequestError(
                f"bucket `{scheme}://{name}` does not exist or is not readable: {error.message}",
                hints=(f"create it with `{command}`",) if command else (),
            ) from error
    module, _, function = CREATORS[scheme].partition(":")
    create: Callable[[str], None] = getattr(importlib.import_module(module), function)
    create(name)
    return True


def send_files(
    url: str, files: Mapping[str, Path], *, on_sent: Callable[[int, int], None] = lambda sent, total: None
) -> UploadResult:
    """Upload files, by their keys below the URL, if they changed later or have another size. Nothing is deleted.

    `on_sent` is called after each file with the bytes sent and the total. Idempotent: a file appears complete or not at
    all, and a repeated call does not send it again.
    """
    is_new = ensure_bucket(url)
    bucket = open_bucket(url)
    there = {each.key: each for each in bucket.list_keys()}
    changed = {key: file for key, file in files.items() if is_changed(file, there.get(key))}
    total, sent = sum(file.stat().st_size for file in changed.values()), 0
    with ThreadPoolExecutor(WORKERS) as pool:
        for done in as_completed([pool.submit(_send, bucket, key, file) for key, file in changed.items()]):
            sent += done.result()
            on_sent(sent, total)
    return UploadResult(files=len(files), sent_files=len(changed), sent_bytes=sent, is_new_bucket=is_new)


def is_changed(file: Path, there: StoredKey | None) -> bool:
    """Return whether to upload a file: its key is missing, older, or of another size."""
    return there is None or there.size_bytes != file.stat().st_size or there.modified_s < find_change_s(file)


def find_change_s(file: Path) -> float:
    """Return when the file last changed, in Unix time.

    `cp -p`, `mv`, `tar` and `rsync -t` put an older time on new content; only the time of the inode shows that.
    """
    status = file.stat()
    return max(status.st_mtime, status.st_ctime)


def _send(bucket: Bucket, key: str, file: Path) -> int:
    """Upload a file, again if it changed meanwhile: half of it would be old, and look newer than the file."""
    for _ in range(TRIES):
        before = _identify(file)
        bucket.upload(file, key)
        if _identify(file) == before:
            return before[0]
    bucket.delete(key)
    raise InvalidRequestError(
        f"`{file}` changed during each of {TRIES} uploads",
        hints=("run the command again when no program writes to it, or name another file",),
    )


def _identify(file: Path) -> tuple[int, ...]:
    """Return the size, and what changes with every write and replacement of the file."""
    status = file.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
