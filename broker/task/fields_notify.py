"""The fields of `notify`: the kinds of notifications about a managed job, and their receivers."""

from __future__ import annotations

from broker.task.shapes import Choice, Either, ListOf, Text
from broker.task.tables import Field, Table
from broker.types.notify import NotificationKind

_VARIABLE = r"env:BROKER_NOTIFY_[A-Z0-9_]{1,100}"
_KIND = Choice(words=tuple(each.value for each in NotificationKind))
_ADDRESS = Text(pattern=r"[^\s@,<>]+@[^\s@,<>]+", expected="an address like `ada@example.org`")

NOTIFY = Table(
    name="notify",
    about="Notifications about a managed job.",
    fields={
        "on": Field(
            shape=Either(shapes=(_KIND, ListOf(item=_KIND))),
            about="Which notifications to send (default: `ended`, `deadline`, `attention`). `ended` includes `failed`.",
            examples=(["failed", "preempted", "recovered"],),
        ),
        "webhook": Field(
            shape=Text(
                pattern=rf"https://[^\s@\x00-\x1f]+|{_VARIABLE}", is_hidden=True,
                expected="a URL that begins with `https://` and contains no login, or `env:BROKER_NOTIFY_...`",
            ),
            about="URL that receives JSON by `POST`.", examples=("https://example.org/broker",),
        ),
        "slack": Field(
            shape=Text(
                pattern=_VARIABLE, is_hidden=True,
                expected="`env:BROKER_NOTIFY_...`, because the URL of a Slack webhook is a secret",
            ),
            about="Variable of the daemon that contains the URL of a Slack incoming webhook.",
            examples=("env:BROKER_NOTIFY_SLACK",),
        ),
        "mail": Field(
            shape=Either(shapes=(_ADDRESS, ListOf(item=_ADDRESS))),
            about="Addresses; the mail server is set in `config.toml`.", examples=("ada@example.org",),
        ),
    },
)  # fmt: skip
