"""A folder behind S3's protocol on the loopback, at a limited rate over all connections: the store of `bench_restore`.

Only what a restore needs: lists, heads, whole and ranged reads, and small conditional writes. Logins are not checked.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "bench"
CHUNK_BYTES = 2**18


class Throttle:
    """Shares a rate of bytes among all connections."""

    def __init__(self, bytes_s: float) -> None:
        self._bytes_s = bytes_s
        self._free_s = 0.0
        self._lock = threading.Lock()

    def wait(self, count: int) -> None:
        """Return when `count` more bytes may be sent."""
        with self._lock:
            self._free_s = max(self._free_s, time.monotonic()) + count / self._bytes_s
            until_s = self._free_s
        time.sleep(max(0.0, until_s - time.monotonic()))


class Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    protocol_version = "HTTP/1.1"

    def __init__(self, root: Path, throttle: Throttle, *arguments: Any) -> None:
        self._root, self._throttle = root, throttle
        super().__init__(*arguments)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        """Send a list, an object or a range of one."""
        name, query = self._read_target()
        if not name:
            self._answer(200, self._write_list(query.get("prefix", "")).encode())
            return
        file = self._root / name
        if not file.is_file():
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        size = file.stat().st_size
        asked = self.headers.get("Range")
        first, _, last = (asked or "bytes=0-").removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last) + 1 if last else size, size)
        self._begin(206 if asked else 200, file, end - start)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        self.end_headers()
        with file.open("rb") as source:
            for place in range(start, end, CHUNK_BYTES):
                count = min(CHUNK_BYTES, end - place)
                self._throttle.wait(count)
                self.connection.sendfile(source, place, count)

    def do_HEAD(self) -> None:
        """Send the headers of an object."""
        file = self._root / self._read_target()[0]
        if not file.is_file():
            self._answer(404)
            return
        self._begin(200, file, file.stat().st_size)
        self.end_headers()

    def do_PUT(self) -> None:
        """Write an object, unless it must be new and is not."""
        file = self._root / self._read_target()[0]
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with file.open("xb" if self.headers.get("If-None-Match") == "*" else "wb") as target:
                target.write(content)
        except FileExistsError:
            self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            return
        self._begin(200, file, 0)
        self.end_headers()

    def _read_target(self) -> tuple[str, dict[str, str]]:
        """Return the name of the object and the query."""
        parts = urlsplit(self.path)
        name = unquote(parts.path).lstrip("/").removeprefix(BUCKET).lstrip("/")
        return name, {key: values[0] for key, values in parse_qs(parts.query).items()}

    def _begin(self, status: int, file: Path, length: int) -> None:
        known = file.stat()
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.send_header("ETag", f'"{known.st_mtime_ns}-{known.st_size}"')
        self.send_header("Last-Modified", formatdate(known.st_mtime, usegmt=True))

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _write_list(self, prefix: str) -> str:
        """Describe the objects and folders directly under a prefix: the only kind of list that a restore asks for."""
        folder = self._root / prefix
        entries = sorted(folder.iterdir()) if folder.is_dir() else []
        rows = []
        for entry in entries:
            name = escape(entry.relative_to(self._root).as_posix())
            if entry.is_dir():
                rows.append(f"<CommonPrefixes><Prefix>{name}/</Prefix></CommonPrefixes>")
                continue
            known = entry.stat()
            modified = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(known.st_mtime))
            rows.append(
                f'<Contents><Key>{name}</Key><Size>{known.st_size}</Size><ETag>"{known.st_mtime_ns}"</ETag>'
                f"<LastModified>{modified}</LastModified></Contents>"
            )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(rows)}</ListBucketResult>"


@contextlib.contextmanager
def serve_folder(root: Path, bytes_s: float) -> Iterator[dict[str, str]]:
    """Serve a folder as the bucket `BUCKET`; yield the environment variables by which clients find it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, root, Throttle(bytes_s)))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield {
            "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{server.server_port}",
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "bench",
            "AWS_REGION": "us-east-1",
        }
    finally:
        server.shutdown()
        server.server_close()
