"""The balancer may open as many files as the system allows, also where no daemon has raised the limit."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from broker.cli.balancer import balancer
from broker.errors import StateError


def test_balancer_raises_the_limit_of_open_files(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
        with pytest.raises(StateError):  # there is no routing file
            balancer(tmp_path)
        raised, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert raised > 512
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
