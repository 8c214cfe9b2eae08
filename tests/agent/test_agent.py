from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from broker.agent import FILES, FOLDER, agent_files


@pytest.mark.parametrize("name", FILES)
def test_agent_parses_as_python_3_8_and_imports_only_the_standard_library(name: str) -> None:
    tree = ast.parse((FOLDER / name).read_text(), feature_version=(3, 8))
    guarded = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for statement in block.body
        for node in ast.walk(statement)
    }
    siblings = {Path(file).stem for file in FILES}
    for node in ast.walk(tree):
        if node in guarded or not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        for module in modules:
            assert module.split(".")[0] in sys.stdlib_module_names | siblings, module


def test_a_request_for_the_status_imports_little(tmp_path: Path) -> None:
    """It comes every few seconds, and its import time is most of its cost."""
    command = [sys.executable, "-I", "-S", "-X", "importtime", str(FOLDER / "agent.py"), "status"]
    done = subprocess.run(
        command, env={"HOME": str(tmp_path)}, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert done.returncode == 0 and {"json", "agent_lease"} <= imported
    assert not imported & {"typing", "subprocess", "socket", "hashlib", "shutil", "threading", "ssl", "urllib.request"}


def test_progress_of_a_missing_or_torn_file_is_none(tmp_path: Path) -> None:
    path = tmp_path / "progress.jsonl"
    assert agent_files.read_progress(path) is None
    path.write_text('{"step": 1')
    assert agent_files.read_progress(path) is None
    path.write_text('{"step": 1}\nrubbish\n')
    assert agent_files.read_progress(path) == {"step": 1}


def test_lock_is_seen_while_it_is_held(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not agent_files.is_locked(path)
    held = agent_files.try_lock(path)
    assert held is not None and agent_files.is_locked(path) and agent_files.try_lock(path) is None
