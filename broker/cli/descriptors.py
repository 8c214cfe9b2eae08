"""Raise the limit of open files, which is 1,024 in shells and system services."""

from __future__ import annotations

import contextlib
import resource

DESCRIPTORS = 65536


def allow_descriptors() -> None:
    """Raise the limit of this process as far as the system allows; where it refuses, the limit stays as it is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
