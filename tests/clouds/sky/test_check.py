"""`broker check` shows for each cloud behind SkyPilot what SkyPilot reports, and what to do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from broker.clouds.findings import CanInspectQuickly, CheckResult
from broker.clouds.sky import check
from broker.clouds.sky.check import SkyInspector
from broker.clouds.sky.state_file import SkyStateFile
from broker.config import Config
from broker.errors import TransientError


@pytest.fixture
def config(bed: Any) -> Config:
    return Config(home=bed.folder, owner="me")


def find(findings: Sequence[CheckResult], name: str) -> CheckResult:
    return next(each for each in findings if each.name == name)


@pytest.mark.parametrize("verb", ["inspect_quickly", "inspect"])
def test_a_cloud_that_is_enabled(bed: Any, config: Config, verb: str) -> None:
    inspector = SkyInspector("lambda", bed.engine)
    assert isinstance(inspector, CanInspectQuickly)
    findings = asyncio.run(getattr(inspector, verb)(config, clock=bed.clock))
    assert all(each.is_ok for each in findings)
    assert find(findings, "skypilot").note == "SkyPilot 0.14.1 at http://127.0.0.1:46580"
    assert SkyStateFile(config.home / "sky").read_enabled() == ["lambda"]


def test_a_disabled_cloud_shows_skypilots_reason(bed: Any, config: Config) -> None:
    bed.engine.enabled = ["nebius"]
    inspector = SkyInspector("lambda", bed.engine)
    login = find(asyncio.run(inspector.inspect(config, clock=bed.clock)), "login")
    assert (login.is_ok, login.note) == (False, "Reason [compute]: no key in ~/.keys")
    assert login.command == "sky check lambda"
    login = find(asyncio.run(inspector.inspect_quickly(config, clock=bed.clock)), "login")
    assert (login.is_ok, login.note, login.command) == (False, "not enabled in SkyPilot", "sky check lambda")


def test_many_clouds_cost_one_query(bed: Any, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    async def list_enabled() -> Sequence[str]:
        asked.append(1)
        return ["lambda"]

    monkeypatch.setattr(bed.engine, "list_enabled", list_enabled)
    for cloud in ("lambda", "nebius", "oci"):
        asyncio.run(SkyInspector(cloud, bed.engine).inspect_quickly(config, clock=bed.clock))
    assert len(asked) == 1


def test_a_silent_server_cancels_nothing(bed: Any, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clouds are down for a minute, not disabled."""
    SkyStateFile(config.home / "sky").note_enabled(["lambda"])

    async def fail() -> None:
        raise TransientError("SkyPilot: no answer (ApiServerConnectionError)")

    monkeypatch.setattr(bed.engine, "hello", fail)
    for verb in ("inspect_quickly", "inspect"):
        (finding,) = asyncio.run(getattr(SkyInspector("lambda", bed.engine), verb)(config, clock=bed.clock))
        assert (finding.name, finding.is_ok, finding.command) == ("skypilot", False, "sky api start")
    assert SkyStateFile(config.home / "sky").read_enabled() == ["lambda"]


def test_without_skypilot_the_check_asks_for_its_installation(
    bed: Any, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "find_python", lambda: None)
    for verb in ("inspect_quickly", "inspect"):
        (finding,) = asyncio.run(getattr(SkyInspector("lambda"), verb)(config, clock=bed.clock))
        assert not finding.is_ok and "intercloud-broker[sky]" in finding.command


def test_machines_that_cannot_end_themselves_are_warned_of(bed: Any, config: Config) -> None:
    bed.engine.enabled = ["verda"]
    lease = find(asyncio.run(SkyInspector("verda", bed.engine).inspect(config, clock=bed.clock)), "lease")
    assert not lease.is_ok and not lease.is_needed
