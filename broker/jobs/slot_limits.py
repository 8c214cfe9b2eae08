"""The limits on live jobs, as `config.toml` states them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from broker.config import SETTINGS, Config, find_queue_settings
from broker.errors import UsageError
from broker.frozen import frozen


@frozen
class SlotLimits:
    """How many jobs may be live at a time, in total and of each named project; None is unlimited."""

    total: int | None = None
    by_project: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_set(self) -> bool:
        """Whether any job may have to wait for a slot."""
        return self.total is not None or bool(self.by_project)

    def find(self, project: str) -> int | None:
        """Return the limit that a job of the project waits for: its project's own, else the total."""
        return self.by_project.get(project, self.total)


def read_slot_limits(config: Config) -> SlotLimits:
    """Read `max_live_jobs` and `[max_live_jobs_by_project]`. Raises UsageError that names an invalid setting."""
    settings = find_queue_settings(config)
    total = settings.get("max_live_jobs")
    by_project = settings.get("max_live_jobs_by_project", {})
    if not isinstance(by_project, dict):
        raise UsageError(
            f"{config.home / SETTINGS}: `max_live_jobs_by_project` must be a table, not `{by_project}`",
            hints=("write `[max_live_jobs_by_project]`, and below it a line such as `vision = 4`",),
        )
    return SlotLimits(
        total=None if total is None else _read_count(config, "max_live_jobs", total),
        by_project={name: _read_count(config, f"max_live_jobs_by_project.{name}", by_project[name])
                    for name in by_project},
    )  # fmt: skip


def _read_count(config: Config, name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{config.home / SETTINGS}: `{name}` must be a number from 1, not `{value}`")
    return value
