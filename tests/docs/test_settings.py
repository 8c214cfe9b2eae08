"""The page of settings lists what `config.toml` and the environment may contain."""

from __future__ import annotations

import re
import tomllib

from broker.config import SETTING_NAMES
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs/SETTINGS.md").read_text()


def read_first_cells(heading: str) -> set[str]:
    table = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    cells = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `")]
    return {name.strip("[]") for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_every_setting_has_a_row() -> None:
    assert read_first_cells("`config.toml`") == set(SETTING_NAMES)


def test_every_variable_of_this_machine_has_a_row() -> None:
    modules = ("broker/config.py", "broker/clouds/gcp/login.py", "broker/clouds/sky/login.py")
    read = {
        name
        for module in modules
        for name in re.findall(r"(?:get|getenv)\(\"(BROKER_[A-Z_]+)\"", (ROOT / module).read_text())
    }
    assert {"BROKER_HOME", "BROKER_STATE", "BROKER_SKY_PYTHON"} <= read
    assert read <= read_first_cells("Environment variables")


def test_example_configuration_is_valid() -> None:
    example = "\n".join(line[4:] for line in PAGE.splitlines() if line.startswith("    "))
    assert set(tomllib.loads(example)) <= set(SETTING_NAMES)
