"""Remember hosts: the claims that each last reported, those that a fence command switched off, and those to avoid.

The first two are used only for a host that does not answer: its nodes are listed as last seen, as a cloud lists a
machine that cannot be reached; once the host is confirmed to be off, they count as ended.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from broker.errors import TransientError
from broker.locks import hold_lock
from broker.sites.facts import write_json
from broker.sites.pools import Host

Claims = Sequence[Mapping[str, Any]]
FENCED = "fenced"


class HostMemory:
    """Three small files, changed under one lock. A lost or damaged file counts as empty."""

    def __init__(self, folder: Path) -> None:
        self._claims = folder / "ssh_claims.json"
        self._off = folder / "ssh_off.json"
        self._avoided = folder / "ssh_avoided.json"
        self._lock = folder / "ssh.lock"  # the daemon, commands and threads of a server change them

    def note_answers(self, answers: Mapping[Host, Claims], owner: str) -> None:
        """Remember the claims of an owner on the hosts that answered, and that these hosts are on."""
        keys = {name_entry(host, owner): list(claims) for host, claims in answers.items()}
        with hold_lock(self._lock):
            known = self._read(self._claims)
            if any(strip(known.get(key, ())) != strip(claims) for key, claims in keys.items()):
                write_json(self._claims, {**known, **keys})
            off = self._read(self._off)
            if back := {host.key for host in answers} & set(off):
                write_json(self._off, {key: value for key, value in off.items() if key not in back})

    def note_claim(self, host: Host, claim: Mapping[str, Any]) -> None:
        """Remember a new claim: its host may fall silent before the first list."""
        key = name_entry(host, claim["owner"])
        with hold_lock(self._lock):
            known = self._read(self._claims)
            others = [each for each in known.get(key, ()) if each["id"] != claim["id"]]
            write_json(self._claims, {**known, key: [*others, claim]})

    def note_off(self, host: Host, *, now_s: float) -> None:
        """Remember that the host was confirmed off at `now_s` (Unix time), until it answers again."""
        with hold_lock(self._lock):
            write_json(self._off, {**self._read(self._off), host.key: now_s})

    def is_off(self, host: Host) -> bool:
        """Return whether a fence command confirmed that the host is off, and it has not answered since."""
        return host.key in self._read(self._off)

    def note_avoided(self, key: str, *, until_s: float) -> None:
        """Remember that a host is not to be claimed before `until_s` (Unix time)."""
        with hold_lock(self._lock):
            write_json(self._avoided, {**self._read(self._avoided), key: until_s})

    def is_avoided(self, host: Host, *, now_s: float) -> bool:
        """Return whether the host is not to be claimed now."""
        until_s = self._read(self._avoided).get(host.key)
        return isinstance(until_s, int | float) and now_s < until_s

    def read_claims(self, host: Host, owner: str, *, now_s: float) -> Claims:
        """Return the claims of a host that does not answer; if it is off, they ended when it was fenced."""
        claims: Claims = self._read(self._claims).get(name_entry(host, owner), ())
        off_s = self._read(self._off).get(host.key)
        if off_s is None:
            return claims
        ended = {"state": "TERMINATED", "ended": {"reason": FENCED, "ended_s": off_s}, "now_s": now_s}
        return [claim if claim["ended"] else {**claim, **ended} for claim in claims]

    def _read(self, path: Path) -> Mapping[str, Any]:
        try:
            found = json.loads(path.read_bytes())
        except (FileNotFoundError, ValueError):
            return {}
        except OSError as error:  # as without a free descriptor: what is read here is also what is written
            raise TransientError(f"cannot read {path}: {error.strerror}") from error
        return found if isinstance(found, dict) else {}


def name_entry(host: Host, owner: str) -> str:
    """Return the key of an owner's claims on a host: brokers of several owners may share one."""
    return f"{host.key} {owner}"


def strip(claims: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the claims without the time of the answer, which always differs."""
    return [{name: value for name, value in claim.items() if name != "now_s"} for claim in claims]
