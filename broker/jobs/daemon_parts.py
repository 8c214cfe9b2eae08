"""Protocols of the parts that the daemon runs: controllers of jobs and services, the notifier, the scheduler."""

from __future__ import annotations

import asyncio
from typing import Protocol


class Controller(Protocol):
    """A controller that the daemon steps."""

    async def step(self) -> float:
        """Take one idempotent step; return seconds until the next one. A FencedError ends the controller."""

    async def rest(self, wait_s: float, wake: asyncio.Event) -> None:
        """Wait until the next step is due: about `wait_s`, or until `wake` is set."""
        ...


class Notifies(Protocol):
    """Delivers notifications about jobs; stepped by the daemon that does housekeeping."""

    @property
    def is_busy(self) -> bool:
        """Whether notifications of recent events are pending, so that the daemon should not exit yet."""
        ...

    def step(self) -> float:
        """Start due deliveries without waiting for them; return seconds until the next step. Raises FencedError."""
        ...

    async def rest(self) -> None:
        """Stop all deliveries."""


class StartsSchedules(Protocol):
    """Starts the jobs of schedules; stepped by the daemon that does housekeeping."""

    def step(self) -> float:
        """Submit the jobs that are due; return seconds until the next step. Raises FencedError, StateError."""
        ...
