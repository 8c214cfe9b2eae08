"""Tokens of users: generated here, shown once, and stored as digests."""

from __future__ import annotations

import hashlib
import re
import secrets

from broker.errors import UsageError
from broker.frozen import frozen
from broker.state.people import Role, Token
from broker.state.store import Store
from broker.types import Secret

PREFIX = "broker_"  # allows scanners for leaked secrets to find tokens
USER = r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}"
DAY_S = 86400.0


@frozen
class CreatedToken:
    """A new token; its value cannot be read again."""

    id: int
    value: Secret


def create_token(store: Store, *, user: str, role: Role, days: float | None, project: str = "") -> CreatedToken:
    """Create a token that is valid for `days`; None: until revoked. Raises UsageError for an invalid name."""
    if not re.fullmatch(USER, user):
        raise UsageError(
            f"invalid user name `{user}`",
            hints=["use up to 64 letters, digits, `.`, `_`, `-` and `@`, such as an address"],
        )
    if project and not re.fullmatch(USER, project):
        raise UsageError(
            f"invalid project name `{project}`", hints=["use up to 64 letters, digits, `.`, `_`, `-` and `@`"]
        )
    value = PREFIX + secrets.token_urlsafe(32)
    expires_s = None if days is None else store.clock.now_s() + days * DAY_S
    token_id = store.tokens.add(digest=digest_token(value), user=user, role=role, expires_s=expires_s, project=project)
    return CreatedToken(id=token_id, value=Secret(value=value))


def find_token(store: Store, value: str) -> Token | None:
    """Return the valid token with this value; None if there is none. Comparing digests prevents timing attacks."""
    return store.tokens.find(digest_token(value))


def digest_token(value: str) -> str:
    """Return the SHA-256 of a token, in hexadecimal: the form in which tokens are stored.

    Bytes of a header that are not UTF-8 are surrogates, which a stranger may send and no token has.
    """
    return hashlib.sha256(value.encode(errors="replace")).hexdigest()
