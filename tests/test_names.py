"""One class name has one meaning in the product, or a reason here."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PER_CLOUD = "each cloud's own; callers import it from that cloud's package"
PROTOCOL = "the Protocol in `jobs`, and its implementation in `runtime`"
SHARED = {
    "broker": {
        "Clients": PER_CLOUD,
        "NodeLauncher": PER_CLOUD,
        "Quota": PER_CLOUD,
        "Settings": PER_CLOUD,
        "Gang": PROTOCOL,
        "GangReport": PROTOCOL,
    },
    "trainers": {
        "Attention": "each model file shows its whole network",
        "Block": "each model file shows its whole network",
        "Perceptron": "each model file shows its whole network",
    },
}


def test_each_class_name_is_defined_once() -> None:
    shared = {package: find_shared(package) for package in SHARED}
    surprises = {
        f"{package}: {name}": paths
        for package, names in shared.items()
        for name, paths in names.items()
        if name not in SHARED[package]
    }
    assert not surprises, "rename one of them, or add a reason to SHARED"


def find_shared(package: str) -> dict[str, list[str]]:
    modules: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / package).rglob("*.py")):
        for name in re.findall(r"^class (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            modules[name].append(str(path.relative_to(ROOT)))
    return {name: paths for name, paths in modules.items() if len(paths) > 1}


def test_a_second_class_of_a_name_is_found() -> None:
    assert find_shared("broker")["Settings"] == ["broker/clouds/aws/settings.py", "broker/clouds/gcp/settings.py"]
