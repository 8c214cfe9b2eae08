"""Users authenticated by a proxy in front of the server, such as oauth2-proxy or an identity-aware proxy."""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from broker.errors import UsageError
from broker.frozen import frozen
from broker.server.tokens import USER
from broker.state.people import Role, Token
from broker.types import Secret

SECRET_HEADER = "Broker-Proxy-Secret"
SECRET_MIN = 16


@frozen
class TrustedProxy:
    """A proxy at `addresses` that sends the user in `header`, and a secret in a separate header."""

    header: str
    addresses: tuple[str, ...]
    secret: Secret
    role: Role

    @classmethod
    def read(cls, *, header: str, addresses: Sequence[str], secret_file: Path | None, role: Role) -> TrustedProxy:
        """Check the options. Raises UsageError for an invalid one."""
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*", header) or header.lower() in ("authorization", "host"):
            raise UsageError(f"invalid header name `{header}`", hints=["for example `X-Forwarded-User`"])
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
        return cls(header=header, addresses=found, secret=Secret(value=secret), role=role)

    def find_user(self, peer: str | None, headers: Mapping[str, str]) -> Token | None:
        """Return the user of a request; None unless it comes from the proxy, with its secret and a valid name."""
        user = headers.get(self.header, "")
        given = headers.get(SECRET_HEADER, "")
        if not peer or str(_unmap(peer)) not in self.addresses:
            return None
        if not hmac.compare_digest(given.encode(), self.secret.value.encode()) or not re.fullmatch(USER, user):
            return None
        return Token(id=0, user=user, role=self.role, created_s=0.0, expires_s=None, revoked_s=None)


def _unmap(peer: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the address of a peer; `::ffff:10.0.0.1` is 10.0.0.1."""
    found = ipaddress.ip_address(peer.partition("%")[0])
    return found.ipv4_mapped or found if isinstance(found, ipaddress.IPv6Address) else found
