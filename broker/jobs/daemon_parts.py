"""What the daemon runs: controllers of jobs and services, the notifier, the scheduler."""

from __future__ import annotations

import asyncio
from typing import Protocol


class Controller(Protocol):
    """A controller that the daemon steps; `step` returns seconds until the next step."""

    async def step(self) -> float:
        """Take one idempotent step; return seconds until the next one. A FencedError ends the controller."""

    async def rest(self, wait_s: float, wake: asyncio.Event) -> None:
        """Wait until the next step is due: about `wait_s`, or until `wake` is set."""
        ...


class Notifies(Protocol):
    """Delivers notifications about jobs; stepped by the daemon that does the housekeeping."""

    @property
    def is_busy(self) -> bool:
        """Whether notifications of recent events wait, so that the daemon should not leave yet."""
        ...

    def step(self) -> float:
        """Start what is due, without waiting for it; return seconds until the next step. Raises FencedError."""
        ...

    async def rest(self) -> None:
        """Stop all deliveries."""


class StartsSchedules(Protocol):
    """Starts the jobs of schedules; stepped by the daemon that does the housekeeping."""

    def step(self) -> float:
        """Submit what is due; return seconds until the next step. Raises FencedError, StateError."""
        ...
