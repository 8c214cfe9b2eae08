"""The environment contract: what the broker tells a program through variables. All have a use without a broker."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What surrounds this process."""

    checkpoint_url: str = "./checkpoints"
    attempt: int = 0
    progress_file: Path | None = None
    preemption_file: Path | None = None


def read_environment(variables: Mapping[str, str] = os.environ) -> Environment:
    """Read the BROKER_* variables; an unset or empty one has its default."""
    progress, preemption = variables.get("BROKER_PROGRESS_FILE"), variables.get("BROKER_PREEMPTION_FILE")
    return Environment(
        checkpoint_url=variables.get("BROKER_CHECKPOINT_DIR") or "./checkpoints",
        attempt=int(variables.get("BROKER_ATTEMPT") or 0),
        progress_file=Path(progress) if progress else None,
        preemption_file=Path(preemption) if preemption else None,
    )
