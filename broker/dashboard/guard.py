"""Control access: one link with a token, then a cookie; requests from other sites are refused.

The token in the link is valid for one use. The cookie is `HttpOnly` and `SameSite=Strict`. `Host` is compared with the
listening address, against DNS rebinding; actions also require a matching `Origin` and a ticket from a page, against
cross-site requests. Prometheus presents a token of its own, which only grants access to `/metrics`.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

from broker.state.faults import explain_os_error

COOKIE = "broker_dashboard"
LOGIN = "/login"
METRICS = "/metrics"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",  # without a referrer, a form's `Origin` is `null`
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Gatekeeper:
    """Checks every request before its handler runs. The `scrape_token` only grants access to `/metrics`."""

    def __init__(self, scrape_token: str | None = None) -> None:
        self._scrape_token = scrape_token
        self._token: str | None = secrets.token_urlsafe(24)
        self._session = secrets.token_urlsafe(24)
        self.ticket = secrets.token_urlsafe(24)  # in every form

    def make_link(self, host: str, port: int) -> str:
        """Make a link that logs one browser in; an earlier link becomes invalid."""
        self._token = secrets.token_urlsafe(24)
        return f"http://{host}:{port}{LOGIN}?token={self._token}"

    async def log_in(self, request: web.Request) -> web.StreamResponse:
        """Exchange the token of the link for the cookie."""
        given = request.query.get("token", "")
        if self._token is None or not _is_same(given, self._token):
            return refuse(403, "this link is invalid or was used before; run `broker dashboard` again for a new one")
        self._token = None
        answer = redirect("/")
        answer.set_cookie(COOKIE, self._session, httponly=True, samesite="Strict", path="/")
        return answer

    def check(self, request: web.Request, hosts: frozenset[str]) -> web.StreamResponse | None:
        """Return the refusal of a request, or None if it may pass."""
        if request.host not in hosts:
            return refuse(403, "unknown host")
        if request.path == LOGIN:
            return None
        if request.path == METRICS and request.method == "GET" and self._is_scrape(request):
            return None
        if not _is_same(request.cookies.get(COOKIE, ""), self._session):
            return refuse(401, "open the link that `broker dashboard` printed")
        if request.method == "POST" and request.headers.get("Origin") not in {f"http://{host}" for host in hosts}:
            return refuse(403, "this action was not submitted from a page of the dashboard")
        return None

    def _is_scrape(self, request: web.Request) -> bool:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if self._scrape_token is None or scheme.lower() != "bearer":
            return False
        return _is_same(given.strip(), self._scrape_token)


def _is_same(given: str, secret: str) -> bool:
    """Compare in constant time. Bytes of a header that are not UTF-8 are surrogates, which cannot be encoded."""
    return hmac.compare_digest(given.encode(errors="replace"), secret.encode())


def read_scrape_token(path: Path) -> str:
    """Return the token for scrapes of `/metrics` from a file of mode 0600, created by the first call.

    Raises StateError if the file cannot be read or written.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        known = path.read_text(encoding="ascii").strip() if path.exists() else ""
        if known:
            return known
        token = secrets.token_urlsafe(32)
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="ascii") as file:
            file.write(token)
        aside.replace(path)
    except OSError as error:
        raise explain_os_error(error, default=path) from error
    return token


def redirect(path: str) -> web.Response:
    """Send the browser to another page by GET."""
    return web.Response(status=303, headers={"Location": path})


def refuse(status: int, reason: str) -> web.Response:
    """Make a refusal in plain text."""
    return web.Response(status=status, text=f"error: {reason}\n", headers=HEADERS)
