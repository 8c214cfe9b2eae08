"""The acts and violations of a torture run: JSON lines, with the seed, written as they happen."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any


class History:
    """The history of one bed's run, shared by all its threads."""

    def __init__(self, path: Path, *, seed: int, bed: str) -> None:
        self.path = path
        self.acts: Counter[str] = Counter()
        self.violations: list[str] = []
        self._lock = threading.Lock()
        self._begin_s = time.monotonic()
        self._file = path.open("a", encoding="utf-8")
        self.write("begin", seed=seed, bed=bed)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._begin_s

    def write(self, what: str, **fields: Any) -> None:
        line = {"at_s": round(self.elapsed_s, 3), "time_s": time.time(), "what": what, **fields}
        with self._lock:
            self._file.write(json.dumps(line, default=str) + "\n")
            self._file.flush()

    def act(self, kind: str, **fields: Any) -> None:
        """Record and count one act of the killer or of a user."""
        with self._lock:
            self.acts[kind] += 1
        self.write("act", kind=kind, **fields)

    def violate(self, claim: str, **evidence: Any) -> None:
        """Record a broken promise. Each claim is reported once."""
        with self._lock:
            if claim in self.violations:
                return
            self.violations.append(claim)
        self.write("violation", claim=claim, **evidence)
        print(f"VIOLATION {claim}", flush=True)

    def close(self) -> None:
        self._file.close()
