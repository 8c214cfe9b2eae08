"""Notifications about managed jobs: the kinds that exist, and what a task says about them."""

from __future__ import annotations

from enum import StrEnum

from broker.frozen import frozen


class NotificationKind(StrEnum):
    """The kinds of notifications. The values are the words of `notify: {on: [...]}`, and part of each message."""

    ENDED = "ended"  # whatever the result; a failure is of the kind below, but sent to those that want this one, too
    FAILED = "failed"
    PREEMPTED = "preempted"  # nodes were lost, for whatever reason
    RECOVERED = "recovered"
    DEADLINE = "deadline"  # it can no longer be met with the requested confidence
    ATTENTION = "attention"  # something that only a user can repair


@frozen
class NotifySpec:
    """Which notifications go where. None, and no addresses: as `[notify]` in `config.toml` says.

    `webhook` and `slack` are URLs, or `env:NAME` for a variable of the daemon, as a Slack URL is a secret.
    """

    on: tuple[NotificationKind, ...] | None = None
    webhook: str | None = None
    slack: str | None = None
    mail: tuple[str, ...] = ()
