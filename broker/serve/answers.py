"""Headers that a proxy forwards, and its own responses, in the format of OpenAI's API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import HttpVersion11, web

from broker.serve.admission import KEY_HEADERS, KeyRefusal
from broker.serve.losses import ClientGoneError
from broker.serve.metering import ResponseMeter
from broker.serve.routes import BackendRoute

if TYPE_CHECKING:
    from multidict import CIMultiDict, CIMultiDictProxy

EVENT_STREAM = "text/event-stream"
METER = web.RequestKey("meter", ResponseMeter)
# RFC 9110, section 7.6.1, and those of HTTP/1.1 clients that offer HTTP/2 on a connection without TLS.
HOP_HEADERS = (
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding"),
    *("proxy-connection", "upgrade", "http2-settings"),
)
FORWARDED = "x-forwarded-for"
SCHEME = "x-forwarded-proto"  # without it, programs behind TLS would redirect to `http://`


def make_headers(route: BackendRoute, response: aiohttp.ClientResponse) -> CIMultiDict[str]:
    """Return the headers of the response to the client, including the service's version, which a router forwards."""
    headers = pass_headers(response.headers)
    if not route.is_router:
        headers["x-broker-version"] = str(route.backend.version)
    return headers


def make_request_headers(request: web.BaseRequest, *, has_keys: bool) -> CIMultiDict[str]:
    """Return the headers of the request to a replica, without those of its body; `has_keys`: without the API key."""
    headers = pass_headers(request.headers)
    for name in ("content-length", "expect", *(KEY_HEADERS if has_keys else ())):
        headers.popall(name, None)
    addresses = [*headers.popall(FORWARDED, ()), *([request.remote] if request.remote else [])]
    if addresses:
        headers[FORWARDED] = ", ".join(addresses)
    headers.setdefault(SCHEME, request.scheme)  # that of a proxy before this one is the client's
    return headers


def pass_headers(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Return the headers that a proxy forwards."""
    kept = headers.copy()
    for named in headers.getall("connection", ()):
        for name in named.split(","):
            kept.popall(name.strip(), None)
    for name in HOP_HEADERS:
        kept.popall(name, None)
    return kept


def is_forwardable(request: web.BaseRequest) -> bool:
    """Return whether the request's target is a path. Any other could change the address that is built from it."""
    return request.method != "CONNECT" and find_target(request).startswith("/")


def asks_for_origins(request: web.BaseRequest) -> bool:
    """Return whether a request is a CORS preflight, which browsers send without credentials.

    See https://fetch.spec.whatwg.org/#cors-preflight-request.
    """
    names = ("origin", "access-control-request-method")
    return request.method == "OPTIONS" and not request.can_read_body and all(name in request.headers for name in names)


def find_target(request: web.BaseRequest) -> str:
    """Return path and query as the client wrote them, even of a full URL: parsing turns `//a` into `////a`."""
    return request.raw_path if request.raw_path.startswith("/") else request.path_qs


async def begin_stream(
    request: web.BaseRequest, response: aiohttp.ClientResponse, headers: CIMultiDict[str]
) -> web.StreamResponse:
    """Send the head of a response whose body follows in parts. Raises ClientGoneError."""
    answer = web.StreamResponse(status=response.status, reason=response.reason, headers=headers)
    if request.version < HttpVersion11 and "content-length" not in headers:
        answer.force_close()  # nothing else tells such a client where the body ends
    try:
        await answer.prepare(request)
    except (OSError, aiohttp.ClientError) as error:
        raise ClientGoneError from error
    return answer


def refuse_key(refusal: KeyRefusal) -> web.Response:
    """Make the answer to a request that its API key does not allow."""
    error = {"message": refusal.message, "type": refusal.kind, "code": refusal.code, "param": None}
    headers = {"www-authenticate": "Bearer"} if refusal.status == 401 else {}
    if refusal.retry_s is not None:
        headers["retry-after"] = str(refusal.retry_s)
    return web.json_response({"error": error}, status=refusal.status, headers=headers)


def refuse(status: int, message: str, *, retry_s: int | None = None) -> web.Response:
    """Make an error in the format of OpenAI's API."""
    content: dict[str, Any] = {"error": {"message": message, "type": "server_error", "code": status}}
    headers = {} if retry_s is None else {"retry-after": str(retry_s)}
    return web.json_response(content, status=status, headers=headers)
