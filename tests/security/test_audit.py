"""The audit fails on findings without a reason and on vulnerable packages, and reports when it could not run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.security.audit import ACCEPTED, TURNED_OFF, check_code, check_packages


def make_results(changes: dict[tuple[str, str], int]) -> list[dict[str, Any]]:
    counts = {key: count for key, (count, _) in ACCEPTED.items()} | changes
    return [
        {"test_id": rule, "filename": file, "line_number": number, "issue_text": "x"}
        for (rule, file), count in counts.items()
        for number in range(count)
    ]


def test_audit_passes_with_accepted_findings() -> None:
    assert check_code(make_results({})) == []
    assert all(why for _, why in ACCEPTED.values()) and all(TURNED_OFF.values())


def test_audit_fails_on_a_new_finding() -> None:
    (problem,) = check_code(make_results({("B602", "broker/api.py"): 1}))
    assert "B602" in problem and "broker/api.py:0" in problem


def test_reason_without_a_finding_fails() -> None:
    (problem,) = check_code(make_results({("B406", "broker/cli/svg.py"): 0}))
    assert "mend `ACCEPTED`" in problem


def test_audit_fails_on_a_vulnerable_package() -> None:
    packages = [
        {"name": "a", "version": "1", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2"]}]},
        {"name": "b", "version": "1", "vulns": []},
    ]
    assert check_packages(json.dumps({"dependencies": packages}), "") == ["a 1: PYSEC-1, fixed in ['2']"]


@pytest.mark.parametrize(
    ("stdout", "stderr"),
    [
        ("", "requests.exceptions.ConnectionError: no route"),
        (json.dumps({"dependencies": [{"name": "a", "skip_reason": "Dependency not found on PyPI"}]}), ""),
    ],
)
def test_missing_service_is_reported_and_passes(stdout: str, stderr: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_packages(stdout, stderr) == []
    assert "skipped" in capsys.readouterr().out


def test_audit_fails_if_its_tool_breaks() -> None:
    assert check_packages("", "Traceback: something else")
