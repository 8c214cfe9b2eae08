"""POST one JSON body to a webhook, within a time limit.

A shared server only posts to addresses that its users may reach (decision 0437).

The address is checked on the open connection, before anything is sent: a name may resolve to another address each time.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from broker.errors import TransientError, UsageError
from broker.redirects import NoRedirect

TIMEOUT_S = 10.0  # of each network operation
POST_S_MAX = 30.0  # of all of them: a server may send one byte every few seconds
TRANSLATED = ipaddress.ip_network("64:ff9b::/96")  # IPv4 addresses behind NAT64 (RFC 6052)
# Services of a cloud that know the credentials of its machines, where they are not at a link-local address:
# AWS and Google Cloud over IPv6, Azure and Alibaba Cloud.
CLOUD_SERVICES = frozenset(
    map(ipaddress.ip_address, ("fd00:ec2::254", "fd20:ce::254", "168.63.129.16", "100.100.100.200"))
)
CheckAddress = Callable[[str], None]


def check_address(text: str, *, allowed: Sequence[str] = ()) -> None:
    """Raise UsageError for an address of this machine, its link or its cloud's services.

    An address in one of the networks in `allowed` is accepted.
    """
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address in TRANSLATED:
            address = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        else:
            address = address.ipv4_mapped or address
    if any(address in ipaddress.ip_network(each) for each in allowed):
        return
    is_own = address.is_loopback or address.is_unspecified or address.is_link_local
    if is_own or address.is_multicast or address.is_reserved or address in CLOUD_SERVICES:
        raise UsageError(
            f"the address {address} can only be reached from the server's own machine",
            hints=["an operator of the server can allow it: `allowed_networks` in `[notify]` of `config.toml`"],
        )


def check_host(url: str, *, allowed: Sequence[str] = ()) -> None:
    """Raise UsageError for a URL whose host is written as such an address. Other hosts are checked when connected."""
    try:
        host = urlsplit(url).hostname or ""
        check_address("127.0.0.1" if host == "localhost" else host, allowed=allowed)
    except ValueError:
        return  # a name


class Posting:
    """The connection of one delivery, which can be ended from another thread. `check` refuses its address."""

    def __init__(self, check: CheckAddress | None = None) -> None:
        self._check = check
        self._lock = threading.Lock()
        self._copy: socket.socket | None = None
        self._has_ended = False

    def begin(self, connected: socket.socket) -> None:
        """Check a new connection. Raises UsageError for its address, and TimeoutError after the end."""
        if self._check is not None:
            self._check(str(connected.getpeername()[0]))
        with self._lock:
            if self._has_ended:
                raise TimeoutError
            self._copy = connected.dup()  # TLS takes the socket itself over

    def end(self) -> None:
        """End the connection, at which the thread that uses it gets an error; no effect if it has ended."""
        with self._lock:
            self._has_ended = True
            if self._copy is not None:
                with suppress(OSError):
                    self._copy.shutdown(socket.SHUT_RDWR)
                self._copy.close()
            self._copy = None


class _Connection(http.client.HTTPConnection):
    posting: Posting

    def connect(self) -> None:
        """Connect, and check the address before the request, or the TLS handshake, begins."""
        super().connect()
        try:
            self.posting.begin(self.sock)
        except BaseException:
            self.close()
            raise


class _TlsConnection(http.client.HTTPSConnection, _Connection):
    """Connects like `_Connection`, the next class in the method resolution order, then begins TLS."""


class _PostingHandler(urllib.request.HTTPSHandler, urllib.request.HTTPHandler):
    """Opens the connection of a posting."""

    def __init__(self, posting: Posting) -> None:
        super().__init__()
        self._posting = posting

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self._open(req, _Connection)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self._open(req, _TlsConnection, context=ssl.create_default_context())

    def _open(
        self, request: urllib.request.Request, kind: type[_Connection], **options: Any
    ) -> http.client.HTTPResponse:
        def make(host: str, /, **named: Any) -> _Connection:
            connection = kind(host, **named)
            connection.posting = self._posting
            return connection

        return self.do_open(make, request, **options)


def post(posting: Posting, url: str, body: Mapping[str, object], id: str) -> None:
    """Send the body; return once the receiver has accepted it. Raises TransientError, UsageError.

    The errors do not show the URL, which may contain a secret.
    """
    if not url.startswith(("https://", "http://")):
        raise UsageError("the target is not a URL that begins with `https://`")
    headers = {"Content-Type": "application/json", "User-Agent": "intercloud-broker", "Broker-Event-Id": id}
    try:
        request = urllib.request.Request(url, json.dumps(body).encode(), headers, method="POST")
        with urllib.request.build_opener(NoRedirect, _PostingHandler(posting)).open(request, timeout=TIMEOUT_S):
            return
    except urllib.error.HTTPError as error:
        with error:
            raise TransientError(f"the server answered with status {error.code}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise TransientError(f"no connection: {name_reason(error)}") from None


def is_proxied(url: str) -> bool:
    """Return whether a proxy of the environment connects to this URL: it decides which addresses can be reached."""
    parts = urlsplit(url)
    return parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(parts.hostname or "")


def name_reason(error: BaseException) -> str:
    """Return the reason of an error without the address, which some messages contain."""
    inner = getattr(error, "reason", error)
    if isinstance(inner, ssl.SSLCertVerificationError):
        return f"invalid certificate ({inner.verify_message})"
    return (inner.strerror if isinstance(inner, OSError) else None) or type(inner).__name__
