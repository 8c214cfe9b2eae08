"""What `broker check` found out about a cloud, in the words of whoever looked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from broker.clock import Clock
from broker.config import Config
from broker.nouns import noun


@noun
class Finding:
    """One thing that was looked at. `command` mends it; where `is_needed` is False it stands in nobody's way."""

    name: str
    is_ok: bool
    note: str
    command: str = ""
    is_needed: bool = True


class Inspector(Protocol):
    """What a module in the table `CHECKS` has."""

    async def inspect(self, config: Config, *, clock: Clock) -> Sequence[Finding]:
        """In the order in which things depend on each other; what cannot be asked any more is left out.

        Raises CloudError where the cloud cannot be reached.
        """

    def write_policy(self, config: Config) -> str:
        """The least that the login must be allowed, as a file that the cloud's own tool takes."""


@runtime_checkable
class CanGlance(Protocol):
    """Inspectors for which a close look is slow: where all clouds are listed, this is asked instead."""

    async def glance(self, config: Config, *, clock: Clock) -> Sequence[Finding]: ...
