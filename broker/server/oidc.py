"""Verify the ID tokens of an OIDC issuer (OpenID Connect Core 1.0, 3.1.3.7), and map them to users of this server.

    discovery document -> authorization code -> ID token -> signature by the issuer's keys -> claims -> user and role

Only asymmetric algorithms are accepted, regardless of a token's header, and only keys of the issuer's own set, so that
neither `none` nor an HMAC with a public key passes. An unknown key causes the set to be fetched again, at most once a
minute; a set older than an hour is never used.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from broker.clock import Clock
from broker.errors import AuthError, DeniedError, TransientError, UsageError
from broker.frozen import frozen
from broker.server.oidc_settings import OidcSettings, check_endpoint
from broker.server.tokens import USER
from broker.state.people import Role

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "EdDSA")
KEY_TYPES = ("RSA", "EC", "OKP")  # `oct` keys are shared secrets
LEEWAY_S = 60.0  # allowed difference between the clocks of the issuer and this server
ISSUED_S_MAX = 600.0  # maximum age; an ID token is used immediately
REFETCH_S, STALE_S = 60.0, 3600.0
TOKEN_MAX = 16_384
BODY_MAX = 2**20
ROLES = (Role.VIEWER, Role.USER, Role.ADMIN)
DISCOVERY = "/.well-known/openid-configuration"


class Fetches(Protocol):
    """HTTP to the issuer."""

    async def __call__(self, url: str, form: Mapping[str, str] | None = None) -> Mapping[str, Any]:
        """GET a JSON object, or POST a form for one. Raises AuthError if refused, TransientError without a response."""
        ...


@frozen
class Identity:
    """A user authenticated by the issuer, with the role and the project (may be empty) to which the claims map."""

    user: str
    role: Role
    project: str = ""


class Issuer:
    """The issuer of one server: its discovery document and its keys, cached for an hour."""

    def __init__(self, settings: OidcSettings, *, clock: Clock, fetch: Fetches) -> None:
        self.settings = settings
        self._clock = clock
        self._fetch = fetch
        self._document: tuple[float, Mapping[str, Any]] | None = None
        self._keys: tuple[float, Sequence[Mapping[str, Any]]] | None = None

    async def find_endpoint(self, name: str) -> str:
        """Return a URL of the discovery document. Raises AuthError for a document of another issuer."""
        now_s = self._clock.now_s()
        if self._document is None or not 0 <= now_s - self._document[0] < STALE_S:
            document = await self._fetch(self.settings.issuer.rstrip("/") + DISCOVERY)
            if document.get("issuer") != self.settings.issuer:
                raise AuthError(
                    f"the discovery document names the issuer `{document.get('issuer')}`",
                    hints=[f"the server expects `{self.settings.issuer}`: see `[oidc]` in its `config.toml`"],
                )
            self._document = (now_s, document)
        url = str(self._document[1].get(name, ""))
        try:
            check_endpoint(url, f"`{name}` of the issuer")
        except UsageError as error:
            raise AuthError(error.message) from None
        return url

    async def exchange(self, *, code: str, verifier: str, redirect_uri: str) -> str:
        """Exchange an authorization code for an ID token. Raises AuthError if the issuer refuses it."""
        form = {
            "grant_type": "authorization_code", "code": code, "code_verifier": verifier, "redirect_uri": redirect_uri,
            "client_id": self.settings.client_id,
        }  # fmt: skip
        if self.settings.client_secret is not None:
            form["client_secret"] = self.settings.client_secret.value
        answer = await self._fetch(await self.find_endpoint("token_endpoint"), form)
        token = answer.get("id_token")
        if not isinstance(token, str):
            raise AuthError("the issuer returned no ID token")
        return token

    async def verify(self, token: str, *, nonce: str) -> Identity:
        """Check the signature and all claims of an ID token.

        Raises AuthError, and DeniedError for a user without access.
        """
        header = read_header(token)
        claims = self._check_signature(token, await self._find_keys(header), str(header["alg"]))
        check_claims(claims, self.settings, nonce=nonce, now_s=self._clock.now_s())
        return identify(claims, self.settings)

    async def _find_keys(self, header: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Return the keys that match a header; fetch them again if none does, at most once a minute."""
        now_s = self._clock.now_s()
        if self._keys is None or not 0 <= now_s - self._keys[0] < STALE_S:
            self._keys = (now_s, await self._fetch_keys())
        found = _match_keys(self._keys[1], header)
        if not found and now_s - self._keys[0] >= REFETCH_S:
            self._keys = (now_s, await self._fetch_keys())
            found = _match_keys(self._keys[1], header)
        if not found:
            raise AuthError("the ID token is signed with a key that the issuer does not publish")
        return found

    async def _fetch_keys(self) -> Sequence[Mapping[str, Any]]:
        answer = await self._fetch(await self.find_endpoint("jwks_uri"))
        keys = answer.get("keys")
        return [each for each in keys if isinstance(each, dict)] if isinstance(keys, list) else []

    def _check_signature(self, token: str, keys: Sequence[Mapping[str, Any]], algorithm: str) -> Mapping[str, Any]:
        from joserfc import jwk, jwt
        from joserfc.errors import JoseError

        for data in keys:
            try:
                key = jwk.import_key(dict(data))
                return jwt.decode(token, key, algorithms=[algorithm]).claims
            except (JoseError, ValueError, TypeError, KeyError):
                continue
        raise AuthError("the signature of the ID token is invalid")


