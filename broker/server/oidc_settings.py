"""The table `[oidc]` of `config.toml`: the issuer that authenticates users, and the mapping of its claims."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from broker.client.login import is_loopback
from broker.config import SETTINGS, find_table
from broker.errors import UsageError
from broker.frozen import frozen
from broker.server.tokens import USER
from broker.state.people import Role
from broker.types import Secret

HOURS, HOURS_MAX = 12.0, 24.0 * 90


@frozen
class OidcSettings:
    """Settings for logins through an OIDC issuer.

    `user_claim` is the claim with the user's name; `role_claim` holds values that `roles` maps. A user without a mapped
    value gets `default_role`, or is refused if that is None. `projects` maps values of `project_claim` to projects, in
    order of precedence; a user without a mapped value gets `default_project`. `allowed_domains`: of the verified e-mail
    address; empty means any. `pages_url`: this server's address in browsers; empty means that of the request.
    `pages_client_id`: the client of the pages, if the issuer has a separate client for web applications; empty means
    `client_id` with its secret.
    """

    issuer: str
    client_id: str
    client_secret: Secret | None = None
    user_claim: str = "email"
    role_claim: str = "groups"
    roles: Mapping[str, Role] = field(default_factory=dict)
    default_role: Role | None = None
    project_claim: str = "groups"
    projects: Mapping[str, str] = field(default_factory=dict)
    default_project: str = ""
    allowed_domains: tuple[str, ...] = ()
    denied_users: tuple[str, ...] = ()
    scopes: str = "openid email profile"
    token_hours: float = HOURS
    pages_url: str = ""
    pages_client_id: str = ""
    pages_client_secret: Secret | None = None

    def for_pages(self) -> OidcSettings:
        """Return the settings with the client of the pages as the client."""
        if not self.pages_client_id:
            return self
        return replace(self, client_id=self.pages_client_id, client_secret=self.pages_client_secret)


class _PagesTable(msgspec.Struct, forbid_unknown_fields=True):
    url: str = ""
    client_id: str = ""
    client_secret_file: str | None = None


class _OidcTable(msgspec.Struct, forbid_unknown_fields=True):
    issuer: str
    client_id: str
    client_secret_file: str | None = None
    user_claim: str = "email"
    role_claim: str = "groups"
    roles: dict[str, Role] = {}
    default_role: Role | None = None
    project_claim: str | None = None
    projects: dict[str, str] = {}
    default_project: str = ""
    allowed_domains: list[str] = []
    denied_users: list[str] = []
    scopes: str = "openid email profile"
    token_hours: float = HOURS
    pages: _PagesTable = msgspec.field(default_factory=_PagesTable)


def read_oidc_settings(home: Path) -> OidcSettings | None:
    """Read the table; None without one. Raises UsageError, which names the setting."""
    found = find_table(home, "oidc")
    if found is None:
        return None
    path = f"{home / SETTINGS}: [oidc]"
    try:
        table = msgspec.convert(found, type=_OidcTable)
    except msgspec.ValidationError as error:
        raise UsageError(f"{path}: {error}") from None
    check_endpoint(table.issuer, f"{path}: `issuer`")
    if not table.roles and table.default_role is None:
        raise UsageError(
            f"{path}: no user could log in without `roles` or `default_role`",
            hints=['write `[oidc.roles]`, and below it a line such as `ml-team = "user"`'],
        )
    if "openid" not in table.scopes.split():
        raise UsageError(f"{path}: `scopes` must contain `openid`")
    if not 0 < table.token_hours <= HOURS_MAX:
        raise UsageError(f"{path}: `token_hours` must be positive and at most {HOURS_MAX:g}")
    for project in (*table.projects.values(), *filter(None, [table.default_project])):
        if not re.fullmatch(USER, project):
            raise UsageError(f"{path}: invalid project name `{project}`")
    _check_pages(table.pages, path)
    return OidcSettings(
        issuer=table.issuer, client_id=table.client_id,
        client_secret=_read_secret(home, path, table.client_secret_file),
        user_claim=table.user_claim, role_claim=table.role_claim, roles=table.roles, default_role=table.default_role,
        project_claim=table.project_claim or table.role_claim, projects=table.projects,
        default_project=table.default_project,
        allowed_domains=tuple(each.lower() for each in table.allowed_domains),
        denied_users=tuple(table.denied_users), scopes=table.scopes, token_hours=table.token_hours,
        pages_url=table.pages.url, pages_client_id=table.pages.client_id,
        pages_client_secret=_read_secret(home, path, table.pages.client_secret_file),
    )  # fmt: skip


def _check_pages(table: _PagesTable, path: str) -> None:
    if table.url:
        check_endpoint(table.url, f"{path}: `url` in `[oidc.pages]`")
        if urlsplit(table.url).path.strip("/") or urlsplit(table.url).query:
            raise UsageError(f"{path}: `url` in `[oidc.pages]` must have no path: the pages are at the root")
    if table.client_secret_file is not None and not table.client_id:
        raise UsageError(f"{path}: `client_secret_file` in `[oidc.pages]` requires `client_id` there")


def _read_secret(home: Path, path: str, name: str | None) -> Secret | None:
    if name is None:
        return None
    file = home / name
    try:
        return Secret(value=file.read_text().strip())
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot read `client_secret_file`: {error}") from None


def check_endpoint(url: str, name: str) -> None:
    """Raise UsageError unless the URL uses HTTPS or refers to this machine."""
    try:
        parts = urlsplit(url)
        is_safe = bool(parts.hostname) and (
            parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname or ""))
        )
    except ValueError:
        is_safe = False
    if not is_safe:
        raise UsageError(f"{name} must be a URL that begins with `https://`, not `{url}`")
