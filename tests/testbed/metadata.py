"""The metadata server at 169.254.169.254, as EC2 and Compute Engine have it; a client is known by its address."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from tests.testbed.world import METADATA

AWS_ROOT, GCP_ROOT = "/latest/meta-data/", "/computeMetadata/v1/"
ROLES = "iam/security-credentials/"


@dataclass(kw_only=True)
class Guest:
    """Metadata of one host; `notice_s` is when (epoch) it will be taken away."""

    cloud: str
    id: str
    notice_s: float | None = None
    rebalance_s: float | None = None
    credentials: Mapping[str, str] | None = None  # of its instance profile
    changed: threading.Condition = field(default_factory=threading.Condition)

    def give_notice(self, notice_s: float) -> None:
        with self.changed:
            self.notice_s = notice_s
            self.changed.notify_all()


class QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors: hosts die in the middle of a request."""


class MetadataServer:
    def __init__(self) -> None:
        self.guests: dict[str, Guest] = {}  # by address
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # otherwise Nagle's algorithm holds each body back for 40 ms

            def do_GET(self) -> None:
                self._answer(*server.get(self._guest, self.path, {k.lower(): v for k, v in self.headers.items()}))

            def do_PUT(self) -> None:
                is_token = self.path == "/latest/api/token" and self.headers.get("X-aws-ec2-metadata-token-ttl-seconds")
                is_known = self._guest is not None and self._guest.cloud == "aws"
                self._answer(*((200, f"token-{self._guest.id}") if is_token and is_known else (400, "")))

            @property
            def _guest(self) -> Guest | None:
                return server.guests.get(self.client_address[0])

            def _answer(self, status: int, text: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text.encode())))
                self.send_header("Metadata-Flavor", "Google")
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = QuietServer((METADATA, 80), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def get(self, guest: Guest | None, path: str, headers: dict[str, str]) -> tuple[int, str]:
        if guest is None:
            return 404, ""
        if guest.cloud == "aws":
            if headers.get("x-aws-ec2-metadata-token") != f"token-{guest.id}":
                return 401, ""
            return answer_aws(guest, path.removeprefix(AWS_ROOT))
        if headers.get("metadata-flavor") != "Google":
            return 403, ""
        return answer_gcp(guest, path.removeprefix(GCP_ROOT))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def answer_aws(guest: Guest, name: str) -> tuple[int, str]:
    if name == "instance-id":
        return 200, guest.id
    if name == ROLES and guest.credentials is not None:
        return 200, "role"
    if name == f"{ROLES}role" and guest.credentials is not None:
        return 200, json.dumps(guest.credentials)
    if name == "spot/instance-action" and guest.notice_s is not None:
        return 200, json.dumps({"action": "terminate", "time": show_time(guest.notice_s)})
    if name == "events/recommendations/rebalance" and guest.rebalance_s is not None:
        return 200, json.dumps({"noticeTime": show_time(guest.rebalance_s)})
    return 404, ""


def answer_gcp(guest: Guest, path: str) -> tuple[int, str]:
    parts = urlsplit(path)
    asked = parse_qs(parts.query)
    if parts.path != "instance/preempted":
        return 404, ""
    with guest.changed:
        if "wait_for_change" in asked and guest.notice_s is None:
            guest.changed.wait(float(asked.get("timeout_sec", ["60"])[0]))
        return 200, "FALSE" if guest.notice_s is None else "TRUE"


def show_time(time_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time_s))
