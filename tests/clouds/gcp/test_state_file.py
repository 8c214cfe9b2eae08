"""Nodes are remembered across processes, for as long as they may be asked for."""

from __future__ import annotations

import stat
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from broker.clouds.gcp.state_file import KEEP_ENDED_S, GcpStateFile
from broker.errors import TransientError
from broker.types import Node, NodeState

NODE = Node(id="p/z/b-me-0-0", cloud="gcp", owner="me", cluster="c", attempt=1, rank=0, state=NodeState.RUNNING)


def test_processes_share_the_state_file(tmp_path: Path) -> None:
    GcpStateFile(tmp_path / "gcp").note([NODE], now_s=0)
    assert GcpStateFile(tmp_path / "gcp").read() == {NODE.id: NODE}
    assert stat.S_IMODE((tmp_path / "gcp").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "gcp/nodes.json").stat().st_mode) == 0o600


def test_an_end_is_final_and_eventually_forgotten(tmp_path: Path) -> None:
    state_file = GcpStateFile(tmp_path)
    ended = replace(NODE, state=NodeState.TERMINATED, ended_s=100.0, reason="preempted")
    state_file.note([ended], now_s=100)
    state_file.note([NODE], now_s=101)
    assert state_file.read()[NODE.id] == ended
    state_file.note([replace(NODE, id="p/z/b-me-1-0")], now_s=100 + KEEP_ENDED_S)
    assert NODE.id not in state_file.read()


def test_living_nodes_are_kept_however_old(tmp_path: Path) -> None:
    state_file = GcpStateFile(tmp_path)
    state_file.note([NODE], now_s=0)
    state_file.note([replace(NODE, id="p/z/b-me-1-0")], now_s=10**9)
    assert len(state_file.read()) == 2


def test_a_file_that_cannot_be_read_now_is_not_replaced(tmp_path: Path) -> None:
    """A daemon with many nodes may run out of descriptors for a moment."""
    state_file = GcpStateFile(tmp_path)
    state_file.note([NODE], now_s=0)
    path = tmp_path / "nodes.json"
    kept = path.rename(tmp_path / "kept")
    path.symlink_to(path)  # ELOOP
    with pytest.raises(TransientError):
        state_file.note([replace(NODE, id="p/z/b-me-1-0")], now_s=0)
    path.unlink()
    kept.rename(path)
    assert state_file.read() == {NODE.id: NODE}


def test_an_unreadable_file_counts_as_empty_and_is_rewritten(tmp_path: Path) -> None:
    state_file = GcpStateFile(tmp_path)
    (tmp_path / "nodes.json").write_text('[{"id": ')
    assert state_file.read() == {}
    state_file.note([NODE], now_s=0)
    assert state_file.read() == {NODE.id: NODE}


def test_concurrent_writers_lose_nothing(tmp_path: Path) -> None:
    def note(number: int) -> None:
        for count in range(20):
            GcpStateFile(tmp_path).note([replace(NODE, id=f"p/z/b-me-{number}-{count}")], now_s=0)

    threads = [threading.Thread(target=note, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(GcpStateFile(tmp_path).read()) == 80
