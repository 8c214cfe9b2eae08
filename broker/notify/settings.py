"""Read the `[notify]` table of `config.toml`: kinds of notifications, their sinks, and the mail server."""

from __future__ import annotations

import ipaddress
import re
from typing import Literal

import msgspec

from broker.config import SETTINGS, Config, find_notify, read_notify_variable
from broker.errors import UsageError
from broker.frozen import frozen
from broker.types import NotificationKind, NotifySpec, Secret

DEFAULT_KINDS = (NotificationKind.ENDED, NotificationKind.DEADLINE, NotificationKind.ATTENTION)
ADDRESS = r"[^\s@,<>]+@[^\s@,<>]+"
VARIABLE = r"env:BROKER_NOTIFY_[A-Z0-9_]+"


@frozen
class SmtpServer:
    """A mail server. `password` may be `env:BROKER_NOTIFY_...`."""

    host: str
    sender: str
    port: int = 587
    security: Literal["starttls", "tls", "none"] = "starttls"
    user: str = ""
    password: Secret = Secret(value="")


@frozen
class NotifySettings:
    """The settings of one installation: `spec` applies to every job, except for fields that its task sets.

    `allowed_networks`: networks of the server's own machine that the webhooks of its users may reach (`posting.py`).
    """

    spec: NotifySpec = NotifySpec()
    smtp: SmtpServer | None = None
    allowed_networks: tuple[str, ...] = ()


class _Smtp(msgspec.Struct, forbid_unknown_fields=True):
    host: str
    sender: str
    port: int = 587
    security: Literal["starttls", "tls", "none"] = "starttls"
    user: str = ""
    password: str = ""


class _Table(msgspec.Struct, forbid_unknown_fields=True):
    on: list[NotificationKind] | None = None
    webhook: str | None = None
    slack: str | None = None
    mail: str | list[str] = []
    allowed_networks: list[str] = []
    smtp: _Smtp | None = None


def read_settings(config: Config) -> NotifySettings:
    """Read the table; return the defaults if there is none. Raises UsageError, whose text never shows a secret."""
    found = find_notify(config)
    if found is None:
        return NotifySettings()
    path = f"{config.home / SETTINGS}: [notify]"
    try:
        table = msgspec.convert(found, type=_Table)
    except msgspec.ValidationError as error:
        raise UsageError(f"{path}: {error}") from None
    mail = (table.mail,) if isinstance(table.mail, str) else tuple(table.mail)
    for name, url in (("webhook", table.webhook), ("slack", table.slack)):
        if url is not None and not re.fullmatch(rf"https?://\S+|{VARIABLE}", url):
            raise UsageError(f"{path}: `{name}` must be a URL, or `env:BROKER_NOTIFY_...` for a variable of the daemon")
    if not all(re.fullmatch(ADDRESS, each) for each in mail):
        raise UsageError(f"{path}: `mail` must be an address like `ada@example.org`, or a list of them")
    for network in table.allowed_networks:
        try:
            ipaddress.ip_network(network)
        except ValueError as error:
            raise UsageError(f"{path}: `allowed_networks`: {error}") from None
    smtp = table.smtp
    if smtp is not None and smtp.password and smtp.security == "none":
        hint = 'write `security = "starttls"` or `"tls"`'
        raise UsageError(f"{path}: the password would be sent to `{smtp.host}` in clear text", hints=[hint])
    spec = NotifySpec(
        on=None if table.on is None else tuple(table.on), webhook=table.webhook, slack=table.slack, mail=mail
    )
    server = None if smtp is None else SmtpServer(
        host=smtp.host, sender=smtp.sender, port=smtp.port, security=smtp.security, user=smtp.user,
        password=Secret(value=smtp.password),
    )  # fmt: skip
    check_mail(spec, NotifySettings(smtp=server))
    return NotifySettings(spec=spec, smtp=server, allowed_networks=tuple(table.allowed_networks))


def check_mail(spec: NotifySpec, settings: NotifySettings) -> None:
    """Raise UsageError if mail is requested and no server is configured."""
    if spec.mail and settings.smtp is None:
        raise UsageError(
            "notifications by mail require a mail server",
            hints=['add `[notify.smtp]` with `host = "..."` and `sender = "..."` to `config.toml` in the state folder'],
        )


def resolve(text: str) -> str:
    """Return the text, or the value of the variable that it names. Raises UsageError if the variable is not set."""
    if not re.fullmatch(VARIABLE, text):
        return text
    name = text.removeprefix("env:")
    value = read_notify_variable(name)
    if not value:
        raise UsageError(
            f"the variable {name} is not set in the environment of the daemon",
            hints=["set it, and start the daemon or the server again"],
        )
    return value
