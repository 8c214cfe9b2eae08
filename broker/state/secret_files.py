"""The secrets of live jobs: one file of mode 0600 per job, deleted when it ends. They are never in the database."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from broker.errors import DamagedRowError
from broker.state.base import Database
from broker.state.copies import sync_file
from broker.state.faults import explain_os_error
from broker.types.jobs import name_job


class SecretStore(Protocol):
    """The store of the secrets of live jobs."""

    def write(self, job_id: int, uid: str, values: Mapping[str, str]) -> None:
        """Store the secrets of a job, replacing earlier ones. Raises StateError."""

    def forget(self, job_id: int, uid: str) -> None:
        """Delete the secrets of an ended job; no effect if already deleted."""

    def read(self, job_id: int, uid: str, names: Sequence[str]) -> Mapping[str, str]:
        """Return the secrets by name, with empty values after the job has ended. Raises DamagedRowError."""

    def has(self, job_id: int, uid: str) -> bool:
        """Return whether secrets of this job are stored."""
        ...


class SecretFiles:
    """Secrets of live jobs in files of mode 0600, one for each job.

    A file is deleted after the commit of `database`: after a rollback, the job is live and needs its secrets.
    """

    def __init__(self, folder: Path, database: Database) -> None:
        self._folder = folder
        self._database = database

    def _find_path(self, job_id: int, uid: str) -> Path:
        # A damaged uid may contain any character: the path must stay in the folder, and must not contain NUL.
        return self._folder / f"{re.sub(r'[^A-Za-z0-9._-]', '_', name_job(job_id, uid))}.json"

    def forget(self, job_id: int, uid: str) -> None:
        """Delete the secrets of a job; no effect if already deleted. Raises StateError."""
        path = self._find_path(job_id, uid)

        def delete() -> None:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise explain_os_error(error, default=path) from error

        self._database.after_commit(delete)

    def write(self, job_id: int, uid: str, values: Mapping[str, str]) -> None:
        """Create the file, with mode 0600 from the beginning. Raises StateError."""
        path = self._find_path(job_id, uid)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            path.unlink(missing_ok=True)
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                json.dump(dict(values), file)
                file.flush()
                os.fsync(file.fileno())
            for folder in (
                path.parent,
                path.parent.parent,
            ):  # the names, too: the row of the job is durable
                sync_file(folder)
        except OSError as error:
            raise explain_os_error(error, default=path) from error

    def read(self, job_id: int, uid: str, names: Sequence[str]) -> Mapping[str, str]:
        """Return the secrets by name, with empty values after the job has ended and its file is deleted.

        Raises DamagedRowError for an unreadable file.
        """
        path = self._find_path(job_id, uid)
        try:
            values = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
        except FileNotFoundError:
            values = {}
        except OSError as error:
            raise DamagedRowError("jobs", str(job_id), f"its secrets in {path}: {error.strerror}") from error
        except ValueError as error:
            raise DamagedRowError("jobs", str(job_id), f"its secrets in {path} are not JSON") from error
        return {name: values.get(name, "") for name in names}

    def has(self, job_id: int, uid: str) -> bool:
        """Return whether the file exists."""
        return self._find_path(job_id, uid).exists()
