"""The functions that each test or play enters: as a pytest plugin, it writes one JSON line per passing test."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mutation.limited import measure_descendants_s


class Reader:
    """A reader of what the recorder of `shadow.py` logged of one test.

    This process reports each function again for each test.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._start = 0

    def begin(self) -> None:
        recorder = getattr(sys, "_reach", None)
        if recorder is not None:
            recorder.seen.clear()
        self._start = self._log.stat().st_size if self._log.exists() else 0

    def read(self) -> list[str]:
        """Read names such as `broker/jobs/monitor.py Watch.hear`, sorted."""
        if not self._log.exists():
            return []
        with self._log.open("rb") as file:
            file.seek(self._start)
            lines = file.read().decode(errors="replace").splitlines()
        return sorted({_name_function(line) for line in lines if "\t" in line})


def _name_function(line: str) -> str:
    path, _, function = line.rpartition("\t")
    is_sent = "/agent/agent" in path  # on a node, or where a test has put it
    package = "broker" if "/broker/" in path else "trainers"
    file = f"broker/agent/{Path(path).name}" if is_sent else f"{package}/{path.rpartition(f'/{package}/')[2]}"
    plain = [part for part in function.split(".") if part not in ("<locals>", "<lambda>", "<genexpr>", "<listcomp>")]
    return f"{file} {'.'.join(part for part in plain if not part.startswith('<'))}"


def measure_cpu_s() -> float:
    """Measure the processor time of this process and of its children, those included that outlive a test."""
    return sum(os.times()[:4]) + measure_descendants_s()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--reach-log", help="what the recorder writes")
    parser.addoption("--reach-to", help="a JSON line a test")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    reader = Reader(Path(item.config.getoption("--reach-log")))
    reader.begin()
    begun_s, failed = measure_cpu_s(), item.session.testsfailed
    try:
        return (yield)
    finally:
        line = {"name": item.nodeid, "cpu_s": measure_cpu_s() - begun_s, "functions": reader.read()}
        if item.session.testsfailed == failed:  # one that fails without a mutant detects none
            with Path(item.config.getoption("--reach-to")).open("a") as file:
                file.write(json.dumps(line) + "\n")
