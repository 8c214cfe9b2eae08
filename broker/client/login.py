"""The login of the current user: the URL of a server, a token, and the fingerprint of its certificate."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import re
import ssl
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from broker.errors import AuthError, StateError, UsageError
from broker.frozen import frozen
from broker.types import Secret

TIMEOUT_S = 30.0  # the server sends at least a blank line every five seconds
FINGERPRINT = r"sha256:[0-9a-f]{64}"


@frozen
class ServerLogin:
    """A login. `fingerprint` is `sha256:...` of the certificate to accept; None: check it as browsers do."""

    url: str
    token: Secret
    fingerprint: str | None = None


def check_login(login: ServerLogin) -> None:
    """Raise UsageError for an invalid URL or fingerprint; tokens are never sent over plain HTTP to other hosts."""
    parts = urlsplit(login.url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
        raise UsageError(
            f"invalid server URL `{login.url}`", hints=["it looks like `https://HOST:PORT`; the server prints it"]
        )
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        raise UsageError(
            f"`{login.url}` is not encrypted",
            hints=[f"use `https://`: a server on another host always has a certificate ({parts.netloc})"],
        )
    if login.fingerprint is not None and not re.fullmatch(FINGERPRINT, login.fingerprint):
        raise UsageError(f"invalid fingerprint `{login.fingerprint}`", hints=["copy `sha256:...` from the server"])


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the host."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def save_login(path: Path, login: ServerLogin) -> None:
    """Write the login, mode 0600. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}-{os.getpid()}")
    data = {"url": login.url, "token": login.token.value, "fingerprint": login.fingerprint}
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(data, file)
    aside.replace(path)


def read_login(path: Path) -> ServerLogin:
    """Read the login. Raises StateError for a damaged file."""
    try:
        data = json.loads(path.read_bytes())
        return ServerLogin(
            url=str(data["url"]),
            token=Secret(value=str(data["token"])),
            fingerprint=msgspec.convert(data["fingerprint"], str | None),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateError(
            f"cannot read the login in {path}: {error}", hints=("log in again: `broker login URL --token-file FILE`",)
        ) from None


def connect(login: ServerLogin) -> HTTPConnection:
    """Open a connection whose certificate is checked before anything is sent. It does not reopen itself.

    Raises AuthError for a certificate other than the pinned one, and OSError if the server does not respond.
    """
    parts = urlsplit(login.url)
    host = parts.hostname or ""
    if parts.scheme == "http":
        plain = HTTPConnection(host, parts.port or 80, timeout=TIMEOUT_S)
        plain.connect()
        plain.auto_open = 0
        return plain
    checking = ssl.create_default_context()
    if login.fingerprint is not None:  # stronger than names and authorities
        checking.check_hostname = False
        checking.verify_mode = ssl.CERT_NONE
    connection = HTTPSConnection(host, parts.port or 443, timeout=TIMEOUT_S, context=checking)
    connection.auto_open = 0  # after the server has closed it, the token would be sent without comparing fingerprints
    try:
        connection.connect()
    except ssl.SSLCertVerificationError as error:
        raise AuthError(
            f"the certificate of {login.url} cannot be verified: {error.verify_message}",
            hints=("pass the fingerprint that `broker server start` printed: `--fingerprint sha256:...`",),
        ) from None
    if login.fingerprint is not None:
        certificate = connection.sock.getpeercert(binary_form=True) or b""
        found = f"sha256:{hashlib.sha256(certificate).hexdigest()}"
        if found != login.fingerprint:
            connection.close()
            raise AuthError(
                f"{login.url} presents a different certificate than at login",
                details=(f"expected {login.fingerprint}", f"found    {found}"),
                hints=("if its operator replaced the certificate, log in again with the new fingerprint",),
            )
    return connection
