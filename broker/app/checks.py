"""The last results of `broker check`, kept in the state folder so that they can be shown without querying a cloud."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from broker.frozen import frozen

if TYPE_CHECKING:
    from broker.config import Config


@frozen
class CheckedItem:
    """One checked item of a cloud, as `broker check CLOUD --json` prints it."""

    name: str
    is_ok: bool
    note: str
    command: str = ""
    is_needed: bool = True


@frozen
class CloudCheck:
    """The recorded check of one cloud; `findings` come from a detailed check, and are empty before the first one."""

    can_launch: bool
    note: str
    time_s: float
    findings: tuple[CheckedItem, ...] = ()
    findings_s: float = 0.0


@frozen
class Checks:
    """The newest result of each cloud that was ever checked."""

    clouds: Mapping[str, CloudCheck] = field(default_factory=dict)


def find_checks(config: Config) -> Path:
    """Return the path of the file with the results."""
    return config.home / "checks.json"


def read_checks(config: Config) -> Checks:
    """Return the results; empty if no check has run, or if the file is damaged (the next check rewrites it)."""
    try:
        return msgspec.json.decode(find_checks(config).read_bytes(), type=Checks)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return Checks()


def record_overview(config: Config, rows: Sequence[tuple[str, bool, str]], *, now_s: float) -> None:
    """Record (cloud, can launch, note) of `broker check`; detailed findings are kept."""
    known = read_checks(config).clouds
    made = {}
    for name, can_launch, note in rows:
        old = known.get(name)
        made[name] = CloudCheck(
            can_launch=can_launch,
            note=note,
            time_s=now_s,
            findings=old.findings if old else (),
            findings_s=old.findings_s if old else 0.0,
        )
    _write(config, {**known, **made})


def record_findings(config: Config, cloud: str, findings: Sequence[CheckedItem], *, now_s: float) -> None:
    """Record the findings of `broker check CLOUD`."""
    wrong = next((each for each in findings if each.is_needed and not each.is_ok), None)
    note = f"{wrong.name}: {wrong.note}" if wrong else findings[0].note if findings else ""
    made = CloudCheck(
        can_launch=wrong is None, note=note, time_s=now_s, findings=tuple(findings), findings_s=now_s
    )  # fmt: skip
    _write(config, {**read_checks(config).clouds, cloud: made})


def _write(config: Config, clouds: Mapping[str, CloudCheck]) -> None:
    """Replace the file; a check that cannot be recorded is still printed."""
    import contextlib
    import os

    path = find_checks(config)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        aside.write_bytes(msgspec.json.encode(Checks(clouds=clouds)))
        aside.replace(path)
