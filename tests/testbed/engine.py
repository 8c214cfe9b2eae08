"""An engine for hosts, which have no packages: completions as of `tests/serve/stand_in.py`. Standard library only.

    BROKER_REPLICA_PORT=8000 python3 engine.py [SECONDS]      # between two tokens

It does not import the stand-in: only this file is on the hosts.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PAUSE_S = float(sys.argv[1]) if len(sys.argv) > 1 else 0.0


class Engine(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise Nagle's algorithm holds each body back for 40 ms

    def do_GET(self) -> None:
        name = socket.gethostname().encode()
        self.send_response(200)
        self.send_header("content-length", str(len(name)))
        self.end_headers()
        self.wfile.write(name)

    def do_POST(self) -> None:
        fields = json.loads(self.rfile.read(int(self.headers["content-length"])))
        prompt = fields["prompt"]
        ids = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
        start, count = list(ids), fields["max_tokens"]
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for index in range(count):
            time.sleep(PAUSE_S)
            ids.append(97 + hashlib.blake2b(bytes(ids), digest_size=2).digest()[0] % 26)
            choice = {"index": 0, "text": chr(ids[-1]), "token_ids": ids[-1:]}
            choice["finish_reason"] = "length" if index + 1 == count else None
            first = {} if index else {"prompt_token_ids": start}
            self.send_event(json.dumps({"id": "x", "choices": [choice], **first}))
        self.send_event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def send_event(self, text: str) -> None:
        data = f"data: {text}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))


if __name__ == "__main__":
    port = int(os.environ["BROKER_REPLICA_PORT"])
    ThreadingHTTPServer((os.environ.get("BROKER_REPLICA_HOST", "127.0.0.1"), port), Engine).serve_forever()
