"""Tells people and the broker how far a run has come: a line on stdout, a JSON line in the progress file."""

import json
import math
import time
from pathlib import Path
from typing import Any


class Progress:
    """Speaks for the first rank; a silent one (any other rank) does nothing."""

    def __init__(self, file: Path | None, *, total: int, is_silent: bool) -> None:
        """Append to `file`, if one is named; a run of `total` steps."""
        self._file = file
        self._total = total
        self._is_silent = is_silent

    def report(
        self,
        *,
        step: int,
        event: str | None = None,
        loss: float | None = None,
        tokens_per_s: float | None = None,
        checkpoint_step: int | None = None,
        **details: Any,
    ) -> None:
        """Append one line. Floats keep all their digits, so two runs can be compared bit for bit."""
        if self._is_silent:
            return
        line = {
            "time": time.time(),
            "step": step,
            "total": self._total,
            "loss": loss if loss is None or math.isfinite(loss) else None,  # JSON has no infinity
            "tokens_per_s": tokens_per_s,
            "event": event,
            "checkpoint_step": checkpoint_step,
            **details,
        }
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            # One small write in append mode: a reader, or a kill, sees the line whole or not at all.
            with self._file.open("ab", buffering=0) as file:
                file.write(json.dumps(line).encode() + b"\n")
        words = [f"step {step}/{self._total}"]
        words += [] if loss is None else [f"loss {loss:.4f}"]
        words += [] if tokens_per_s is None else [f"{tokens_per_s:.0f} tokens/s"]
        words += [] if event is None else [event]
        words += [f"{name} {value}" for name, value in details.items()]
        print("  ".join(words), flush=True)
