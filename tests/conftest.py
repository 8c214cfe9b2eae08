"""Property tests draw the same examples in every run, so that a red run is about the change; `--hypothesis-profile
explore` draws fresh ones."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    """The node's agent makes its files private for its whole process, which in some tests is pytest itself."""
    before = os.umask(0o022)
    yield
    os.umask(before)
