"""The environment variables that broker sets. Each may also be set without broker."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The settings that a trainer reads from its environment."""

    checkpoint_url: str = "./checkpoints"
    attempt: int = 0
    progress_file: Path | None = None
    preemption_file: Path | None = None
    hazard_per_hour: float | None = None  # for the whole gang
    checkpoint_every_s: float | None = None


def read_environment(variables: Mapping[str, str] = os.environ) -> Environment:
    """Read the BROKER_* variables; unset and empty ones take their defaults."""
    progress, preemption = variables.get("BROKER_PROGRESS_FILE"), variables.get("BROKER_PREEMPTION_FILE")
    return Environment(
        checkpoint_url=variables.get("BROKER_CHECKPOINT_DIR") or "./checkpoints",
        attempt=int(variables.get("BROKER_ATTEMPT") or 0),
        progress_file=Path(progress) if progress else None,
        preemption_file=Path(preemption) if preemption else None,
        hazard_per_hour=_read_number(variables, "BROKER_HAZARD_PER_HOUR"),
        checkpoint_every_s=_read_number(variables, "BROKER_CHECKPOINT_EVERY_S"),
    )


def _read_number(variables: Mapping[str, str], name: str) -> float | None:
    """Return a number of at least 0; treat an invalid one as unset, because it only tunes the run."""
    try:
        value = float(variables.get(name) or "nan")
    except ValueError:
        return None
    return value if value >= 0 else None