def read_header(token: str) -> Mapping[str, Any]:
    """Read the header of a signed token. Raises AuthError if it is malformed, or for unaccepted algorithms."""
    try:
        if len(token) > TOKEN_MAX or token.count(".") != 2:
            raise ValueError
        text = token.partition(".")[0]
        header = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        if not isinstance(header, dict):
            raise ValueError
    except ValueError:
        raise AuthError("the ID token is malformed") from None
    if header.get("alg") not in ALGORITHMS or "crit" in header:
        raise AuthError("the ID token is signed with an algorithm that is not accepted")
    return header


def _match_keys(keys: Sequence[Mapping[str, Any]], header: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the keys with the header's key ID; without one, all keys that may have signed the token."""
    fitting = [
        each for each in keys
        if each.get("kty") in KEY_TYPES and each.get("use", "sig") == "sig"
        and each.get("alg", header["alg"]) == header["alg"]
    ]  # fmt: skip
    return [each for each in fitting if each.get("kid") == header["kid"]] if "kid" in header else fitting


def check_claims(claims: Mapping[str, Any], settings: OidcSettings, *, nonce: str, now_s: float) -> None:
    """Raise AuthError for a token of another issuer, client or login, or a token that is not valid now."""
    audience = claims.get("aud")
    audiences = [audience] if isinstance(audience, str) else audience if isinstance(audience, list) else []
    if claims.get("iss") != settings.issuer:
        raise AuthError("the ID token is from another issuer")
    if settings.client_id not in audiences:
        raise AuthError("the ID token is for another audience")
    if (len(audiences) > 1 or "azp" in claims) and claims.get("azp") != settings.client_id:
        raise AuthError("the ID token was issued to another client")
    if not nonce or claims.get("nonce") != nonce:
        raise AuthError("the ID token belongs to another login")
    expires_s, issued_s = _read_s(claims, "exp"), _read_s(claims, "iat")
    if expires_s + LEEWAY_S <= now_s:
        raise AuthError("the ID token has expired")
    if not now_s - ISSUED_S_MAX <= issued_s <= now_s + LEEWAY_S:
        raise AuthError(
            "the ID token has an implausible time of issue", hints=["compare the clocks of issuer and server"]
        )
    if "nbf" in claims and _read_s(claims, "nbf") > now_s + LEEWAY_S:
        raise AuthError("the ID token is not valid yet")


def _read_s(claims: Mapping[str, Any], name: str) -> float:
    value = claims.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise AuthError(f"the ID token has no valid `{name}`")
    return float(value)


def identify(claims: Mapping[str, Any], settings: OidcSettings) -> Identity:
    """Map verified claims to a user and a role. Raises DeniedError, which never contains other users' data."""
    user = claims.get(settings.user_claim)
    if not isinstance(user, str) or not re.fullmatch(USER, user):
        raise DeniedError(
            f"the ID token has no `{settings.user_claim}` that is a valid user name",
            hints=["ask an administrator of the server: `user_claim` in `[oidc]` names the claim"],
        )
    if settings.user_claim == "email" or settings.allowed_domains:
        _check_address(claims, settings)
    if user.casefold() in {each.casefold() for each in settings.denied_users}:  # issuers may keep the case of a form
        raise DeniedError(f"{user} may not log in to this server", hints=["ask an administrator of the server"])
    mapped = [settings.roles[each] for each in _list_values(claims, settings.role_claim) if each in settings.roles]
    role = max(mapped, key=ROLES.index) if mapped else settings.default_role
    if role is None:
        raise DeniedError(
            f"{user} has no role on this server",
            hints=[f"ask an administrator: no value of `{settings.role_claim}` is mapped in `[oidc.roles]`"],
        )
    of_user = _list_values(claims, settings.project_claim)
    project = next((name for value, name in settings.projects.items() if value in of_user), settings.default_project)
    return Identity(user=user, role=role, project=project)


def _list_values(claims: Mapping[str, Any], name: str) -> Sequence[str]:
    given = claims.get(name)
    values = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    return [each for each in values if isinstance(each, str)]


def _check_address(claims: Mapping[str, Any], settings: OidcSettings) -> None:
    address = claims.get("email")
    if not isinstance(address, str) or claims.get("email_verified") is not True:
        raise DeniedError("the issuer has not verified the e-mail address")
    domain = address.rpartition("@")[2].lower()
    if settings.allowed_domains and domain not in settings.allowed_domains:
        raise DeniedError(f"users of `{domain}` may not log in to this server")


async def fetch_json(url: str, form: Mapping[str, str] | None = None) -> Mapping[str, Any]:
    """Query the issuer, within ten seconds and a megabyte, without redirects. Raises AuthError, TransientError."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=10)
    try:
        async with aiohttp.ClientSession(timeout=timeout, trust_env=True) as session:
            method = "GET" if form is None else "POST"
            async with session.request(method, url, data=form, allow_redirects=False) as answer:
                body = bytearray()
                async for chunk in answer.content.iter_chunked(2**16):
                    body += chunk
                    if len(body) > BODY_MAX:
                        raise AuthError("the issuer's answer exceeds a megabyte")
                if answer.status >= 500:
                    raise TransientError(f"the issuer answered with status {answer.status}")
                if answer.status != 200:
                    raise AuthError(f"the issuer refused the login with status {answer.status}")
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise TransientError(
            f"the issuer does not respond: {error}", hints=["try again, or log in with a token"]
        ) from None
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise AuthError("the issuer's response is not JSON")
    return found
