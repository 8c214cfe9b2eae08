"""Run -> Recovery. For users, `broker.jobs` is also the Python API of managed jobs, imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from broker.api.jobs import cancel as cancel
    from broker.api.jobs import due_times as due_times
    from broker.api.jobs import launch as launch
    from broker.api.jobs import launch_pipeline as launch_pipeline
    from broker.api.jobs import logs as logs
    from broker.api.jobs import pause_schedule as pause_schedule
    from broker.api.jobs import queue as queue
    from broker.api.jobs import remove_schedule as remove_schedule
    from broker.api.jobs import resume_schedule as resume_schedule
    from broker.api.jobs import retry as retry
    from broker.api.jobs import retry_group as retry_group
    from broker.api.jobs import schedule as schedule
    from broker.api.jobs import schedules as schedules
    from broker.api.jobs import wait as wait
    from broker.api.jobs import why as why

__all__ = [
    "cancel",
    "due_times",
    "launch",
    "launch_pipeline",
    "logs",
    "pause_schedule",
    "queue",
    "remove_schedule",
    "resume_schedule",
    "retry",
    "retry_group",
    "schedule",
    "schedules",
    "wait",
    "why",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module `broker.jobs` has no `{name}`")
    import importlib

    found: object = getattr(importlib.import_module("broker.api.jobs"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
