"""`broker check ssh`: sizes are detected once, and each pool says what is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from broker.clock import SystemClock
from broker.clouds.findings import CheckResult
from broker.clouds.ssh.check import inspect
from broker.config import Config
from broker.errors import AuthError, TransientError
from broker.sites.facts import Machine, find_facts, read_facts
from broker.sites.openssh import Completed
from broker.sites.pools import Host

ANSWER = (
    b'{"answer": {"vcpus": 96, "memory_gib": 1007.5, "cards": ["NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"]}, '
    b'"uid": 1000}\n'
)


def check(tmp_path: Path, text: str) -> Sequence[CheckResult]:
    (tmp_path / "ssh_pools.yaml").write_text(text)

    async def run(host: Host, program: bytes, timeout_s: float) -> Completed:
        if host.name == "dark":
            raise TransientError("host `dark` cannot be reached: timed out")
        if host.name == "closed":
            raise AuthError("host `closed` cannot be reached: Permission denied", hints=("ssh closed",))
        if host.name == "bare":
            return Completed(returncode=127, stdout=b"", stderr=b"sh: python3: not found\n")
        return Completed(returncode=0, stdout=b"Welcome!\n" + ANSWER, stderr=b"")

    return asyncio.run(inspect(Config(home=tmp_path, owner="me"), clock=SystemClock(), run=run))


def test_size_is_detected_and_kept_for_plans(tmp_path: Path) -> None:
    (result,) = check(tmp_path, "lab: {hosts: [a, b]}\n")
    assert (result.is_ok, result.note) == (True, "2 of 2 hosts answer: 96cpu-1007.5gb-2xH100")
    machine = Machine(vcpus=96, memory_gib=1007.5, accelerator="H100", accelerator_count=2)
    assert read_facts(find_facts("ssh", tmp_path)) == {"lab/a": machine, "lab/b": machine}


def test_silent_host_keeps_the_size_of_the_last_check(tmp_path: Path) -> None:
    check(tmp_path, "lab: {hosts: [a, b]}\n")
    facts = find_facts("ssh", tmp_path)
    facts.write_text(facts.read_text().replace("lab/b", "lab/dark"))
    (result,) = check(tmp_path, "lab: {hosts: [a, dark]}\n")
    assert (result.is_ok, result.is_needed) == (False, False), "the other host can be used"
    assert "host `dark` cannot be reached" in result.note
    assert set(read_facts(facts)) == {"lab/a", "lab/dark"}


def test_host_that_left_the_file_is_forgotten(tmp_path: Path) -> None:
    check(tmp_path, "lab: {hosts: [a, b]}\n")
    check(tmp_path, "lab: {hosts: [a]}\n")
    assert set(read_facts(find_facts("ssh", tmp_path))) == {"lab/a"}


def test_pool_without_any_answer_cannot_be_used(tmp_path: Path) -> None:
    (result,) = check(tmp_path, "lab: {user: me, hosts: [closed, dark]}\n")
    assert (result.is_ok, result.is_needed, result.command) == (False, True, "ssh me@closed")


def test_host_without_python_is_reported(tmp_path: Path) -> None:
    (result,) = check(tmp_path, "lab: {hosts: [bare]}\n")
    assert "python3: not found" in result.note


def test_invalid_file_is_reported_with_its_place(tmp_path: Path) -> None:
    (result,) = check(tmp_path, "lab: {hosts: []}\n")
    assert not result.is_ok and "hosts" in result.note


def test_every_error_of_the_file_is_named_with_its_line(tmp_path: Path) -> None:
    results = check(tmp_path, "lab:\n  hosts: [a]\n  prot: 22\n  usd_hour: cheap\n")
    assert [(each.is_ok, each.command) for each in results] == [(False, f"edit {tmp_path / 'ssh_pools.yaml'}")] * 2
    assert "ssh_pools.yaml:3:3: unknown field `prot`" in results[0].note
    assert "ssh_pools.yaml:4:13: " in results[1].note
