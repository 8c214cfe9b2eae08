"""Headers that a proxy forwards, and its own responses, in the format of OpenAI's API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web

from broker.serve.admission import KeyRefusal
from broker.serve.routes import BackendRoute

if TYPE_CHECKING:
    from multidict import CIMultiDict, CIMultiDictProxy

HOP_HEADERS = (
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding"),
)


def make_headers(route: BackendRoute, response: aiohttp.ClientResponse) -> CIMultiDict[str]:
    """Return the headers of the response to the client, with the service's version."""
    headers = pass_headers(response.headers)
    headers["x-broker-version"] = str(route.backend.version)
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
