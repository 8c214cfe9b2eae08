"""Operations of the fake Compute Engine: delayed effects, repeats recognised by request id, and deliberate faults."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from tests.testbed.gce_rules import GceError, Json


@dataclass(kw_only=True)
class Fault:
    """A fault played `times` times on calls of `method` whose path contains `path`.

    A `status` answers the call, a `code` without one fails the operation, neither loses the answer: `has_effect` says
    whether after the effect.
    """

    method: str
    path: str
    code: str = ""
    status: int = 0
    times: int = 1
    has_effect: bool = False
    message: str = ""


class LostAnswer(Exception):
    """A connection that is closed without an answer."""


@dataclass(kw_only=True)
class Operations:
    """Operations that make no progress by themselves: each takes effect when it is polled after it is due."""

    latency_s: float = 0.0  # of every operation, in real time
    now: Callable[[], float] = time.time
    fault_counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.base = ""  # set by the server
        self.operations: dict[str, Json] = {}
        self._due: list[tuple[float, Json, Callable[[], None]]] = []
        self._by_request_id: dict[str, Json] = {}
        self._faults: list[Fault] = []
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()

    def fail(self, method: str, path: str, **what: object) -> None:
        """Add a fault; see `Fault`."""
        self._faults.append(Fault(method=method, path=path, **what))  # type: ignore[arg-type]

    def forget_request_ids(self) -> None:
        """Forget request ids, as after an hour or more."""
        self._by_request_id.clear()

    def _draw(self, method: str, path: str) -> Fault | None:
        """Draw a fault. Raise GceError or LostAnswer where the fault comes before the effect."""
        fault = next(
            (each for each in self._faults if each.times and each.method == method and each.path in path), None
        )
        if fault is None:
            return None
        fault.times -= 1
        self.fault_counts[f"{fault.method} {fault.path}"] += 1
        if fault.status:
            raise GceError(fault.status, fault.code, fault.message or f"injected {fault.code}")
        if not fault.code and not fault.has_effect:
            raise LostAnswer
        return fault

    def _operate(
        self,
        zone: str,
        kind: str,
        target: Json,
        effect: Callable[[], object],
        fault: Fault | None = None,
        *,
        error: Json | None = None,
        user: str = "us@example.com",
    ) -> Json:
        if fault is not None and fault.code:
            error, effect = {"code": fault.code, "message": f"injected {fault.code}"}, lambda: None
        number = next(self._numbers)
        operation: Json = {
            "name": f"operation-{number}",
            "id": str(10**15 + number),
            "operationType": kind,
            "status": "RUNNING",
            "targetLink": target["selfLink"],
            "insertTime": stamp(self.now()),
            "user": user,
        } | ({"zone": f"{self.base}/zones/{zone}"} if zone else {})

        def finish() -> None:
            effect()
            operation.update(status="DONE", endTime=stamp(self.now()))
            if error is not None:
                operation.update(error={"errors": [error]}, httpErrorStatusCode=400, httpErrorMessage="BAD REQUEST")

        self.operations[operation["name"]] = operation
        self._due.append((time.monotonic() + self.latency_s, operation, finish))
        return operation

    def _settle(self) -> None:
        now_s = time.monotonic()
        due = [finish for due_s, _, finish in self._due if due_s <= now_s]
        self._due = [each for each in self._due if each[0] > now_s]
        for finish in due:
            finish()

    def _wait(self, operation: Json) -> None:
        """Hold the request, as Google does, until the operation is done. The caller does not hold the lock."""
        due_s = next((due_s for due_s, each, _ in self._due if each is operation), 0.0)
        threading.Event().wait(max(0.0, due_s - time.monotonic()))
        with self._lock:
            self._settle()


def stamp(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="microseconds")
