"""Notifications about managed jobs: their kinds, and the settings of a task."""

from __future__ import annotations

from enum import StrEnum

from broker.frozen import frozen


class NotificationKind(StrEnum):
    """The kinds of notifications. The values are the words of `notify: {on: [...]}`, and part of each message."""

    ENDED = "ended"  # with any result; a failure is of the next kind, but is also sent to receivers of this one
    FAILED = "failed"
    PREEMPTED = "preempted"  # nodes were lost, for any reason
    RECOVERED = "recovered"
    DEADLINE = "deadline"  # the deadline can no longer be met with the requested confidence
    ATTENTION = "attention"  # a problem that only a user can fix


@frozen
class NotifySpec:
    """The kinds and receivers of notifications. None, and no addresses: as set by `[notify]` in `config.toml`.

    `webhook` and `slack` are URLs, or `env:NAME` for a variable of the daemon, because a Slack URL is a secret.
    """

    on: tuple[NotificationKind, ...] | None = None
    webhook: str | None = None
    slack: str | None = None
    mail: tuple[str, ...] = ()
