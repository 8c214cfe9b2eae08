"""Files that the broker and a node exchange."""

from __future__ import annotations

import hashlib
import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from broker import agent


@pytest.fixture
def exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(agent.FOLDER))
    module = importlib.import_module("agent_exchange")
    monkeypatch.setattr(module, "FOLDER", tmp_path / "exchange")
    assert "agent_exchange" in sys.modules
    return module


def test_files_are_replaced_privately_and_others_are_returned(exchange: ModuleType) -> None:
    answer = exchange.exchange({"files": {"a.json": "one", "b.json": "two"}, "read": ["load.json"]})
    assert answer["files"] == {}
    (exchange.FOLDER / "load.json").write_text("busy")
    (exchange.FOLDER / ".load.json.12").write_text("half of it")
    answer = exchange.exchange({"files": {"a.json": "three"}, "read": ["load.json", "usage.json"]})
    assert answer["files"] == {"load.json": "busy"}
    assert set(answer["digests"]) == {"a.json", "b.json", "load.json"}
    assert answer["digests"]["a.json"] == hashlib.sha256(b"three").hexdigest()
    assert exchange.FOLDER.stat().st_mode & 0o777 == 0o700
    assert (exchange.FOLDER / "a.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["../spec.json", "/etc/passwd", "a/b", ".hidden", ".."])
def test_name_that_leads_out_of_the_folder_is_refused(exchange: ModuleType, name: str) -> None:
    with pytest.raises(ValueError, match="not a plain name"):
        exchange.exchange({"files": {name: "x"}, "read": []})
    with pytest.raises(ValueError, match="not a plain name"):
        exchange.exchange({"files": {}, "read": [name]})
