"""Sessions of browsers: a form exchanges a token for a cookie.

A session holds the token's digest and is refused as soon as the token is, because each request looks it up again. The
cookie only gives access to pages, never to the API. A proxy that authenticates users needs no session. A login through
an issuer creates a token only for its session; the token is revoked when the session ends.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable

from aiohttp import web

from broker.app.container import Context
from broker.frozen import frozen
from broker.server.tokens import digest_token
from broker.state.people import Token

COOKIE = "broker_session"
SESSION_S = 12 * 3600.0
SESSIONS_MAX = 1000  # beyond this number, the oldest one ends
Authenticate = Callable[[web.Request], Token | None]


@frozen
class BrowserSession:
    """The session of one browser; `digest` is that of its token."""

    digest: str
    until_s: float
    is_own: bool


class Sessions:
    """The sessions of one server. `authenticate` reads the headers sent by programs and by a trusted proxy."""

    def __init__(self, context: Context, authenticate: Authenticate) -> None:
        self._context = context
        self._authenticate = authenticate
        self._sessions: dict[str, BrowserSession] = {}
        self._key = secrets.token_bytes(32)

    def find(self, request: web.Request) -> Token | None:
        """Return the valid token of a header or a session; None without one."""
        token = self._authenticate(request)
        if token is not None or "Authorization" in request.headers:
            return token
        session = self._sessions.get(request.cookies.get(COOKIE, ""))
        if session is None or self._context.clock.now_s() >= session.until_s:
            return None
        return self._context.store.tokens.find(session.digest)

    def begin(self, value: str, *, is_own: bool = False) -> str | None:
        """Begin a session with a token; return its cookie, or None for an invalid token.

        `is_own`: the token was created for this session.
        """
        digest = digest_token(value)
        if self._context.store.tokens.find(digest) is None:
            return None
        session = secrets.token_urlsafe(32)
        until_s = self._context.clock.now_s() + SESSION_S
        self._sessions[session] = BrowserSession(digest=digest, until_s=until_s, is_own=is_own)
        if len(self._sessions) > SESSIONS_MAX:
            del self._sessions[next(iter(self._sessions))]
        return session

    def end(self, request: web.Request) -> None:
        """End the session of a request, and revoke a token that was created for it."""
        session = self._sessions.pop(request.cookies.get(COOKIE, ""), None)
        if session is not None and session.is_own:
            token = self._context.store.tokens.find(session.digest)
            if token is not None:
                self._context.store.tokens.revoke(token.id)

    def make_ticket(self, token: Token) -> str:
        """Return the ticket in the forms of this user's pages; it is valid until the server restarts."""
        return hmac.new(self._key, f"{token.id}/{token.user}".encode(), hashlib.sha256).hexdigest()

    def is_own_origin(self, request: web.Request) -> bool:
        """Return whether a form was submitted from a page of this server; a proxy may have terminated TLS."""
        own = {f"{request.scheme}://{request.host}"}
        if "Authorization" not in request.headers and self._authenticate(request) is not None:
            own.add(f"https://{request.host}")
        return request.headers.get("Origin") in own
