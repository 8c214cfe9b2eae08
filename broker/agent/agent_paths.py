"""Locate the folders for a run's program: the bundled trainers, their Python, and its durable state.

Standard library only.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from broker.agent import agent_files
    from broker.agent.agent_container import Container
else:
    import agent_files

TRAINERS = agent_files.STATE / "trainers"
STATE_VARIABLES = ("BROKER_CHECKPOINT_DIR", "BROKER_PIPELINE_DIR")


def list_first(spec: Mapping[str, Any], container: Container | None) -> dict[str, str]:
    """Return the first entries of PATH and PYTHONPATH: the Python that `trainers.setup` chose, and the trainers."""
    if not spec.get("trainers"):
        return {}
    return {
        "PATH": str(find_python_folder(container) / "bin"),
        "PYTHONPATH": str(TRAINERS / str(spec["trainers"])),
    }


def find_python_folder(container: Container | None) -> Path:
    """Return BROKER_PYTHON. An image and the node share this home folder but need different Pythons."""
    return agent_files.STATE / "python" / (container.name if container else "node")


def put_first(variables: Mapping[str, str], first: Mapping[str, str]) -> dict[str, str]:
    """Return `variables` with each value of `first` prepended, as in PATH."""
    joined = {name: os.pathsep.join(filter(None, (value, variables.get(name)))) for name, value in first.items()}
    return {**variables, **joined}


def list_folders(variables: Mapping[str, str]) -> list[str]:
    """Return the state locations that are folders, not buckets."""
    places = [variables.get(name, "") for name in STATE_VARIABLES]
    paths = [place[len("file://") :] if place.startswith("file://") else place for place in places]
    return [path for path in paths if path and "://" not in path]


def make_folders(folders: Sequence[str]) -> Iterator[str]:
    """Create missing folders; yield a warning for each failure because the program may not need the folder."""
    for folder in folders:
        try:
            Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            yield f"warning: cannot create the folder {folder}: {error.strerror}\n"
