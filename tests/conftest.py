"""Property tests draw the same examples in every run, so that a red run is about the change; `--hypothesis-profile
explore` draws fresh ones."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile("repeatable")
