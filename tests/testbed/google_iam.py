"""Google's IAM, token and JSON storage services on the loopback, which let a key do what its account's bindings allow.

Keys are checked as Google does: the signature of the assertion against the certificates that were uploaded, and their
dates. New objects may be unknown to some calls (`unknown_count`).
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa

GRANTED = {
    "roles/storage.legacyBucketReader": {"list"},
    "roles/storage.objectViewer": {"get", "list"},
    "roles/storage.objectUser": {"get", "list", "create", "delete"},
}


class Refusal(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


@dataclass(kw_only=True)
class FakeGoogle:
    url: str = ""
    accounts: set[str] = field(default_factory=set)
    keys: dict[str, dict[str, bytes]] = field(default_factory=dict)  # email -> key id -> certificate
    policies: dict[str, dict[str, Any]] = field(default_factory=lambda: {"testbed": {"bindings": [], "etag": "0"}})
    tokens: dict[str, str] = field(default_factory=dict)  # token -> email
    objects: dict[str, bytes] = field(default_factory=dict)
    refusals: dict[str, Refusal] = field(default_factory=dict)  # words of "path method" -> answer
    unknown_count: int = 0  # calls that do not know of a new account yet
    writes: int = 0
    key_count: int = 0
    project: str = "vision"  # with all accounts; others have none

    def answer(self, method: str, path: str, query: dict[str, str], body: bytes, token: str) -> Any:
        for word, refusal in self.refusals.items():
            if word in f"{path} {method}":
                raise refusal
        if path == "/token":
            return self.exchange(parse_qs(body.decode())["assertion"][0])
        if path.endswith("/serviceAccounts"):
            email = f"{json.loads(body)['accountId']}@vision.iam.gserviceaccount.com"
            if email in self.accounts:
                raise Refusal(409, "it exists")
            self.accounts.add(email)
            return {"email": email}
        if "/serviceAccounts/" in path:
            if f"/projects/{self.project}/" not in path:
                raise Refusal(404, "unknown service account")
            return self.answer_keys(method, path.partition("/serviceAccounts/")[2], body)
        if path.endswith("/iam"):
            return self.answer_policy(method, path.split("/")[-2], body)
        return self.answer_object(method, path, query, body, self.tokens.get(token, ""))

    def answer_keys(self, method: str, path: str, body: bytes) -> Any:
        email, _, rest = path.partition("/")
        if self.unknown_count or email not in self.accounts:
            self.unknown_count = max(0, self.unknown_count - 1)
            raise Refusal(404, "unknown service account")
        if method == "DELETE" and not rest:
            self.accounts.remove(email)
            return {}
        keys = self.keys.setdefault(email, {})
        if rest == "keys:upload":
            self.key_count += 1
            key_id = f"key-{self.key_count}"
            keys[key_id] = base64.b64decode(json.loads(body)["publicKeyData"])
            return {"name": f"projects/vision/serviceAccounts/{email}/keys/{key_id}"}
        if method == "DELETE":
            keys.pop(rest.rpartition("/")[2])
            return {}
        ends = {each: x509.load_pem_x509_certificate(pem).not_valid_after_utc for each, pem in keys.items()}
        name = f"projects/vision/serviceAccounts/{email}/keys"
        return {"keys": [{"name": f"{name}/{each}", "validBeforeTime": end.isoformat()} for each, end in ends.items()]}

    def answer_policy(self, method: str, bucket: str, body: bytes) -> Any:
        if bucket not in self.policies:
            raise Refusal(404, "The specified bucket does not exist.")
        if method == "GET":
            return self.policies[bucket]
        policy = json.loads(body)
        assert policy["version"] == 3, "conditions need it"
        if policy["etag"] != self.policies[bucket]["etag"]:
            raise Refusal(412, "etag")
        for member in (each for binding in policy["bindings"] for each in binding["members"]):
            if member.removeprefix("serviceAccount:") not in self.accounts and not member.startswith("user:"):
                raise Refusal(400, f"Service account {member} does not exist.")
        self.writes += 1
        self.policies[bucket] = {**policy, "etag": str(self.writes)}
        return self.policies[bucket]

    def exchange(self, assertion: str) -> Any:
        head, claims, signature = assertion.split(".")
        email = json.loads(decode(claims))["iss"]
        pem = self.keys.get(email, {}).get(json.loads(decode(head))["kid"])
        if pem is None:
            raise Refusal(400, "invalid_grant")
        certificate = x509.load_pem_x509_certificate(pem)
        public = certificate.public_key()
        assert isinstance(public, rsa.RSAPublicKey)
        try:
            public.verify(decode(signature), f"{head}.{claims}".encode(), padding.PKCS1v15(), hashes.SHA256())
        except InvalidSignature as error:
            raise Refusal(400, "invalid_grant") from error
        if (
            not certificate.not_valid_before_utc.timestamp()
            <= time.time()
            < certificate.not_valid_after_utc.timestamp()
        ):
            raise Refusal(400, "invalid_grant")
        token = f"token-{len(self.tokens)}"
        self.tokens[token] = email
        return {"access_token": token, "expires_in": 3600, "token_type": "Bearer"}

    def answer_object(self, method: str, path: str, query: dict[str, str], body: bytes, email: str) -> Any:
        bucket, _, rest = path.partition("/b/")[2].partition("/o")
        name = query.get("name") or unquote(rest.lstrip("/"))
        action = {"POST": "create", "DELETE": "delete"}.get(method, "get" if name else "list")
        if not self.allows(email, bucket, name, action):
            raise Refusal(403, "forbidden")
        if action == "create":
            self.objects[f"{bucket}/{name}"] = body
            return {}
        if action == "list":
            return {"items": []}
        if f"{bucket}/{name}" not in self.objects:
            raise Refusal(404, "No such object")
        if action == "delete":
            del self.objects[f"{bucket}/{name}"]
        return {}

    def allows(self, email: str, bucket: str, name: str, action: str) -> bool:
        bindings = self.policies.get(bucket, {}).get("bindings", [])
        resource = f"projects/_/buckets/{bucket}" + (f"/objects/{name}" if name else "")
        return any(
            f"serviceAccount:{email}" in binding["members"]
            and action in GRANTED[binding["role"]]
            and holds(binding.get("condition", {}).get("expression"), resource)
            for binding in bindings
        )


def holds(expression: str | None, resource: str) -> bool:
    """Evaluate the used part of CEL: equality and beginnings of `resource.name`, joined by "or"."""
    if expression is None:
        return True
    for part in expression.split(" || "):
        found = re.fullmatch(r'resource\.name(?:\.startsWith\("(.*)"\)| == "(.*)")', part)
        assert found, part
        if resource.startswith(found[1]) if found[1] is not None else resource == found[2]:
            return True
    return False


def decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


@contextlib.contextmanager
def serve_google() -> Iterator[FakeGoogle]:
    google = FakeGoogle()

    class Handler(BaseHTTPRequestHandler):
        protocol_version: ClassVar[str] = "HTTP/1.1"
        disable_nagle_algorithm: ClassVar[bool] = True  # otherwise Nagle's algorithm holds each body back for 40 ms

        def handle_call(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            try:
                status, answer = 200, google.answer(self.command, parts.path, query, body, token)
            except Refusal as refusal:
                status = refusal.status
                answer = {"error": {"code": status, "message": refusal.message}}
                if "invalid_grant" in refusal.message:
                    answer = {"error": "invalid_grant"}
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_PUT = do_POST = do_DELETE = handle_call

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    google.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield google
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
