from __future__ import annotations

import errno
from pathlib import Path

import pytest

from broker.state.faults import explain_os_error


@pytest.mark.parametrize(
    ("error", "expected", "hint"),
    [
        (OSError("the mount went away"), "the mount went away", ""),
        (OSError(errno.ENOSPC, "No space left on device", "/state/home/state.db"), "No space left", "/state/home"),
        (OSError(errno.EROFS, "Read-only file system", "/state/home/state.db"), "Read-only", "/state/home"),
        (OSError(errno.EACCES, "Permission denied", "/state/home/state.db"), "Permission denied", "/state/home"),
    ],
)
def test_an_unusable_file_is_reported_with_the_reason(error: OSError, expected: str, hint: str) -> None:
    found = explain_os_error(error, default=Path("/state/other/file"))
    assert expected in found.message and "None" not in found.message
    assert hint in " ".join(found.hints)
    assert error.filename is not None or "/state/other/file" in found.message
