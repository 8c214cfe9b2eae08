"""Lambda's HTTP interface as SkyPilot uses it: https://docs.lambda.ai/public-cloud/cloud-api/. Machines never boot."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any

REGIONS = ("us-east-1", "us-west-1")


class FakeLambda:
    """`full`: regions without machines. `refusal`: code and message with which every launch is refused."""

    def __init__(self) -> None:
        self.url = ""
        self.instances: dict[str, dict[str, Any]] = {}
        self.launched: list[dict[str, Any]] = []
        self.keys: list[dict[str, Any]] = []
        self.full: set[str] = set()
        self.refusal: tuple[str, str] | None = None
        self._ids = count(1)

    def get(self, path: str) -> Any:
        if path == "/instances":
            return list(self.instances.values())
        if path == "/ssh-keys":
            return self.keys
        if path == "/instance-types":
            free = [{"name": region} for region in REGIONS if region not in self.full]
            return {"gpu_1x_a10": {"regions_with_capacity_available": free}}
        return []

    def post(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/ssh-keys":
            self.keys.append(body)
            return body
        if path == "/instance-operations/launch":
            if self.refusal:
                return None
            self.launched.append(body)
            ids = [f"i-{next(self._ids)}" for _ in range(body["quantity"])]
            for each in ids:
                self.instances[each] = {
                    "id": each,
                    "name": body["name"],
                    "status": "booting",
                    "region": {"name": body["region_name"]},
                    "instance_type": {"name": body["instance_type_name"]},
                }
            return {"instance_ids": ids}
        if path == "/instance-operations/terminate":
            gone = [self.instances.pop(each) for each in body["instance_ids"] if each in self.instances]
            return {"terminated_instances": gone}
        return {}


@contextmanager
def serve() -> Iterator[FakeLambda]:
    fake = FakeLambda()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(fake.get(self.path))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._answer(fake.post(self.path, json.loads(body or b"{}")))

        def _answer(self, found: Any) -> None:
            code, message = fake.refusal or ("", "")
            reply = {"error": {"code": code, "message": message}} if found is None else {"data": found}
            content = json.dumps(reply).encode()
            self.send_response(400 if found is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    fake.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
