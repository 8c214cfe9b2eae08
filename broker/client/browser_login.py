"""Log in through a browser: the authorization code flow with PKCE (RFC 7636) and a loopback redirect (RFC 8252).

The server exchanges the code, so that neither ID tokens nor the client's secret reach this machine.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import parse_qs, urlencode, urlsplit

from broker.client.login import ServerLogin
from broker.client.remote import RemoteSession
from broker.client.wire import decode
from broker.errors import AuthError, UsageError
from broker.frozen import frozen
from broker.types import Secret

WAIT_S = 600.0
POLL_S = 0.5
REQUESTS_MAX = 100  # a browser also requests icons, and other programs on this machine may send requests
PAGE = "<!doctype html><title>broker</title><p>You may close this page and return to the terminal."


@frozen
class LoginBegin:
    """The server's information about its issuer."""

    authorization_endpoint: str
    client_id: str
    scope: str
    nonce: str


class _Catcher(HTTPServer):
    """Waits on the loopback for the redirect with our `state`."""

    allow_reuse_address = False

    def __init__(self, state: str) -> None:
        self.expected_state = state
        self.answer: dict[str, str] | None = None
        super().__init__(("127.0.0.1", 0), _Handler)
        self.timeout = POLL_S

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a broken connection: the browser repeats the request."""


class _Handler(BaseHTTPRequestHandler):
    server: _Catcher
    timeout = 5.0

    def do_GET(self) -> None:
        """Accept the redirect; respond with 404 to anything else."""
        parts = urlsplit(self.path)
        found = {name: values[0] for name, values in parse_qs(parts.query).items()}
        given = found.get("state", "").encode()
        is_ours = parts.path == "/callback" and hmac.compare_digest(given, self.server.expected_state.encode())
        body = PAGE.encode() if is_ours else b""
        self.send_response(200 if is_ours else 404)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        if is_ours:
            self.server.answer = found

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing, because the request contains the code."""


def log_in(login: ServerLogin, open_browser: Callable[[str], None], *, waits: int = int(WAIT_S / POLL_S)) -> Secret:
    """Let the user log in at the server's issuer; return a token of the server.

    `open_browser` receives the URL to open. Raises UsageError if the server has no issuer, or after ten minutes without
    a login, and AuthError or DeniedError for a refused login.
    """
    session = RemoteSession(login, is_logged_in=False)
    begin: LoginBegin = decode(session.request("GET", "/v1/login"), LoginBegin)
    state, verifier = secrets.token_urlsafe(32), secrets.token_urlsafe(48)
    challenge = base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).decode().rstrip("=")
    with _Catcher(state) as catcher:
        redirect_uri = f"http://127.0.0.1:{catcher.server_port}/callback"
        query = {
            "response_type": "code", "client_id": begin.client_id, "redirect_uri": redirect_uri, "scope": begin.scope,
            "state": state, "nonce": begin.nonce, "code_challenge": challenge, "code_challenge_method": "S256",
        }  # fmt: skip
        joint = "&" if urlsplit(begin.authorization_endpoint).query else "?"
        open_browser(f"{begin.authorization_endpoint}{joint}{urlencode(query)}")
        answer = _wait(catcher, waits)
    if "code" not in answer:
        raise AuthError(f"the issuer refused the login: {answer.get('error', 'no code')[:100]}")
    body = {"code": answer["code"], "verifier": verifier, "redirect_uri": redirect_uri, "nonce": begin.nonce}
    return Secret(value=str(session.request("POST", "/v1/login", json.dumps(body).encode())["token"]))


def _wait(catcher: _Catcher, waits: int) -> dict[str, str]:
    for _ in range(waits + REQUESTS_MAX):
        try:
            catcher.handle_request()
        except OSError:
            continue
        if catcher.answer is not None:
            return catcher.answer
    raise UsageError("no login was received within ten minutes", hints=["run `broker login URL` again"])
