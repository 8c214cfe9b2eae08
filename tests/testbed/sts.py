"""STS, IAM's users, and an S3 that enforces what they grant, on the loopback: real clients speak to it on the wire.

A key is good for what its session's policy allows, until it ends; the long-lived key of the account may do all.
Signatures are not computed again (tests/agent/test_agent_bucket.py compares ours with Amazon's): key and session
token must fit.
"""

from __future__ import annotations

import contextlib
import fnmatch
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

ACCOUNT, KEY, SECRET = "123456789012", "AKIAUSER", "secret-of-the-user"
USER = f"arn:aws:iam::{ACCOUNT}:user/me"
ANYTHING: Mapping[str, Any] = {"Statement": [{"Effect": "Allow", "Action": ["*"], "Resource": ["*"]}]}
SCOPE = re.compile(r"Credential=(?P<key>[^/]+)/\d+/(?P<region>[^/]+)/(?P<service>[^/]+)/aws4_request")


@dataclass(kw_only=True)
class Session:
    token: str
    expires_s: float
    policy: Mapping[str, Any]
    user: str = ""
    role_policy: Mapping[str, Any] | None = None  # which also has to allow what the session does

    def allows(self, action: str, arn: str, prefix: str | None) -> bool:
        if any(is_past(each["Condition"]) for each in self.policy["Statement"] if each["Effect"] == "Deny"):
            return False
        policies = [self.policy, *([self.role_policy] if self.role_policy else [])]
        return all(allows(each, action, arn, prefix) for each in policies)


def allows(policy: Mapping[str, Any], action: str, arn: str, prefix: str | None) -> bool:
    return any(
        statement["Effect"] == "Allow"
        and any(fnmatch.fnmatchcase(action, each) for each in statement["Action"])
        and any(fnmatch.fnmatchcase(arn, each) for each in statement["Resource"])
        and holds(statement.get("Condition", {}), prefix)
        for statement in policy["Statement"]
    )


def is_past(condition: Mapping[str, Any]) -> bool:
    """Evaluate the one condition used in refusals."""
    end = datetime.fromisoformat(condition["DateGreaterThan"]["aws:CurrentTime"].replace("Z", "+00:00"))
    return time.time() > end.timestamp()


def holds(condition: Mapping[str, Any], prefix: str | None) -> bool:
    """Evaluate the one condition used with S3; any other is of KMS, and never true here."""
    if not condition:
        return True
    patterns = condition.get("StringLikeIfExists", {}).get("s3:prefix")
    return patterns is not None and (prefix is None or any(fnmatch.fnmatchcase(prefix, each) for each in patterns))


