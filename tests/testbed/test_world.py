"""The message where no sealed network of hosts can be made."""

from __future__ import annotations

import os
import sys
import tempfile

import pytest

from tests.testbed import world


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="elsewhere another obstacle comes first")
def test_a_folder_for_temporary_files_that_hosts_cannot_see_is_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "PACKAGES", {})
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    assert "set TMPDIR elsewhere" in world.find_obstacle()
    monkeypatch.setattr(tempfile, "tempdir", "/var/tmp")
    assert "TMPDIR" not in world.find_obstacle()
