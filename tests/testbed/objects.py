"""A Google and an Azure bucket on the loopback, as far as obstore uses them: objects in a dict, nothing kept.

Paths and headers follow Google's XML API (docs.cloud.google.com/storage/docs/xml-api) and Azure's Blob service REST API
(learn.microsoft.com/rest/api/storageservices). Google's logins are not checked, Azure's are.
"""

import base64
import contextlib
import email
import hashlib
import hmac
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

BUCKET = "testbed"
AZURE_ACCOUNT, AZURE_KEY, AZURE_TOKEN = "account", base64.b64encode(b"key of the account").decode(), "eyJ0"
AZURE_SIGNATURE = "sv=2021-08-06&sr=c&sp=rwl&sig=a%2Bb%3D"


@dataclass(kw_only=True)
class Objects:
    """The bucket's content, and the requests made."""

    content: dict[str, bytes] = field(default_factory=dict)
    parts: dict[str, dict[str, bytes]] = field(default_factory=dict)  # of uploads under way
    forbidden_count: int = 0  # requests without a login
    refused_count: int = 0  # conditional writes that met an object
    part_count: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)

    def put(self, name: str, content: bytes, *, is_new_only: bool) -> bool:
        """Write an object and return whether it was written: the one atomic step."""
        with self.lock:
            if is_new_only and name in self.content:
                self.refused_count += 1
                return False
            self.content[name] = content
            return True

    def find(self, prefix: str, delimiter: str) -> tuple[list[str], list[str]]:
        """Find names under a prefix, and the prefixes that a delimiter makes of the others."""
        with self.lock:
            names = sorted(name for name in self.content if name.startswith(prefix))
        if not delimiter:
            return names, []
        ends = {name: name.find(delimiter, len(prefix)) for name in names}
        folders = sorted({name[: end + 1] for name, end in ends.items() if end >= 0})
        return [name for name, end in ends.items() if end < 0], folders


