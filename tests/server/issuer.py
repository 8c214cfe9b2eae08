"""A small OIDC issuer on the loopback with real RSA keys, whose ID tokens a test may spoil."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from joserfc import jwk, jwt

from broker.clock import SystemClock

CLIENT = "broker-test"


class TestIssuer:
    """`edit` changes the claims of the next tokens, `sign` replaces their signature; `claims` are those of the user."""

    __test__ = False

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.key = self.make_key("one")
        self.published = [self.key]
        self.client = CLIENT  # the audience of tokens
        self.claims: dict[str, Any] = {"email": "ada@example.org", "email_verified": True, "groups": ["ml-team"]}
        self.edit: Callable[[dict[str, Any]], None] = lambda claims: None
        self.sign: Callable[[dict[str, Any]], str] = self.sign_with_key
        self.padding = ""  # of the discovery document
        self.asked: dict[str, int] = {}
        self.codes: dict[str, dict[str, str]] = {}
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                issuer.asked[parts.path] = issuer.asked.get(parts.path, 0) + 1
                if parts.path == "/authorize":
                    given = {name: values[0] for name, values in parse_qs(parts.query).items()}
                    self.send_response(302)
                    self.send_header("Location", issuer.authorize(given))
                    self.end_headers()
                    return
                self.answer(issuer.describe() if parts.path.startswith("/.well-known/") else issuer.list_keys())

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                given = {name: values[0] for name, values in parse_qs(body).items()}
                token = issuer.exchange(given)
                self.answer({"id_token": token} if token else {"error": "invalid_grant"}, 200 if token else 400)

            def answer(self, data: object, status: int = 200) -> None:
                text = json.dumps(data).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer((host, 0), Handler)
        self.url = f"http://{host}:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def make_key(self, kid: str) -> jwk.RSAKey:
        return jwk.RSAKey.generate_key(2048, {"kid": kid, "use": "sig"})

    def describe(self) -> dict[str, str]:
        return {
            "issuer": self.url, "authorization_endpoint": f"{self.url}/authorize",
            "token_endpoint": f"{self.url}/token", "jwks_uri": f"{self.url}/keys",
            "padding": self.padding,
        }  # fmt: skip

    def list_keys(self) -> dict[str, Any]:
        return {"keys": [key.as_dict(private=False) for key in self.published]}

    def authorize(self, given: dict[str, str]) -> str:
        """Log the user in and return where the browser is sent."""
        code = f"code-{len(self.codes)}"
        self.codes[code] = given
        return f"{given['redirect_uri']}?{urlencode({'code': code, 'state': given['state']})}"

    def exchange(self, given: dict[str, str]) -> str | None:
        """Return an ID token for a code, once, if the verifier proves the challenge (RFC 7636)."""
        begun = self.codes.pop(given.get("code", ""), None)
        if begun is None or begun["redirect_uri"] != given["redirect_uri"]:
            return None
        digest = hashlib.sha256(given["code_verifier"].encode()).digest()
        if base64.urlsafe_b64encode(digest).decode().rstrip("=") != begun["code_challenge"]:
            return None
        return self.make_token(begun["nonce"])

    def make_token(self, nonce: str, **more: Any) -> str:
        now_s = int(SystemClock().now_s())
        claims = {
            "iss": self.url, "aud": self.client, "sub": "1", "iat": now_s, "exp": now_s + 300, "nonce": nonce,
            **self.claims, **more,
        }  # fmt: skip
        self.edit(claims)
        return self.sign(claims)

    def sign_with_key(self, claims: dict[str, Any]) -> str:
        return jwt.encode({"alg": "RS256", "kid": self.key.kid}, claims, self.key, algorithms=["RS256"])
