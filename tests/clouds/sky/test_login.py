"""SkyPilot's location, and the clouds that count as usable: from files alone, nothing is started."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from broker.clock import SystemClock
from broker.clouds import CHECKS, CLOUDS
from broker.clouds.sky import makers
from broker.clouds.sky.login import find_python
from broker.clouds.sky.state_file import SkyStateFile
from broker.config import Config


@pytest.fixture(autouse=True)
def no_skypilot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Remove every SkyPilot; return a folder on the PATH."""
    monkeypatch.delenv("BROKER_SKY_PYTHON", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def write_program(path: Path, first: str) -> Path:
    path.write_text(f"{first}\nprint()\n")
    path.chmod(0o755)
    return path


def test_login_works_without_progress_reports(no_skypilot: Path) -> None:
    assert find_python() is None
    write_program(no_skypilot / "sky", "#!/bin/sh")
    assert find_python() is None


def test_the_interpreter_that_runs_sky_is_found(no_skypilot: Path) -> None:
    write_program(no_skypilot / "sky", f"#!{sys.executable}")
    assert find_python() == sys.executable


def test_ours_is_taken_before_another_and_a_folder_called_sky_is_not(
    no_skypilot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleSpec(name, None))
    assert find_python() is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleSpec(name, None, origin="sky/__init__.py"))
    assert find_python() == sys.executable


def test_the_named_one_takes_precedence(no_skypilot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_program(no_skypilot / "sky", f"#!{sys.executable}")
    named = write_program(tmp_path / "python", "#!/bin/sh")
    monkeypatch.setenv("BROKER_SKY_PYTHON", str(named))
    assert find_python() == str(named)
    monkeypatch.setenv("BROKER_SKY_PYTHON", str(tmp_path / "nowhere"))
    assert find_python() is None


def test_a_cloud_is_usable_if_skypilots_last_answer_says_so(no_skypilot: Path, tmp_path: Path) -> None:
    config = Config(home=tmp_path / "home", owner="me")
    write_program(no_skypilot / "sky", f"#!{sys.executable}")
    assert makers.make_azure(config, clock=SystemClock()) is None
    SkyStateFile(config.home / "sky").note_enabled(["azure"])
    cloud = makers.make_azure(config, clock=SystemClock())
    assert cloud is not None and cloud.name == "azure"
    assert makers.make_lambda(config, clock=SystemClock()) is None
    (no_skypilot / "sky").unlink()
    assert makers.make_azure(config, clock=SystemClock()) is None


def test_every_row_makes_the_cloud_it_names() -> None:
    rows = {name: path for name, path in CLOUDS.items() if path.startswith("broker.clouds.sky.makers")}
    assert {"azure", "cudo", "lambda"} <= set(rows)
    for name, path in rows.items():
        assert getattr(makers, path.partition(":")[2]).args == (name,)
        assert CHECKS[name] == "broker.clouds.sky.check:SkyInspector"
