"""`broker check` for users without SkyPilot, or with one that does not respond."""

from __future__ import annotations

import json
import sys
from typing import Any


def test_clouds_behind_skypilot_say_what_to_install(shell: Any) -> None:
    rows = {row["cloud"]: row for row in shell.read_json("check")}
    assert not rows["azure"]["can_launch"] and "install `intercloud-broker[sky]`" in rows["azure"]["note"]
    assert "kubernetes" not in rows, "nothing is sold there, and it cannot be used"
    finding, native = json.loads(shell.run("check", "kubernetes", "--json", code=5).stdout)
    assert "kubernetes.yaml" in native["note"]
    assert "intercloud-broker[sky]" in finding["command"]


def test_an_interpreter_without_skypilot_is_a_finding_and_no_crash(shell: Any) -> None:
    python = shell.folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    shell.environment["BROKER_SKY_PYTHON"] = str(python)
    rows = {row["cloud"]: row for row in shell.read_json("check")}
    assert not rows["azure"]["can_launch"] and "sky" in rows["azure"]["note"]
    assert "fix: pip install" in shell.run("check", "azure", code=5).stdout


def test_the_policy_equals_skypilots(shell: Any) -> None:
    assert "docs.skypilot.co" in shell.run("check", "--policy", "azure").stdout


def test_kubernetes_may_be_called_k8s_as_in_a_task_file(shell: Any) -> None:
    assert shell.run("check", "--policy", "k8s").stdout == shell.run("check", "--policy", "kubernetes").stdout
    assert "kubernetes.yaml" in shell.run("check", "k8s", code=5).stdout
