"""Record when each cloud's prices were last updated and with what result; compute when they are due again.

One small JSON file next to the book, replaced atomically. A missing or damaged file means that all clouds are due.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from broker.frozen import frozen
from broker.locks import hold_lock

FRESH_S = 7 * 3600.0  # SkyPilot's own interval for its hosted catalog
RETRY_S = 900.0  # after a failure; doubled with each further one
RETRY_S_MAX = 86_400.0
FAILURES_MAX = 20  # enough to reach RETRY_S_MAX, and no overflow
ERROR_CHARS_MAX = 500
UNFINISHED = "the update did not finish"


@frozen
class UpdateAttempt:
    """The last attempt to update one cloud: seconds since the epoch, and failures since the last success.

    `error` is None if it succeeded.
    """

    attempted_s: float
    succeeded_s: float | None = None
    failures: int = 0
    error: str | None = None

    def find_next_s(self) -> float:
        """Return when the next attempt is due, in seconds since the epoch."""
        if not self.failures:
            return self.attempted_s + FRESH_S
        return self.attempted_s + min(RETRY_S * 2.0 ** (self.failures - 1), RETRY_S_MAX)

    def is_due(self, now_s: float) -> bool:
        """Return whether to try again. An attempt in the future means that the clock was set back, so it is due."""
        return self.attempted_s > now_s or self.find_next_s() <= now_s


def locate_attempts(cache: Path) -> Path:
    """Return the file of the attempts in a cache folder."""
    return cache / "price-updates.json"


def read_attempts(cache: Path) -> Mapping[str, UpdateAttempt]:
    """Return the last attempt by cloud; empty if the file is missing, unreadable or damaged."""
    try:
        found = json.loads(locate_attempts(cache).read_bytes())
        return {str(cloud): _read_attempt(each) for cloud, each in found.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return {}


def record_attempts(cache: Path, results: Mapping[str, str | None], *, now_s: float) -> None:
    """Record the results of attempts: the error of each cloud, or None. Raises OSError."""
    _change(cache, {cloud: _judge(error, now_s) for cloud, error in results.items()})


def forget_attempts(cache: Path, clouds: Iterable[str]) -> None:
    """Forget clouds that are no longer used, so that they are never due. Raises OSError."""
    if forgotten := dict.fromkeys(clouds):
        _change(cache, forgotten)


def record_starts(cache: Path, clouds: Iterable[str], *, now_s: float) -> None:
    """Record attempts as failed before they begin, so that one that kills its process backs off too. Raises OSError."""
    record_attempts(cache, dict.fromkeys(clouds, UNFINISHED), now_s=now_s)


def _judge(error: str | None, now_s: float) -> UpdateAttempt:
    if error is None:
        return UpdateAttempt(attempted_s=now_s, succeeded_s=now_s)
    return UpdateAttempt(attempted_s=now_s, failures=1, error=error[:ERROR_CHARS_MAX])


def _join(old: UpdateAttempt | None, new: UpdateAttempt) -> UpdateAttempt:
    """Count failures since the last success; the end of an attempt that was recorded at its start counts once."""
    if old is None or new.error is None:
        return new
    is_same = old.error == UNFINISHED and old.attempted_s == new.attempted_s
    failures = old.failures if is_same else min(old.failures + 1, FAILURES_MAX)
    return UpdateAttempt(attempted_s=new.attempted_s, succeeded_s=old.succeeded_s, failures=failures, error=new.error)


def _change(cache: Path, changes: Mapping[str, UpdateAttempt | None]) -> None:
    """Merge changes by cloud into the file; None removes a cloud."""
    path = locate_attempts(cache)
    aside = path.with_suffix(f".{os.urandom(8).hex()}.tmp")
    with hold_lock(cache / "price-updates.lock"):
        for remains in cache.glob(f"{path.stem}.*.tmp"):
            remains.unlink(missing_ok=True)
        known = read_attempts(cache)
        joined = {cloud: each for cloud, each in known.items() if cloud not in changes}
        joined |= {cloud: _join(known.get(cloud), each) for cloud, each in changes.items() if each is not None}
        data = {
            cloud: {
                "attempted_s": each.attempted_s, "succeeded_s": each.succeeded_s, "failures": each.failures,
                "error": each.error,
            }
            for cloud, each in sorted(joined.items())
        }  # fmt: skip
        try:
            with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                json.dump(data, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        finally:
            with suppress(OSError):
                aside.unlink(missing_ok=True)


def _read_attempt(data: Mapping[str, object]) -> UpdateAttempt:
    attempted, succeeded, failures, error = (data[name] for name in ("attempted_s", "succeeded_s", "failures", "error"))
    if not isinstance(attempted, int | float) or not isinstance(failures, int) or failures < 0:
        raise TypeError("not an attempt")
    if not math.isfinite(attempted):  # JSON may have NaN, which would never be due
        raise ValueError("not a time")
    return UpdateAttempt(
        attempted_s=float(attempted),
        succeeded_s=float(succeeded) if isinstance(succeeded, int | float) else None,
        failures=min(failures, FAILURES_MAX),
        error=None if error is None else str(error),
    )
