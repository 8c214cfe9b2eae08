"""State files of this installation: gangs requested from SkyPilot, and the clouds that it reported as enabled.

SkyPilot forgets a cluster as soon as it is gone. Without these files, its table, names and labels hold nearly the same.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from broker.clouds.sky.gangs import SkyGang
from broker.errors import TransientError
from broker.locks import hold_lock

KEEP_ENDED_S = 3600.0  # as EC2, which lists a terminated instance for about an hour


class SkyStateFile:
    """Gangs that were requested through SkyPilot, in a file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self) -> Mapping[str, SkyGang]:
        """Return gangs by name; empty if the file is missing or damaged.

        Raises TransientError if it cannot be read now, as without a free descriptor: `note` would replace it.
        """
        path = self._folder / "gangs.json"
        try:
            gangs = msgspec.json.decode(path.read_bytes(), type=list[SkyGang])
        except (FileNotFoundError, msgspec.DecodeError):
            return {}
        except OSError as error:
            raise TransientError(f"cannot read {path}: {error.strerror}") from error
        return {gang.name: gang for gang in gangs}

    def note(self, gangs: Sequence[SkyGang], *, now_s: float) -> None:
        """Record the current state of these gangs. An end is never revoked, and is forgotten after an hour."""
        if not gangs:
            return
        with hold_lock(self._folder / "lock"):
            recorded = dict(self.read())
            for gang in gangs:
                before = recorded.get(gang.name)
                if before is None or before.ended_s is None:
                    recorded[gang.name] = gang
            kept = [gang for gang in recorded.values() if now_s - (gang.ended_s or now_s) < KEEP_ENDED_S]
            for gang in gangs:
                if gang.ended_s is not None:
                    (self._folder / "ssh" / gang.name).unlink(missing_ok=True)
            self._write("gangs.json", msgspec.json.encode(kept))

    def forget(self, name: str) -> None:
        """Delete the record of a gang; already deleted is success."""
        with hold_lock(self._folder / "lock"):
            self._write("gangs.json", msgspec.json.encode([g for g in self.read().values() if g.name != name]))

    def keep_ssh(self, name: str, file: Path) -> None:
        """Keep SkyPilot's ssh configuration of a cluster, for the transport."""
        (self._folder / "ssh").mkdir(mode=0o700, parents=True, exist_ok=True)
        self._write(f"ssh/{name}", file.read_bytes())

    def read_enabled(self) -> Sequence[str]:
        """Return the clouds that SkyPilot's last check enabled."""
        try:
            return msgspec.json.decode((self._folder / "enabled.json").read_bytes(), type=list[str])
        except (OSError, msgspec.DecodeError):
            return ()

    def note_enabled(self, clouds: Sequence[str]) -> None:
        """Record which clouds SkyPilot has enabled, for planning without it."""
        with hold_lock(self._folder / "lock"):
            self._write("enabled.json", msgspec.json.encode(sorted(clouds)))

    def _write(self, name: str, content: bytes) -> None:
        aside = self._folder / f"{name}.{uuid.uuid4().hex}"
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
        aside.replace(self._folder / name)
