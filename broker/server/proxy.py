"""Users authenticated by a proxy in front of the server, such as oauth2-proxy or an identity-aware proxy."""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path

import msgspec

from broker.config import SETTINGS, find_table
from broker.errors import UsageError
from broker.frozen import frozen
from broker.server.tokens import USER
from broker.state.people import Role, Token
from broker.types import Secret

SECRET_HEADER = "Broker-Proxy-Secret"
SECRET_MIN = 16
_HEADER = r"[A-Za-z][A-Za-z0-9-]*"
_OTHERS = ("authorization", "host", SECRET_HEADER.lower())  # headers with another meaning


class ProxyProjects(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The table `[trusted_proxy]` of `config.toml`: the projects of the users that the proxy names.

    `projects` maps groups in `groups_header`, separated by commas, to projects, in order of precedence, as
    `[oidc.projects]` does. A user without a mapped group gets `default_project`.
    """

    groups_header: str = ""
    projects: dict[str, str] = {}
    default_project: str = ""

    def find(self, headers: Mapping[str, str]) -> str:
        """Return the project of a request's user; empty if it has none."""
        given = headers.get(self.groups_header, "") if self.groups_header else ""
        groups = {each.strip() for each in given.split(",")}
        return next((name for group, name in self.projects.items() if group in groups), self.default_project)


def read_projects(home: Path) -> ProxyProjects:
    """Read the table. Raises UsageError, which names the setting."""
    path = f"{home / SETTINGS}: [trusted_proxy]"
    try:
        table = msgspec.convert(find_table(home, "trusted_proxy") or {}, type=ProxyProjects)
    except msgspec.ValidationError as error:
        raise UsageError(f"{path}: {error}") from None
    if table.projects and not table.groups_header:
        raise UsageError(
            f"{path}: `projects` requires `groups_header`", hints=['for example `groups_header = "X-Forwarded-Groups"`']
        )
    if table.groups_header:
        _check_header(table.groups_header, f"{path}: ")
    for project in (*table.projects.values(), *filter(None, [table.default_project])):
        if not re.fullmatch(USER, project):
            raise UsageError(f"{path}: invalid project name `{project}`")
    return table


def _check_header(name: str, path: str = "") -> None:
    if not re.fullmatch(_HEADER, name) or name.lower() in _OTHERS:
        raise UsageError(f"{path}invalid header name `{name}`", hints=["for example `X-Forwarded-User`"])


@frozen
class TrustedProxy:
    """A proxy at `addresses` that sends the user in `header`, and a secret in a separate header.

    `projects` finds the project of a user, whose limits, slots and fair share then apply.
    """

    header: str
    addresses: tuple[str, ...]
    secret: Secret
    role: Role
    projects: ProxyProjects = field(default_factory=ProxyProjects)

    @classmethod
    def read(
        cls, *, header: str, addresses: Sequence[str], secret_file: Path | None, role: Role, projects: ProxyProjects
    ) -> TrustedProxy:
        """Check the options. Raises UsageError for an invalid one."""
        _check_header(header)
        if header.lower() == projects.groups_header.lower():
            raise UsageError(f"`{header}` cannot name both the user and the groups")
        if not addresses or secret_file is None:
            raise UsageError(
                "`--trusted-proxy-header` requires `--trusted-proxy` and `--trusted-proxy-secret-file`",
                hints=[f"the proxy must send the secret in `{SECRET_HEADER}`, and remove that header from requests"],
            )
        try:
            found = tuple(str(ipaddress.ip_address(each)) for each in addresses)
        except ValueError as error:
            raise UsageError(f"`--trusted-proxy` must be an IP address: {error}") from None
        try:
            secret = secret_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read {secret_file}: {error}") from None
        if len(secret) < SECRET_MIN:
            raise UsageError(
                f"the secret in {secret_file} is shorter than {SECRET_MIN} characters",
                hints=["write a random one: `openssl rand -hex 32`"],
            )
        return cls(header=header, addresses=found, secret=Secret(value=secret), role=role, projects=projects)

    def find_user(self, peer: str | None, headers: Mapping[str, str]) -> Token | None:
        """Return the user of a request; None unless it comes from the proxy, with its secret and a valid name."""
        user = headers.get(self.header, "")
        given = headers.get(SECRET_HEADER, "")
        if not peer or str(_unmap(peer)) not in self.addresses:
            return None
        if not hmac.compare_digest(given.encode(errors="replace"), self.secret.value.encode()) or not re.fullmatch(
            USER, user
        ):
            return None
        project = self.projects.find(headers)
        return Token(id=0, user=user, role=self.role, created_s=0.0, expires_s=None, revoked_s=None, project=project)


def _unmap(peer: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the address of a peer; `::ffff:10.0.0.1` is 10.0.0.1."""
    found = ipaddress.ip_address(peer.partition("%")[0])
    return found.ipv4_mapped or found if isinstance(found, ipaddress.IPv6Address) else found
