"""Sessions of browsers: a form exchanges a token for a cookie.

A session holds the token's digest and is refused as soon as the token is: each request looks it up again. The cookie
admits to pages only, never to the API. A proxy that authenticates users needs no session.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable

from aiohttp import web

from broker.app.container import Context
from broker.server.tokens import digest_token
from broker.state.people import Token

COOKIE = "broker_session"
SESSION_S = 12 * 3600.0
SESSIONS_MAX = 1000  # the oldest one ends where there are more
Authenticate = Callable[[web.Request], Token | None]


class Sessions:
    """The sessions of one server. `authenticate` reads the headers of programs and of a trusted proxy."""

    def __init__(self, context: Context, authenticate: Authenticate) -> None:
        self._context = context
        self._authenticate = authenticate
        self._sessions: dict[str, tuple[str, float]] = {}  # digest of the token, and when the session ends
        self._key = secrets.token_bytes(32)

    def find(self, request: web.Request) -> Token | None:
        """Return the valid token of a header or of a session."""
        token = self._authenticate(request)
        if token is not None or "Authorization" in request.headers:
            return token
        digest, until_s = self._sessions.get(request.cookies.get(COOKIE, ""), ("", 0.0))
        return self._context.store.tokens.find(digest) if self._context.clock.now_s() < until_s else None

    def begin(self, value: str) -> str | None:
        """Begin a session with a token; return its cookie, or None for a token that is not valid."""
        digest = digest_token(value)
        if self._context.store.tokens.find(digest) is None:
            return None
        session = secrets.token_urlsafe(32)
        self._sessions[session] = (digest, self._context.clock.now_s() + SESSION_S)
        if len(self._sessions) > SESSIONS_MAX:
            del self._sessions[next(iter(self._sessions))]
        return session

    def end(self, request: web.Request) -> None:
        """End the session of a request."""
        self._sessions.pop(request.cookies.get(COOKIE, ""), None)

    def make_ticket(self, token: Token) -> str:
        """Return what the forms of this user's pages carry; it is valid until the server restarts."""
        return hmac.new(self._key, f"{token.id}/{token.user}".encode(), hashlib.sha256).hexdigest()

    def is_own_origin(self, request: web.Request) -> bool:
        """Return whether a form was submitted from a page of this server; a proxy may have ended TLS."""
        own = {f"{request.scheme}://{request.host}"}
        if "Authorization" not in request.headers and self._authenticate(request) is not None:
            own.add(f"https://{request.host}")
        return request.headers.get("Origin") in own
