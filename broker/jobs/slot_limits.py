"""The limits on live jobs, as set in `config.toml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from broker.config import SETTINGS, Config, find_queue_settings
from broker.errors import UsageError
from broker.frozen import frozen
from broker.task.measures import Duration

PREEMPT_AFTER = "5m"


@frozen
class SlotLimits:
    """Maximum number of live jobs, in total and for each named project; None is unlimited."""

    total: int | None = None
    by_project: Mapping[str, int] = field(default_factory=dict)
    preempt_after_s: float | None = None  # wait before a job takes the slot of a lower-priority one; None: never

    @property
    def is_set(self) -> bool:
        """Whether any job may have to wait for a slot."""
        return self.total is not None or bool(self.by_project)

    def find(self, project: str) -> int | None:
        """Return the limit that applies to a job of the project: the project's own, else the total."""
        return self.by_project.get(project, self.total)


def read_slot_limits(config: Config) -> SlotLimits:
    """Read the settings of the queue. Raises UsageError, which names the invalid setting."""
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
        preempt_after_s=_read_preempt_after_s(config, settings),
    )  # fmt: skip


def _read_preempt_after_s(config: Config, settings: Mapping[str, object]) -> float | None:
    is_on = settings.get("preempt_lower_priority", False)
    if not isinstance(is_on, bool):
        raise UsageError(f"{config.home / SETTINGS}: `preempt_lower_priority` must be true or false, not `{is_on}`")
    value = settings.get("preempt_after", PREEMPT_AFTER)
    found_s: float | None = Duration(bare_unit="s").read_value(value)
    if found_s is None:
        raise UsageError(f'{config.home / SETTINGS}: `preempt_after` must be a duration such as "10m", not `{value}`')
    return found_s if is_on else None


def _read_count(config: Config, name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{config.home / SETTINGS}: `{name}` must be a number of at least 1, not `{value}`")
    return value
