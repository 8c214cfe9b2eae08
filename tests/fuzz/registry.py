"""The fuzz targets by module. A target takes bytes, and raises for anything that is a fault of ours."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

Target = Callable[[bytes], None]

# module -> its targets; each module has `FUZZ_TARGETS`, and `SEEDS` where its inputs have a form worth keeping.
MODULES: dict[str, tuple[str, ...]] = {
    "tests.fuzz.targets_gang": ("coordinator", "rendezvous"),
    "tests.fuzz.targets_task": ("yaml", "arguments"),
    "tests.fuzz.targets_node": ("agent", "agent-files"),
    "tests.fuzz.targets_state": ("store",),
    "tests.fuzz.targets_catalog": ("catalog",),
}
TARGETS = {name: module for module, names in MODULES.items() for name in names}


def load_target(name: str) -> tuple[Target, Sequence[bytes]]:
    """Return the target and its initial inputs."""
    module = importlib.import_module(TARGETS[name])
    return module.FUZZ_TARGETS[name], getattr(module, "SEEDS", {}).get(name, [b""])
