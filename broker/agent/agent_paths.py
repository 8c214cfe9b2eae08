"""Folders that a run's program is pointed to: the bundled trainers, their Python, and where its state outlives it.

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
    """Return what goes first in PATH and PYTHONPATH: the trainers, and the Python that `trainers.setup` chose."""
    if not spec.get("trainers"):
        return {}
    return {
        "PATH": str(find_python_folder(container) / "bin"),
        "PYTHONPATH": str(TRAINERS / str(spec["trainers"])),
    }


def find_python_folder(container: Container | None) -> Path:
    """Return BROKER_PYTHON. An image has another Python than the node, and both see this home folder."""
    return agent_files.STATE / "python" / (container.name if container else "node")


def put_first(variables: Mapping[str, str], first: Mapping[str, str]) -> dict[str, str]:
    """Return `variables` with each value of `first` before the one that is there, as in PATH."""
    joined = {name: os.pathsep.join(filter(None, (value, variables.get(name)))) for name, value in first.items()}
    return {**variables, **joined}


def list_folders(variables: Mapping[str, str]) -> list[str]:
    """Return the places for state that are folders, not buckets."""
    places = [variables.get(name, "") for name in STATE_VARIABLES]
    paths = [place[len("file://") :] if place.startswith("file://") else place for place in places]
    return [path for path in paths if path and "://" not in path]


def make_folders(folders: Sequence[str]) -> Iterator[str]:
    """Make what is missing; yield why a folder cannot be made. The program decides whether it needs it."""
    for folder in folders:
        try:
            Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            yield f"warning: cannot make the folder {folder}: {error.strerror}\n"