@dataclass(kw_only=True)
class FakeStore:
    """An STS account. `calls`: requests to STS, with their parameters. `forbidden`: actions of STS that are refused."""

    arn: str = USER
    life_s: float | None = None  # of a session; None: as asked
    role_s_max: int = 3600
    buckets: set[str] = field(default_factory=lambda: {"testbed"})
    objects: dict[str, bytes] = field(default_factory=dict)
    calls: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    forbidden: set[str] = field(default_factory=set)
    read_only: bool = False  # the account's own key may not write
    sessions: dict[str, Session] = field(default_factory=dict)
    users: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    used_keys: set[str] = field(default_factory=set)  # with which objects were written
    # permissions of a role that the caller may assume, by its ARN; None: it may not
    find_role: Callable[[str], Mapping[str, Any] | None] = lambda arn: ANYTHING
    url: str = ""
    serials: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment of a user of this account."""
        login = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}
        return login | {"AWS_ENDPOINT_URL": self.url}

    def answer_sts(self, action: str, asked: dict[str, str]) -> dict[str, Any]:
        self.calls.append((action, asked))
        if action in self.forbidden:
            raise Denied("AccessDenied")
        if action == "GetCallerIdentity":
            return {"Arn": self.arn, "Account": self.arn.split(":")[4], "UserId": "AIDA"}
        if action == "AssumeRole" and int(asked["DurationSeconds"]) > self.role_s_max:
            raise Denied("ValidationError", 400)
        role_policy = self.find_role(asked["RoleArn"]) if action == "AssumeRole" else ANYTHING
        if role_policy is None:
            raise Denied("AccessDenied")
        serial = next(self.serials)
        expires_s = time.time() + (self.life_s if self.life_s is not None else float(asked["DurationSeconds"]))
        session = Session(
            token=f"token-{serial}", expires_s=expires_s, policy=json.loads(asked["Policy"]), role_policy=role_policy
        )
        self.sessions[f"ASIA{serial}"] = session
        end = datetime.fromtimestamp(expires_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        login = {"AccessKeyId": f"ASIA{serial}", "SecretAccessKey": f"session-secret-{serial}"}
        return {"Credentials": {**login, "SessionToken": session.token, "Expiration": end}}

    def answer_iam(self, action: str, asked: dict[str, str]) -> dict[str, Any]:
        """Answer for IAM: users with one policy and keys; a user with keys or a policy cannot be deleted, as at IAM."""
        self.calls.append((action, asked))
        if action in self.forbidden:
            raise Denied("AccessDenied")
        name = asked["UserName"]
        if action == "CreateUser":
            if name in self.users:
                raise Denied("EntityAlreadyExists", 409)
            self.users[name] = {}
            user = {"UserName": name, "Path": asked["Path"], "UserId": "AIDA", "Arn": USER, "CreateDate": MOMENT_ISO}
            return {"User": user}
        if name not in self.users:
            raise Denied("NoSuchEntity", 404)
        if action == "PutUserPolicy":
            self.users[name] = json.loads(asked["PolicyDocument"])
            for key in self.list_keys(name):
                self.sessions[key].policy = self.users[name]
        elif action == "DeleteUserPolicy":
            self.users[name] = {}
        elif action == "DeleteUser":
            if self.list_keys(name) or self.users[name]:
                raise Denied("DeleteConflict", 409)
            del self.users[name]
        else:
            return self.answer_keys(action, name, asked)
        return {}

    def answer_keys(self, action: str, name: str, asked: dict[str, str]) -> dict[str, Any]:
        if action == "ListAccessKeys":
            members = "".join(f"<member><AccessKeyId>{key}</AccessKeyId></member>" for key in self.list_keys(name))
            return {"AccessKeyMetadata": Raw(members), "IsTruncated": "false"}
        if action == "CreateAccessKey":
            serial = next(self.serials)
            made = f"AKIA{serial:016d}"
            self.sessions[made] = Session(token="", expires_s=float("inf"), policy=self.users[name], user=name)
            login = {"AccessKeyId": made, "SecretAccessKey": f"session-secret-{serial}"}
            return {"AccessKey": {"UserName": name, **login, "Status": "Active"}}
        if action != "DeleteAccessKey":
            raise Denied("InvalidAction", 400)
        del self.sessions[asked["AccessKeyId"]]
        return {}

    def list_keys(self, user: str) -> list[str]:
        return [key for key, session in self.sessions.items() if session.user == user]

    def check(self, key: str, token: str, action: str, arn: str, prefix: str | None = None) -> None:
        if key == KEY and not (self.read_only and action != "s3:GetObject" and action != "s3:ListBucket"):
            return
        session = self.sessions.get(key)
        if session is None or session.token != token:
            raise Denied("InvalidAccessKeyId" if key != KEY else "AccessDenied")
        if session.expires_s <= time.time():
            raise Denied("ExpiredToken", 400)
        if self.read_only and action not in ("s3:GetObject", "s3:ListBucket"):
            raise Denied("AccessDenied")
        if not session.allows(action, arn, prefix):
            raise Denied("AccessDenied")


class Denied(Exception):
    def __init__(self, code: str, status: int = 403) -> None:
        super().__init__(code)
        self.code, self.status = code, status


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    store: ClassVar[FakeStore]

    def log_message(self, *_: Any) -> None:
        """Log nothing."""

    def handle_call(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        scope = SCOPE.search(self.headers.get("Authorization", ""))
        try:
            if scope is None:
                raise Denied("AccessDenied")
            if scope["service"] in ("sts", "iam"):
                self.answer_query(body, scope["service"])
            else:
                self.answer_s3(scope["key"], self.headers.get("x-amz-security-token", ""), body)
        except Denied as error:
            text = f"<Code>{error.code}</Code><Message>no</Message>"
            is_sts = scope is not None and scope["service"] in ("sts", "iam")
            whole = f"<ErrorResponse><Error>{text}</Error></ErrorResponse>" if is_sts else f"<Error>{text}</Error>"
            self.answer(error.status, whole.encode())

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_call

    def answer_query(self, body: bytes, service: str) -> None:
        asked = {name: values[0] for name, values in parse_qs(body.decode()).items()}
        action = asked.pop("Action")
        found = (self.store.answer_sts if service == "sts" else self.store.answer_iam)(action, asked)
        text = f"<{action}Response><{action}Result>{to_xml(found)}</{action}Result></{action}Response>"
        self.answer(200, text.encode())

    def answer_s3(self, key: str, token: str, body: bytes) -> None:
        parts = urlsplit(self.path)
        bucket, _, name = unquote(parts.path).lstrip("/").partition("/")
        query = {each: values[0] for each, values in parse_qs(parts.query, keep_blank_values=True).items()}
        if bucket not in self.store.buckets:
            raise Denied("NoSuchBucket", 404)
        arn = f"arn:aws:s3:::{bucket}"
        if not name:
            self.store.check(key, token, "s3:ListBucket", arn, query.get("prefix"))
            self.answer(200, self.write_list(bucket, query.get("prefix", "")))
            return
        actions = {"PUT": "s3:PutObject", "DELETE": "s3:DeleteObject"}
        self.store.check(key, token, actions.get(self.command, "s3:GetObject"), f"{arn}/{name}")
        path = f"{bucket}/{name}"
        if self.command == "PUT":
            if self.headers.get("If-None-Match") == "*" and path in self.store.objects:
                raise Denied("PreconditionFailed", 412)
            self.store.objects[path] = body
            self.store.used_keys.add(key)
            self.answer(200, b"", {"ETag": '"1"'})
        elif self.command == "DELETE":
            self.store.objects.pop(path, None)
            self.answer(204)
        elif path not in self.store.objects:
            self.store.check(key, token, "s3:ListBucket", arn)  # otherwise S3 does not even say that it is missing
            raise Denied("NoSuchKey", 404)
        else:
            self.answer(200, self.store.objects[path], {"ETag": '"1"', "Last-Modified": MOMENT})

    def write_list(self, bucket: str, prefix: str) -> bytes:
        names = [each.partition("/")[2] for each in sorted(self.store.objects) if each.startswith(f"{bucket}/{prefix}")]
        contents = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(self.store.objects[f'{bucket}/{name}'])}</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>&quot;1&quot;</ETag></Contents>"
            for name in names
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{contents}</ListBucketResult>".encode()

    def answer(self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


MOMENT, MOMENT_ISO = "Thu, 01 Jan 2026 00:00:00 GMT", "2026-01-01T00:00:00Z"


class Raw(str):
    """Return the body, which is XML already."""


def to_xml(value: Mapping[str, Any]) -> str:
    return "".join(
        f"<{name}>{to_xml(each) if isinstance(each, Mapping) else each if isinstance(each, Raw) else escape(str(each))}"
        f"</{name}>"
        for name, each in value.items()
    )


@contextlib.contextmanager
def serve_store(address: str = "127.0.0.1") -> Iterator[FakeStore]:
    store = FakeStore()
    handler = type("Bound", (Handler,), {"store": store})
    server = ThreadingHTTPServer((address, 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    store.url = f"http://{address}:{server.server_address[1]}"
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
