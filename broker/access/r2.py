"""Access to Cloudflare's R2: broker cannot create keys for it, so a task must provide its own."""

from __future__ import annotations

from collections.abc import Sequence

from broker.access.base import Grant, Need
from broker.clock import Clock
from broker.config import Config
from broker.errors import AuthError
from broker.types import Task

KEYS = (
    "give the task keys limited to this bucket: `secrets: {R2_ACCESS_KEY_ID: , R2_SECRET_ACCESS_KEY: }` and "
    "`envs: {R2_ACCOUNT_ID: }`"
)


def make_granter(config: Config, *, clock: Clock) -> R2Granter:
    """Return the granter of this scheme."""
    return R2Granter()


class R2Granter:
    """Implement `Granter` for Cloudflare R2, which cannot issue grants."""

    def find_own(self, task: Task, cloud: str) -> str:
        """Return the task's own R2 credentials; "" if there are none."""
        if "R2_ACCESS_KEY_ID" in task.secrets or "R2_ACCESS_KEY_ID" in task.envs:
            return "the task's own `R2_ACCESS_KEY_ID`"
        return "the task's own `~/.cloudflare`" if any("~/.cloudflare" in mount for mount in task.file_mounts) else ""

    def issue(self, needs: Sequence[Need], *, endpoint: str = "") -> Grant:
        """Raise AuthError: R2 has no short-lived keys that broker could create."""
        raise AuthError("broker cannot create short-lived keys for R2", hints=(KEYS,))

    def prove(self, need: Need, grant: Grant) -> None:
        """Raise AssertionError, because there is no grant to prove."""
        raise AssertionError("R2 has no grants")
