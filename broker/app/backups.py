"""Backups of a server's state in a bucket or folder, and the fence that keeps a replaced server from writing.

    URL/epochs/000002     written once, by the restore that took this number; the highest number may write
    URL/states/000002     the newest copy of that epoch: an archive, encrypted with the key in `secret.key`
    URL/files/DIGEST      files that were uploaded for live work, see `backup_files.py`

A process may write for `LEASE_S` seconds after it last confirmed that no higher epoch exists (decision 0381). A
restored server starts nothing before it has listed every cloud twice, at least a minute apart, so the two never act at
once.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import secrets
import shutil
import sqlite3
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from broker import sites
from broker.app.backup_files import ASIDE, BackupFiles, attach_uploads, detach_uploads
from broker.clock import Clock
from broker.config import find_backup_url
from broker.errors import BrokerError, CloudError, FencedError, StateError, UsageError
from broker.frozen import frozen
from broker.state.copies import sync_file
from broker.state.restoring import restore as restore_state
from broker.state.secret_rows import load_key
from broker.storage import open_bucket
from broker.storage.base import Bucket

LEASE_S = 60.0  # no longer than the time between the two lists of a restored server (SETTLED_S_MIN)
CONFIRM_S = 20.0
EPOCHS, STATES = "epochs", "states"
NONCE_BYTES = 12
BOUND = b"broker state backup 1"  # authenticated with the archive
# `moved-in` is the word of a move (hosting/host_program.py): a laptop that repeats it must find it in a restored state.
FILES = ("owner", "config.toml", "server/certificate.pem", "server/admin.token", "moved-in")
FOLDERS = ("keys", "secrets", "service-secrets")
# Certificates that running replicas trust, and API keys, without which a service would be open.
SERVICE_FILES = ("serve/*/*.pem", "serve/*/keys.json", "serve/*/usage*.json", "serve/*/canary.json")
CLOUDS = ("aws.toml", "gcp.toml", *sites.FILES.values())  # without these, a restored server cannot reach its machines
DATABASE = "state.db"
EPOCH = "server/epoch.json"


@frozen
class Epoch:
    """The number under which this state folder may write to its backup, and a random word that proves ownership."""

    number: int
    word: str


@frozen
class Restored:
    """A restored state folder: its epoch, and the digests of uploaded files that the backup lacks."""

    epoch: int
    missing: tuple[str, ...]


class Backups:
    """The backups of one state folder."""

    def __init__(self, home: Path, url: str, *, clock: Clock, bucket: Bucket | None = None) -> None:
        self._home = home
        self.url = url
        self._clock = clock
        self._bucket = bucket or open_bucket(url)
        self._digest = ""
        self._confirmed_s = float("-inf")
        self._own: Epoch | None = None  # set once it is known to be ours
        self._files = BackupFiles(home, self._bucket, clock=clock, load_key=lambda: load_key(home))

    @property
    def _epoch_path(self) -> Path:
        return self._home / EPOCH

    def ensure_epoch(self) -> Epoch:
        """Return our epoch; the first call takes number 1. Raises UsageError if the location holds other backups."""
        if self._own is not None:
            return self._own
        known = _read_epoch(self._epoch_path)
        if known is None:
            known = Epoch(number=1, word=secrets.token_hex(16))
            self._write_epoch(known)
        self._bucket.write_if_absent(_name(EPOCHS, known.number), known.word.encode())
        if self._bucket.read(_name(EPOCHS, known.number)) != known.word.encode():
            if known.number == 1:
                self._epoch_path.unlink(missing_ok=True)
            raise UsageError(
                f"{self.url} holds the backups of another state folder",
                hints=["choose another location", f"continue from them: `broker server restore --from {self.url}`"],
            )
        self._own = known
        return known

    def confirm(self) -> None:
        """Raise FencedError if another server has continued from our backups, StateError if that is unknown."""
        now_s = self._clock.now_s()
        if not 0.0 <= now_s - self._confirmed_s < CONFIRM_S:
            self._confirmed_s = max(self._confirmed_s, self._read_confirmed_s())
        if 0.0 <= now_s - self._confirmed_s < CONFIRM_S:
            return
        self.refresh()

    def refresh(self) -> None:
        """Like `confirm`, but query the bucket now; if it does not respond, rely on the lease while it is valid."""
        begin_s = self._clock.now_s()
        try:
            own = self.ensure_epoch()
            newest = max(_list_numbers(self._bucket, EPOCHS), default=own.number)
        except CloudError as error:
            if 0.0 <= begin_s - self._confirmed_s < LEASE_S:
                return
            raise StateError(
                f"the state cannot be changed, because {self.url} does not respond: {error.message}",
                details=("only the backups there show whether another server has been restored from them",),
                hints=("jobs continue on their nodes; repair the login or the network",),
            ) from error
        if newest > own.number:
            raise FencedError(
                f"this server was replaced by one that was restored from {self.url}",
                hints=("log in to the new server, and stop this one",),
            )
        self._confirmed_s = begin_s
        with contextlib.suppress(OSError):  # a full disk: other processes then ask the bucket themselves
            _write_private(self._home / "server" / "confirmed", repr(begin_s))

    def write_if_changed(self) -> bool:
        """Write a copy unless the state is unchanged since the last one; return whether it was written."""
        own = self.ensure_epoch()
        uploads: frozenset[str] = frozenset()

        def edit(connection: sqlite3.Connection) -> None:
            nonlocal uploads
            uploads = detach_uploads(connection, self._home)

        archive = pack_state(self._home, edit=edit, files=(*FILES, *CLOUDS))
        digest = hashlib.sha256(archive).hexdigest()
        is_new = digest != self._digest
        if is_new:
            self._files.send(uploads)
            self._bucket.write(_name(STATES, own.number), _encrypt(load_key(self._home), archive))
            self._digest = digest
        self._files.forget_unused(uploads)
        return is_new

    def _write_epoch(self, epoch: Epoch) -> None:
        """Write our epoch durably: without it, or with a torn one, this server could never write again."""
        _write_private(self._epoch_path, json.dumps({"number": epoch.number, "word": epoch.word}), is_durable=True)

    def _read_confirmed_s(self) -> float:
        """Return the time of the last confirmation by another process of this server; never in the future."""
        try:
            found_s = float((self._home / "server" / "confirmed").read_text())
        except (OSError, ValueError):
            return float("-inf")
        return found_s if found_s <= self._clock.now_s() else float("-inf")

    def restore(self) -> Restored:
        """Fill an empty state folder from the newest backup, under a new epoch, which fences every earlier server.

        May be repeated until it returns: an interrupted call leaves no database. Raises StateError, or UsageError if
        there is no backup.
        """
        if (self._home / DATABASE).exists():
            raise StateError(
                f"{self._home} already contains a state", hints=("restore into an empty folder: set `BROKER_HOME`",)
            )
        numbers = _list_numbers(self._bucket, EPOCHS)
        if not numbers:
            raise UsageError(
                f"no backup found in {self.url}",
                hints=["name the location that `broker server status` shows for the server that made the backup"],
            )
        self._read_newest(below=max(numbers) + 1)  # before claiming an epoch, which stops the old server
        known = _read_epoch(self._epoch_path)
        own = Epoch(number=max(numbers) + 1, word=secrets.token_hex(16))
        if known is not None and self._bucket.read(_name(EPOCHS, known.number)) == known.word.encode():
            own = known  # an earlier call was interrupted
        self._write_epoch(own)
        self.refresh()
        archive = self._read_newest(below=own.number)
        with tempfile.TemporaryDirectory(dir=self._home, prefix=ASIDE) as folder:
            unpack(archive, Path(folder))
            with closing(sqlite3.connect(Path(folder) / DATABASE, isolation_level=None)) as connection:
                uploads = attach_uploads(connection, self._home)
            missing = self._files.fetch(uploads)
            self._put_in_place(Path(folder))
        return Restored(epoch=own.number, missing=missing)

    def _read_newest(self, *, below: int) -> bytes:
        states = [number for number in _list_numbers(self._bucket, STATES) if number < below]
        content = self._bucket.read(_name(STATES, max(states))) if states else None
        if content is None:
            raise StateError(
                f"{self.url} has no copy of the state yet", hints=("wait for the server's next backup, and try again",)
            )
        return _decrypt(load_key(self._home), content, self.url)

    def _put_in_place(self, folder: Path) -> None:
        """Move the files into place, the database last.

        Its presence makes the state folder complete, even after a power cut.
        """
        folders = {self._home}
        for path in sorted(folder.rglob("*")):
            target = self._home / path.relative_to(folder)
            if path.is_dir():
                target.mkdir(mode=0o700, exist_ok=True)
            elif path.name != DATABASE and not (target.name in ("config.toml", *CLOUDS) and target.exists()):
                target.parent.mkdir(mode=0o700, exist_ok=True)
                sync_file(path)
                path.replace(target)
                folders.add(target.parent)
        for each in folders:
            sync_file(each)
        owner = (self._home / "owner").read_text().strip()
        restore_state(self._home / DATABASE, folder / DATABASE, clock=self._clock, owner=owner)


def read_epoch_number(home: Path) -> int:
    """Return the epoch that each request to a node carries; 0 for a state folder that never had backups.

    It is kept when backups are turned off: nodes refuse an epoch lower than one they have seen. Raises StateError.
    """
    known = _read_epoch(home / EPOCH)
    return known.number if known else 0


def _read_epoch(path: Path) -> Epoch | None:
    try:
        data = json.loads(path.read_bytes())
        return Epoch(number=int(data["number"]), word=str(data["word"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateError(f"{path} cannot be read: {error}") from None


def make_confirm(home: Path, *, clock: Clock) -> Callable[[], None] | None:
    """Return the check to run before each write of a state folder with backups; None without backups."""
    url = find_backup_url(home)
    if url is None:
        return None
    return Backups(home, url, clock=clock).confirm


def pack_state(
    home: Path,
    *,
    edit: Callable[[sqlite3.Connection], None] = lambda connection: None,
    files: Sequence[str] = FILES,
    folders: Sequence[str] = FOLDERS,
) -> bytes:
    """Pack the database, changed by `edit`, and the files next to it; equal states give equal bytes."""
    out = io.BytesIO()
    with tempfile.TemporaryDirectory(dir=home, prefix=ASIDE) as folder, tarfile.open(fileobj=out, mode="w") as archive:
        copy = Path(folder) / DATABASE
        with closing(sqlite3.connect(home / DATABASE, isolation_level=None)) as connection:
            connection.execute("VACUUM INTO ?", (str(copy),))
        with closing(sqlite3.connect(copy, isolation_level=None)) as connection:
            connection.execute("UPDATE leader SET beat_s = 0, stats = ''")  # a heartbeat does not count as a change
            edit(connection)
        _add(archive, DATABASE, copy.read_bytes())
        for path in _list_files(home, files, folders):
            try:
                _add(archive, path.relative_to(home).as_posix(), path.read_bytes())
            except FileNotFoundError:  # the keys of a gang that has just ended
                continue
    return out.getvalue()


def _list_files(home: Path, files: Sequence[str], folders: Sequence[str]) -> list[Path]:
    found = [home / name for name in files if (home / name).is_file()]
    for name in folders:
        found += [home / name] if (home / name).is_file() else []
        found += sorted(path for path in (home / name).rglob("*") if path.is_file())
    for pattern in SERVICE_FILES:
        found += sorted(home.glob(pattern))
    return found


def keep_record(home: Path, url: str, *, now_s: float, error: BrokerError | None) -> None:
    """Record the time of the last confirmed backup, and the newest error, for `broker server status`."""
    path = home / "server" / "backup.json"
    try:
        known = json.loads(path.read_bytes())
    except (OSError, ValueError):
        known = {}
    record = {**known, "url": url, "error": None if error is None else error.message}
    _write_private(path, json.dumps(record if error is not None else {**record, "time_s": now_s}))


def _encrypt(key: bytes, content: bytes) -> bytes:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    nonce = secrets.token_bytes(NONCE_BYTES)
    return nonce + AESGCM(key).encrypt(nonce, content, BOUND)


def _decrypt(key: bytes, content: bytes, url: str) -> bytes:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        return AESGCM(key).decrypt(content[:NONCE_BYTES], content[NONCE_BYTES:], BOUND)
    except InvalidTag:
        raise StateError(
            f"the backup in {url} is encrypted with another key, or damaged",
            hints=(
                "pass the server's `secret.key`: `--key-file FILE`; `broker server up` keeps a copy in "
                "`~/.broker/hosted/secret.key`",
            ),
        ) from None


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), 0o600
    archive.addfile(entry, io.BytesIO(content))


def unpack(content: bytes, folder: Path) -> None:
    """Unpack an archive of `pack_state`."""
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for entry in archive.getmembers():
            target = folder / entry.name
            source = archive.extractfile(entry)
            assert source is not None and target.resolve().is_relative_to(folder.resolve()), entry.name
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                shutil.copyfileobj(source, file)


def _list_numbers(bucket: Bucket, folder: str) -> list[int]:
    names = [each.key.rpartition("/")[2] for each in bucket.list_keys(folder)]
    return sorted(int(name) for name in names if name.isdecimal())


def _name(folder: str, number: int) -> str:
    return f"{folder}/{number:06d}"


def _write_private(path: Path, text: str, *, is_durable: bool = False) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    if is_durable:
        sync_file(path.parent)
        sync_file(path.parent.parent)  # the folder may be new, too