class Handler(BaseHTTPRequestHandler):
    """The common part of both clouds."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise Nagle's algorithm holds each body back for 40 ms
    objects: ClassVar[Objects]

    def log_message(self, *_: Any) -> None:
        """Log nothing."""

    def begin(self) -> tuple[str, dict[str, str], bytes]:
        """Return the object's name, the query and the body."""
        parts = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}
        _, _, name = unquote(parts.path).lstrip("/").partition(f"{BUCKET}")
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return name.lstrip("/"), query, body

    def answer(self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        """Send one whole answer."""
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer_object(self, name: str) -> None:
        """Send all of an object or the requested range."""
        content = self.objects.content.get(name)
        if content is None:
            self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        headers = describe(content)
        asked = self.headers.get("Range") or self.headers.get("x-ms-range")
        if not asked:
            length = {"Content-Length": str(len(content))} if self.command == "HEAD" else {}
            self.answer(200, content, headers | length)
            return
        first, _, last = asked.removeprefix("bytes=").partition("-")
        end = min(int(last) + 1 if last else len(content), len(content))
        headers["Content-Range"] = f"bytes {first}-{end - 1}/{len(content)}"
        self.answer(206, content[int(first) : end], headers)

    def do_GET(self) -> None:
        """Send a list or an object."""
        name, query, _ = self.begin()
        if name:
            self.answer_object(name)
        else:
            self.answer(200, self.write_list(*self.objects.find(query.get("prefix", ""), query.get("delimiter", ""))))

    def do_HEAD(self) -> None:
        """Send an object's headers."""
        self.answer_object(self.begin()[0])

    def write_list(self, names: list[str], folders: list[str]) -> bytes:
        """Send a list in the cloud's format."""
        raise NotImplementedError


class Google(Handler):
    """Google's XML API; generation 0 stands for an object that is not there."""

    def do_PUT(self) -> None:
        """Put an object, a copy, or a part of an upload."""
        name, query, body = self.begin()
        if "uploadId" in query:
            self.objects.parts[query["uploadId"]][query["partNumber"]] = body
            self.objects.part_count += 1
            self.answer(200, headers={"ETag": tag(body)})
            return
        if source := self.headers.get("x-goog-copy-source"):
            body = self.objects.content[unquote(source).lstrip("/").removeprefix(f"{BUCKET}/")]
        is_new_only = self.headers.get("x-goog-if-generation-match") == "0"
        if not self.objects.put(name, body, is_new_only=is_new_only):
            self.answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        elif source:
            answer = f"<CopyObjectResult><ETag>{tag(body)}</ETag></CopyObjectResult>"
            self.answer(200, answer.encode(), {"ETag": tag(body)})
        else:
            self.answer(200, headers={"ETag": tag(body), "x-goog-generation": "1"})

    def do_POST(self) -> None:
        """Begin an upload in parts, or assemble it."""
        name, query, body = self.begin()
        if "uploads" in query:
            upload = str(len(self.objects.parts) + 1)
            self.objects.parts[upload] = {}
            self.answer(200, wrap("InitiateMultipartUploadResult", UploadId=upload).encode())
            return
        parts = self.objects.parts.pop(query["uploadId"])
        numbers = [each.text for each in ElementTree.fromstring(body).iter() if each.tag.endswith("PartNumber")]
        whole = b"".join(parts[number] for number in numbers if number)
        self.objects.put(name, whole, is_new_only=False)
        self.answer(200, wrap("CompleteMultipartUploadResult", ETag=tag(whole)).encode())

    def do_DELETE(self) -> None:
        """Delete an object."""
        name, _, _ = self.begin()
        is_known = self.objects.content.pop(name, None) is not None
        self.answer(204 if is_known else 404)

    def write_list(self, names: list[str], folders: list[str]) -> bytes:
        """Send a ListBucketResult."""
        contents = "".join(
            "<Contents>"
            f"<Key>{escape(name)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>{tag(self.objects.content[name])}</ETag><Size>{len(self.objects.content[name])}</Size>"
            "</Contents>"
            for name in names
        )
        prefixes = "".join(f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>" for each in folders)
        return f"<ListBucketResult>{contents}{prefixes}</ListBucketResult>".encode()


class ForbiddenError(Exception):
    """A login that is missing, or whose signature is wrong."""


class Azure(Handler):
    """Azure's Blob service."""

    def begin(self) -> tuple[str, dict[str, str], bytes]:
        """Begin a request.

        Raise the error that `handle_one_request` answers with, if there is no login of the account.
        """
        found = super().begin()
        if not is_authorised(self.command, self.path, {name.lower(): value for name, value in self.headers.items()}):
            raise ForbiddenError
        return found

    def handle_one_request(self) -> None:
        """Handle a request as the base does, with the one refusal that any verb may raise."""
        try:
            super().handle_one_request()
        except ForbiddenError:
            self.objects.forbidden_count += 1
            self.answer(403, b"<Error><Code>AuthenticationFailed</Code></Error>")

    def do_PUT(self) -> None:
        """Put a blob, a copy, a block, or the list that makes blocks a blob."""
        name, query, body = self.begin()
        headers = {"ETag": tag(body), "x-ms-request-id": "1", "Last-Modified": formatdate(usegmt=True)}
        if query.get("comp") == "block":
            self.objects.parts.setdefault(name, {})[query["blockid"]] = body
            self.objects.part_count += 1
            self.answer(201, headers=headers)
            return
        if query.get("comp") == "blocklist":
            ids = [each.text or "" for each in ElementTree.fromstring(body)]
            body = b"".join(self.objects.parts[name][each] for each in ids)
            headers["ETag"] = tag(body)
        if source := self.headers.get("x-ms-copy-source"):
            body = self.objects.content[unquote(urlsplit(source).path).partition(f"{BUCKET}/")[2]]
        if self.objects.put(name, body, is_new_only=self.headers.get("If-None-Match") == "*"):
            self.answer(202 if source else 201, headers={**headers, "x-ms-copy-status": "success"})
        else:
            self.answer(409, b"<Error><Code>BlobAlreadyExists</Code></Error>", {"x-ms-error-code": "BlobAlreadyExists"})

    def do_POST(self) -> None:
        """Carry out several deletions in one request, each answered in a part of its own."""
        _, _, body = self.begin()
        head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
        answers = []
        for part in email.message_from_bytes(head + body).get_payload():
            request = part.get_payload()
            name = unquote(request.split(" ")[1].partition("?")[0]).partition(f"{BUCKET}/")[2]
            is_known = self.objects.content.pop(name, None) is not None
            status = "202 Accepted" if is_known else "404 The specified blob does not exist."
            code = "" if is_known else "x-ms-error-code: BlobNotFound\r\n"
            answers.append(
                f"Content-Type: application/http\r\nContent-ID: {part['Content-ID']}\r\n\r\n"
                f"HTTP/1.1 {status}\r\nx-ms-request-id: 1\r\n{code}Content-Length: 0\r\n\r\n"
            )
        text = "".join(f"--batch\r\n{each}\r\n" for each in answers) + "--batch--\r\n"
        self.answer(202, text.encode(), {"Content-Type": "multipart/mixed; boundary=batch"})

    def do_DELETE(self) -> None:
        """Delete a blob."""
        name, _, _ = self.begin()
        is_known = self.objects.content.pop(name, None) is not None
        self.answer(202 if is_known else 404)

    def write_list(self, names: list[str], folders: list[str]) -> bytes:
        """Send EnumerationResults."""
        blobs = "".join(
            f"<Blob><Name>{escape(name)}</Name><Properties><Last-Modified>{formatdate(usegmt=True)}</Last-Modified>"
            f"<Etag>{tag(self.objects.content[name])}</Etag><Content-Length>{len(self.objects.content[name])}"
            "</Content-Length><Content-Type>application/octet-stream</Content-Type></Properties></Blob>"
            for name in names
        )
        prefixes = "".join(f"<BlobPrefix><Name>{escape(each)}</Name></BlobPrefix>" for each in folders)
        return f"<EnumerationResults><Blobs>{blobs}{prefixes}</Blobs><NextMarker /></EnumerationResults>".encode()


def is_authorised(verb: str, path: str, headers: Mapping[str, str]) -> bool:
    """Return whether the account's key, a signature in the query, or a token of Entra's authorises the request."""
    parts = urlsplit(path)
    query = parse_qs(parts.query, keep_blank_values=True)
    kind, _, word = headers.get("authorization", "").partition(" ")
    if kind == "SharedKey":
        return hmac.compare_digest(word, f"{AZURE_ACCOUNT}:{sign_as_azure(verb, parts.path, query, headers)}")
    return word == AZURE_TOKEN if kind == "Bearer" else query.get("sig") == parse_qs(AZURE_SIGNATURE)["sig"]


def sign_as_azure(verb: str, path: str, query: Mapping[str, list[str]], headers: Mapping[str, str]) -> str:
    """Sign with Shared Key of 2015-02-21 and later, where a length of zero is left out."""
    names = ("content-encoding", "content-language", "content-length", "content-md5", "content-type", "date")
    names += ("if-modified-since", "if-match", "if-none-match", "if-unmodified-since", "range")
    plain = ["" if (name, headers.get(name)) == ("content-length", "0") else headers.get(name, "") for name in names]
    own = [f"{name}:{headers[name].strip()}" for name in sorted(headers) if name.startswith("x-ms-")]
    asked = [f"{name.lower()}:{','.join(sorted(query[name]))}" for name in sorted(query)]
    text = "\n".join([verb, *plain, *own, f"/{AZURE_ACCOUNT}{path}", *asked])
    digest = hmac.new(base64.b64decode(AZURE_KEY), text.encode(), hashlib.sha256).digest()
    return base64.b64encode(digest).decode()


def wrap(kind: str, **values: str) -> str:
    """Make a small XML document."""
    return f"<{kind}><Bucket>{BUCKET}</Bucket>{''.join(f'<{k}>{v}</{k}>' for k, v in values.items())}</{kind}>"


def tag(content: bytes) -> str:
    """Make a tag in the form of ETags."""
    return f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'


def describe(content: bytes) -> dict[str, str]:
    """Return the headers of an object."""
    date = {"Last-Modified": formatdate(0, usegmt=True)}
    return {"ETag": tag(content), "x-goog-generation": "1", "x-ms-blob-type": "BlockBlob", **date}


@contextlib.contextmanager
def serve_google() -> Iterator[tuple[Objects, dict[str, str]]]:
    """Serve an empty bucket, and yield the environment in which a program finds it."""
    with _serve(Google) as (objects, port):
        yield objects, {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}"}


@contextlib.contextmanager
def serve_azure() -> Iterator[tuple[Objects, dict[str, str]]]:
    """Serve an empty container, and yield the environment in which a program finds it."""
    with _serve(Azure) as (objects, port):
        yield (
            objects,
            {
                "AZURE_STORAGE_ACCOUNT_NAME": AZURE_ACCOUNT,
                "AZURE_STORAGE_ACCOUNT_KEY": AZURE_KEY,
                "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}",
            },
        )


@contextlib.contextmanager
def _serve(kind: type[Handler]) -> Iterator[tuple[Objects, int]]:
    objects = Objects()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (kind,), {"objects": objects}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield objects, server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
