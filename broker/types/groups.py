"""Job groups: tasks of one file that start together and receive each other's addresses (docs/GROUPS.md)."""

from __future__ import annotations

import re
from enum import StrEnum

from broker.frozen import frozen


class OnLoss(StrEnum):
    """The effect of a lost task on the other tasks of its group."""

    KEEP_GOING = "keep-going"
    RESTART_GROUP = "restart-group"


@frozen
class GroupRole:
    """The role of one task in its job group.

    `is_primary`: the group ends once all primary tasks have succeeded, and fails when one of them fails.
    `termination_delay_s`: seconds between the end of the primary tasks and the SIGTERM to this task, if it is not
    primary. `is_connected`: the tasks exchange data, so they are placed in one region.
    """

    name: str
    is_primary: bool = True
    on_loss: OnLoss = OnLoss.KEEP_GOING
    termination_delay_s: float = 0.0
    is_connected: bool = True

    @property
    def may_restart_group(self) -> bool:
        """Whether the loss of this task restarts all tasks of its group."""
        return self.on_loss is OnLoss.RESTART_GROUP

    @property
    def is_required(self) -> bool:
        """Whether the group cannot succeed without this task."""
        return self.is_primary or self.may_restart_group


def name_variable(task: str) -> str:
    """Return a task's name as part of a variable name: `rollout-1` becomes `ROLLOUT_1`."""
    return re.sub(r"[^A-Z0-9]", "_", task.upper())
