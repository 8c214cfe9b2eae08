"""Pages for administrators in a browser. A form exchanges the token for a cookie that only these pages receive.

The session holds the token's digest and is refused as soon as the token is: each request looks it up again.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from aiohttp import web

import broker.dashboard
from broker.app.container import Context
from broker.dashboard.guard import HEADERS, redirect
from broker.dashboard.html import Content, element
from broker.dashboard.pages import lay_out
from broker.dashboard.people import list_audit, read_people
from broker.dashboard.people_page import AUDIT, USERS, show_audit, show_login, show_people
from broker.server.authorisation import has_role
from broker.server.tokens import digest_token
from broker.state.people import Role, Token

PREFIX = "/admin"
LOGIN = f"{PREFIX}/login"
STYLE = f"{PREFIX}/style.css"
COOKIE = "broker_admin"
SESSION_S = 12 * 3600.0
SESSIONS_MAX = 200  # the oldest one ends where there are more
TARGETS = {USERS: "Users", AUDIT: "Audit"}


class AdminPages:
    """The users and the audit of one server."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._sessions: dict[str, tuple[str, float]] = {}  # digest of the token, and when the session ends

    def add_routes(self, app: web.Application) -> None:
        """Add the pages under `/admin` to the application."""
        app.router.add_get(LOGIN, self._show_login)
        app.router.add_post(LOGIN, self._log_in)
        app.router.add_get(STYLE, self._send_style)
        app.router.add_get(USERS, self._show_users)
        app.router.add_get(AUDIT, self._show_audit)

    def check(self, request: web.Request) -> web.StreamResponse | None:
        """Return the refusal of a request for these pages, or None for an administrator."""
        if request.path in (LOGIN, STYLE):
            return None
        token = self._find_token(request)
        if token is None:
            return redirect(LOGIN)
        if not has_role(token, Role.ADMIN):
            return _lay_out("Refused", element("p", "These pages require the role `admin`."), status=403)
        return None

    def _find_token(self, request: web.Request) -> Token | None:
        """Return the valid token of a session, or of the header that programs send."""
        kind, _, value = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return self._context.store.tokens.find(digest_token(value.strip()))
        digest, until_s = self._sessions.get(request.cookies.get(COOKIE, ""), ("", 0.0))
        return self._context.store.tokens.find(digest) if self._context.clock.now_s() < until_s else None

    async def _show_login(self, request: web.Request) -> web.StreamResponse:
        return _lay_out("Log in", show_login(LOGIN))

    async def _log_in(self, request: web.Request) -> web.StreamResponse:
        """Begin a session for the token of an administrator."""
        if request.headers.get("Origin") != f"{request.scheme}://{request.host}":
            return _lay_out(
                "Refused", element("p", "This login was not submitted from a page of this server."), status=403
            )
        digest = digest_token(str((await request.post()).get("token", "")).strip())
        token = self._context.store.tokens.find(digest)
        if token is None or not has_role(token, Role.ADMIN):
            refused = element("p", "This is not a valid administrator token.", class_="note", role="alert")
            return _lay_out("Log in", refused, show_login(LOGIN), status=403)
        session = secrets.token_urlsafe(32)
        self._sessions[session] = (digest, self._context.clock.now_s() + SESSION_S)
        if len(self._sessions) > SESSIONS_MAX:
            del self._sessions[next(iter(self._sessions))]
        answer = redirect(USERS)
        answer.set_cookie(
            COOKIE, session, httponly=True, samesite="Strict", path=PREFIX, secure=request.scheme == "https",
            max_age=int(SESSION_S),
        )  # fmt: skip
        return answer

    async def _send_style(self, request: web.Request) -> web.Response:
        path = Path(broker.dashboard.__path__[0]) / "static" / "style.css"
        return web.Response(body=path.read_bytes(), content_type="text/css", charset="utf-8")

    async def _show_users(self, request: web.Request) -> web.Response:
        return _lay_out("Users", show_people(read_people(self._context), self._context.clock.now_s()), path=USERS)

    async def _show_audit(self, request: web.Request) -> web.Response:
        user, verb, outcome = (request.query.get(name, "").strip()[:100] for name in ("user", "verb", "outcome"))
        events = list_audit(self._context, user=user, verb=verb, outcome=outcome)
        return _lay_out("Audit", show_audit(events, user=user, verb=verb, outcome=outcome), path=AUDIT)


def _lay_out(title: str, *content: Content, path: str = "", status: int = 200) -> web.Response:
    text = lay_out(title, *content, path=path, is_live=False, targets=TARGETS, static=PREFIX)
    return web.Response(text=text, content_type="text/html", status=status, headers=HEADERS)
