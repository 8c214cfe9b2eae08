"""The two routes of a login through an OIDC issuer.

The first returns what the client needs to begin, the second returns a token.

A nonce binds them together (`nonces.py`). Logins to the pages (`page_login.py`) end in the same way.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from broker.app.container import Context
from broker.client.login import is_loopback
from broker.errors import DeniedError, InvalidRequestError, UsageError
from broker.frozen import frozen
from broker.server.nonces import Nonces
from broker.server.oidc import Fetches, Identity, Issuer, fetch_json
from broker.server.oidc_settings import OidcSettings, read_oidc_settings
from broker.server.tokens import CreatedToken, create_token

FIELDS = ("code", "verifier", "redirect_uri", "nonce")
TEXT_MAX = 4096
HOURS_PER_DAY = 24.0
UNKNOWN = "(unknown)"


@frozen
class LoginParameters:
    """The values that a client sends to the issuer."""

    authorization_endpoint: str
    client_id: str
    scope: str
    nonce: str


@frozen
class LoginProof:
    """The proof of a completed login: the issuer's code, and the secrets of the client that began it."""

    code: str
    verifier: str
    redirect_uri: str
    nonce: str  # of the ID token


class IssuerLogins:
    """Exchanges codes of the issuer for tokens of this server, for one client of the issuer."""

    def __init__(self, context: Context, *, fetch: Fetches) -> None:
        self._context = context
        self._fetch = fetch
        self._issuer: Issuer | None = None

    def get_issuer(self, settings: OidcSettings) -> Issuer:
        """Return the issuer of these settings, with its cached documents."""
        if self._issuer is None or self._issuer.settings != settings:
            self._issuer = Issuer(settings, clock=self._context.clock, fetch=self._fetch)
        return self._issuer

    async def complete(
        self, issuer: Issuer, proof: LoginProof, nonces: Nonces, nonce: str
    ) -> tuple[Identity, CreatedToken]:
        """Verify a login, spend its `nonce`, and create an expiring token of this server.

        Raises AuthError, DeniedError. Logins of the issuer's users are audited.
        """
        token = await issuer.exchange(code=proof.code, verifier=proof.verifier, redirect_uri=proof.redirect_uri)
        try:
            identity = await issuer.verify(token, nonce=proof.nonce)
        except DeniedError:  # only for users of the issuer, so strangers cannot fill the audit log
            self._context.store.audit.add(user=UNKNOWN, verb="login", target="", outcome=DeniedError.__name__)
            raise
        nonces.spend(nonce)
        made = create_token(
            self._context.store, user=identity.user, role=identity.role, project=identity.project,
            days=issuer.settings.token_hours / HOURS_PER_DAY,
        )  # fmt: skip
        self._context.store.audit.add(user=identity.user, verb="login", target=f"token {made.id}", outcome="done")
        return identity, made


class BrowserLogins:
    """The logins of `broker login` on one server; without `[oidc]` in `config.toml`, all are refused."""

    def __init__(self, context: Context, *, fetch: Fetches = fetch_json) -> None:
        self._context = context
        self._logins = IssuerLogins(context, fetch=fetch)
        self._nonces = Nonces(context.clock, hints=["run `broker login URL` again"])

    def _get_issuer(self) -> Issuer:
        settings = read_oidc_settings(self._context.config.home)
        if settings is None:
            raise UsageError(
                "this server has no login through a browser",
                hints=["ask an administrator for a token, then `broker login URL --token-file FILE`"],
            )
        return self._logins.get_issuer(settings)

    async def begin(self) -> LoginParameters:
        """Return the values with which a client sends its user to the issuer. Raises UsageError without an issuer."""
        issuer = self._get_issuer()
        endpoint = await issuer.find_endpoint("authorization_endpoint")
        return LoginParameters(
            authorization_endpoint=endpoint, client_id=issuer.settings.client_id, scope=issuer.settings.scopes,
            nonce=self._nonces.make(),
        )  # fmt: skip

    async def finish(self, body: dict[str, Any]) -> tuple[Identity, str]:
        """Exchange the code of a login for an expiring token of this server; return the identity and the token's value.

        Raises AuthError, DeniedError, InvalidRequestError.
        """
        issuer = self._get_issuer()
        code, verifier, redirect_uri, nonce = (_read_text(body, name) for name in FIELDS)
        parts = urlsplit(redirect_uri)
        if parts.scheme != "http" or not is_loopback(parts.hostname or ""):
            raise InvalidRequestError("`redirect_uri` must be on the client's own machine")
        self._nonces.check(nonce)
        proof = LoginProof(code=code, verifier=verifier, redirect_uri=redirect_uri, nonce=nonce)
        identity, made = await self._logins.complete(issuer, proof, self._nonces, nonce)
        return identity, made.value.value


def _read_text(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= TEXT_MAX:
        raise InvalidRequestError(f"`{name}` must be text")
    return value
