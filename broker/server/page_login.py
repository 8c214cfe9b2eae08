"""Logins of browsers to the pages through an OIDC issuer: authorization code, PKCE, and a redirect to this server.

    GET /login/issuer    cookie: nonce N    302 to the issuer: state, nonce and code challenge, all derived from N
    GET /login/callback  cookie: N, code, state    the code and the verifier of N for an ID token with the nonce of N

Nothing is stored before a login succeeds. N is in a cookie of the browser that began the login and is not sent anywhere
else, so a code or a callback of another browser is useless here. N is accepted once.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
from collections.abc import Mapping
from urllib.parse import urlencode, urlsplit

from broker.app.container import Context
from broker.errors import AuthError, InvalidRequestError, UsageError
from broker.frozen import frozen
from broker.server.login import TEXT_MAX, IssuerLogins, LoginProof
from broker.server.nonces import Nonces
from broker.server.oidc import Fetches, Issuer, fetch_json
from broker.server.oidc_settings import read_oidc_settings
from broker.types import Secret

log = logging.getLogger(__name__)

START, CALLBACK = "/login/issuer", "/login/callback"
ERROR_MAX = 100
STATE, NONCE, VERIFIER = "state", "nonce", "verifier"  # purposes of the values derived from a cookie


@frozen
class LoginRedirect:
    """The URL at which a browser logs in, and the cookie that it needs when it returns."""

    url: str
    cookie: str
    is_secure: bool  # browsers reach this server through HTTPS


@frozen
class CompletedLogin:
    """The token of a completed login."""

    token: Secret
    is_secure: bool


class PageLogins:
    """The logins to the pages of one server. `own_url` is the server's address in the request."""

    def __init__(self, context: Context, *, fetch: Fetches = fetch_json) -> None:
        self._context = context
        self._logins = IssuerLogins(context, fetch=fetch)
        self._nonces = Nonces(context.clock, hints=["open the login page again"])

    def find_start(self) -> str | None:
        """Return the link that begins a login; None without `[oidc]`, or if it is invalid."""
        try:
            settings = read_oidc_settings(self._context.config.home)
        except UsageError as error:  # a token still works
            log.warning("%s", error.message)
            return None
        return None if settings is None else settings.pages_url.rstrip("/") + START

    async def begin(self, own_url: str) -> LoginRedirect:
        """Begin a login. Raises UsageError without an issuer, and AuthError or TransientError from the issuer."""
        issuer, redirect_uri = self._get_issuer(own_url)
        endpoint = await issuer.find_endpoint("authorization_endpoint")
        cookie = self._nonces.make()
        digest = hashlib.sha256(self._nonces.derive(cookie, VERIFIER).encode()).digest()
        query = {
            "response_type": "code", "client_id": issuer.settings.client_id, "redirect_uri": redirect_uri,
            "scope": issuer.settings.scopes, "state": self._nonces.derive(cookie, STATE),
            "nonce": self._nonces.derive(cookie, NONCE),
            "code_challenge": base64.urlsafe_b64encode(digest).decode().rstrip("="), "code_challenge_method": "S256",
        }  # fmt: skip
        joint = "&" if urlsplit(endpoint).query else "?"
        return LoginRedirect(
            url=f"{endpoint}{joint}{urlencode(query)}", cookie=cookie, is_secure=redirect_uri.startswith("https:")
        )

    async def finish(self, own_url: str, cookie: str, query: Mapping[str, str]) -> CompletedLogin:
        """Complete the login of the browser with this cookie. Raises AuthError, DeniedError, InvalidRequestError."""
        issuer, redirect_uri = self._get_issuer(own_url)
        self._nonces.check(cookie)
        state = query.get("state", "").encode(errors="replace")
        if not hmac.compare_digest(state, self._nonces.derive(cookie, STATE).encode()):
            raise AuthError("this response belongs to another login", hints=["open the login page again"])
        if query.get("iss", issuer.settings.issuer) != issuer.settings.issuer:  # RFC 9207
            raise AuthError("this response is from another issuer")
        if "code" not in query:
            raise AuthError(f"the issuer refused the login: {query.get('error', 'no code')[:ERROR_MAX]}")
        if len(query["code"]) > TEXT_MAX:
            raise InvalidRequestError("the code is too long")
        proof = LoginProof(
            code=query["code"], verifier=self._nonces.derive(cookie, VERIFIER), redirect_uri=redirect_uri,
            nonce=self._nonces.derive(cookie, NONCE),
        )  # fmt: skip
        _, made = await self._logins.complete(issuer, proof, self._nonces, cookie)
        return CompletedLogin(token=made.value, is_secure=redirect_uri.startswith("https:"))

    def _get_issuer(self, own_url: str) -> tuple[Issuer, str]:
        """Return the issuer, with the client of the pages, and the URL to which it redirects browsers."""
        settings = read_oidc_settings(self._context.config.home)
        if settings is None:
            raise UsageError("this server has no login through an issuer", hints=["log in with a token"])
        return self._logins.get_issuer(settings.for_pages()), (settings.pages_url or own_url).rstrip("/") + CALLBACK
