"""HTTP client for the price sources: the standard library's, with backoff, and bounded in size and time."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping

from broker.errors import AuthError, SourceError

TIMEOUT_S = 60.0
TRIES_MAX = 5
BACKOFF_S = 1.0  # doubled each time, unless the server specifies a delay
BACKOFF_S_MAX = 60.0
BYTES_MAX = 512 << 20  # the largest public price file has about 300 MB
LOOPBACK = ("127.0.0.1", "localhost", "::1")  # tests and local mirrors may use plain HTTP here
RETRYABLE = (429, 500, 502, 503, 504)


class HttpGet:
    """Implements `Get`. `sleep` waits between tries, in seconds; `bytes_max` bounds the sum of all responses."""

    def __init__(self, sleep: Callable[[float], None], *, bytes_max: int | None = None) -> None:
        self._sleep = sleep
        self._bytes_left = bytes_max

    def __call__(self, url: str, *, query: Mapping[str, str] | None = None) -> bytes:
        """Fetch a URL; retry if it is throttled, unreachable or fails. Raises SourceError, AuthError if denied."""
        whole = f"{url}{'&' if '?' in url else '?'}{urllib.parse.urlencode(query)}" if query else url
        parts = urllib.parse.urlsplit(whole)
        if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in LOOPBACK):
            raise SourceError(f"prices are only fetched over https, not from {_hide_query(whole)}")
        for tries in range(TRIES_MAX):
            try:
                return self._spend(_read(whole, BYTES_MAX if self._bytes_left is None else self._bytes_left))
            except urllib.error.HTTPError as error:
                if error.code in (401, 403):
                    raise AuthError(f"{_hide_query(whole)} denies access: HTTP {error.code}") from None
                if error.code not in RETRYABLE or tries == TRIES_MAX - 1:
                    raise SourceError(f"{_hide_query(whole)} responded with {error.code} {error.reason}") from None
                self._sleep(_read_wait_s(error.headers.get("Retry-After"), tries))
            except (urllib.error.URLError, TimeoutError, ConnectionError, http.client.HTTPException) as error:
                if tries == TRIES_MAX - 1:
                    reason = getattr(error, "reason", None) or error
                    raise SourceError(f"{_hide_query(whole)} cannot be reached: {reason}") from None
                self._sleep(_read_wait_s(None, tries))
        raise AssertionError("the last try returns or raises")

    def _spend(self, body: bytes) -> bytes:
        if self._bytes_left is not None:
            self._bytes_left -= len(body)
        return body


def _read(url: str, bytes_max: int) -> bytes:
    request = urllib.request.Request(url, headers={"User-Agent": "intercloud-broker", "Accept": "*/*"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        body: bytes = answer.read(bytes_max + 1)
        length = answer.headers.get("Content-Length")
    if length and length.isdigit() and len(body) < min(int(length), bytes_max):
        raise ConnectionError(f"the response was cut off after {len(body)} of {length} bytes")
    if len(body) > bytes_max:
        raise SourceError(f"the response of {_hide_query(url)} is larger than the {bytes_max >> 20} MiB allowed")
    return body


def _read_wait_s(text: str | None, tries: int) -> float:
    wait_s = float(text) if text and text.isdigit() else BACKOFF_S * 2**tries
    return min(wait_s, BACKOFF_S_MAX)


def _hide_query(url: str) -> str:
    """Remove the query, which may contain a key."""
    return url.partition("?")[0]
