"""Addresses of a job group on a node."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from broker import agent

sys.path.insert(0, str(agent.FOLDER))
import agent_files
import agent_group

PEERS = {
    "group": "rl",
    "tasks": {
        "learner": {"addresses": ["10.0.0.1"], "port": 23000, "attempt": 2},
        "roll-out": {"addresses": ["10.0.0.2", "10.0.0.3"], "port": None, "attempt": 1},
    },
}


def test_variables_name_the_addresses_and_ports_of_every_task(tmp_path: Path) -> None:
    agent_files.write_json(tmp_path / agent_group.PEERS, PEERS)
    assert agent_group.make_envs(tmp_path) == {
        "BROKER_GROUP_FILE": str(tmp_path / "peers.json"),
        "BROKER_GROUP_LEARNER_IPS": "10.0.0.1",
        "BROKER_GROUP_LEARNER_PORT": "23000",
        "BROKER_GROUP_ROLL_OUT_IPS": "10.0.0.2\n10.0.0.3",
        "BROKER_GROUP_ROLL_OUT_PORT": "",
    }


def test_host_names_are_those_of_skypilot_and_odd_ones_are_left_out() -> None:
    odd = {"group": "rl", "tasks": {"a": {"addresses": ["10.0.0.9\n1.1.1.1 bank.example"], "port": 1}}}
    assert agent_group.list_hosts(PEERS) == [
        "10.0.0.1 learner-0.rl", "10.0.0.2 roll-out-0.rl", "10.0.0.3 roll-out-1.rl",
    ]  # fmt: skip
    assert agent_group.list_hosts(odd) == []


def test_our_block_of_the_hosts_file_is_replaced_and_the_rest_stays(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    agent_group.write_hosts(["10.0.0.1 learner-0.rl"], hosts)
    inode = hosts.stat().st_ino
    hosts.write_text(hosts.read_text() + "10.9.9.9 later\n")
    agent_group.write_hosts(["10.0.0.7 learner-0.rl"], hosts)
    assert hosts.read_text().splitlines() == [
        "127.0.0.1 localhost", "10.9.9.9 later", agent_group.BEGIN, "10.0.0.7 learner-0.rl", agent_group.END,
    ]  # fmt: skip
    assert hosts.stat().st_ino == inode
    agent_group.write_hosts(["10.0.0.7 learner-0.rl"], tmp_path / "missing" / "hosts")  # no error


def test_full_disk_leaves_the_hosts_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to be emptied first: the machine no longer knew `localhost`."""
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")

    def refuse(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(agent_group.os, "posix_fallocate", refuse, raising=False)
    agent_group.write_hosts(["10.0.0.1 learner-0.rl"], hosts)
    assert hosts.read_text() == "127.0.0.1 localhost\n"
    monkeypatch.undo()
    agent_group.write_hosts(["10.0.0.1 learner-0.rl"], hosts)
    agent_group.write_hosts([], hosts)
    assert hosts.read_text().splitlines() == ["127.0.0.1 localhost", agent_group.BEGIN, agent_group.END]
