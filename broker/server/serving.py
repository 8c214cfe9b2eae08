"""Listen: on the loopback in plain text, on any other address with TLS, with a self-signed certificate by default."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

from broker.app.backup_files import forget_asides
from broker.app.freshness import keep_prices_fresh
from broker.client.login import is_loopback
from broker.clock import SystemClock
from broker.errors import BrokerError, UsageError
from broker.frozen import frozen
from broker.server.backup import keep_backup
from broker.server.context import Policy, ServerContext
from broker.server.files import FileStore
from broker.server.http import Server

log = logging.getLogger(__name__)

LEAVE_S = 5.0
# For the headers of a request, and between two requests: as nginx waits. aiohttp's default is an hour.
IDLE_S_MAX = 75.0
WATCH_S = 10.0  # between checks for a dead daemon
FORGET_EVERY_S = 86400.0


@frozen
class Listening:
    """The URL of the server, and the fingerprint of its certificate; None without TLS."""

    url: str
    fingerprint: str | None


@frozen
class Certificate:
    """PEM files of a certificate and its private key."""

    certificate: Path
    key: Path

    def fingerprint(self) -> str:
        """Return `sha256:...` of the first certificate. Raises UsageError for a file without one."""
        try:
            text = self.certificate.read_text()
            begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
            first = text[text.index(begin) : text.index(end) + len(end)]
            return f"sha256:{hashlib.sha256(ssl.PEM_cert_to_DER_cert(first)).hexdigest()}"
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read the certificate in {self.certificate}: {error}") from None


def choose_certificate(home: Path, host: str, given: Certificate | None) -> Certificate | None:
    """Return the operator's certificate, else the server's own; None on the loopback, whose traffic is local."""
    return given if given is not None or is_loopback(host) else ensure_certificate(home)


def ensure_certificate(home: Path) -> Certificate:
    """Return this server's own certificate, which is created once, because clients pin it."""
    from broker.runtime.credentials import make_credential

    folder = home / "server"
    path = folder / "certificate.pem"
    if not path.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        aside = folder / f".certificate-{os.getpid()}"
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(make_credential("broker server").value)
        try:
            os.link(aside, path)  # servers that start concurrently use the same certificate
        except FileExistsError:
            pass
        finally:
            aside.unlink()
    return Certificate(certificate=path, key=path)


def write_listening(home: Path, listening: Listening, *, version: str) -> None:
    """Write the address and start time to `server/listening.json`, for `broker server status` on another machine."""
    folder = home / "server"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = folder / f".listening-{os.getpid()}"
    record = {
        "url": listening.url, "fingerprint": listening.fingerprint, "pid": os.getpid(), "version": version,
        "started_s": SystemClock().now_s(),
    }  # fmt: skip
    aside.write_text(json.dumps(record))
    aside.replace(folder / "listening.json")


async def serve(
    home: Path,
    *,
    host: str,
    port: int,
    policy: Policy,
    certificate: Certificate | None = None,
    on_ready: Callable[[Listening], None],
    until: Callable[[], Awaitable[object]],
) -> None:
    """Serve until `until` returns. Raises OSError if listening on the address fails."""
    tls = None
    certificate = await asyncio.to_thread(choose_certificate, home, host, certificate)
    if certificate is not None:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(certificate.certificate, certificate.key)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.create_server((host.strip("[]"), port), family=family)
    server = Server(home, policy)
    runner = web.AppRunner(
        server.make_app(), access_log=None, shutdown_timeout=LEAVE_S, keepalive_timeout=IDLE_S_MAX
    )  # fmt: skip
    await runner.setup()
    try:
        await web.SockSite(runner, sock, ssl_context=tls).start()
        shown = f"[{host}]" if ":" in host else host
        scheme = "http" if tls is None else "https"
        url = f"{scheme}://{shown}:{sock.getsockname()[1]}"
        on_ready(Listening(url=url, fingerprint=certificate.fingerprint() if certificate else None))
        await _watch_until(home, policy, until)
    finally:
        server.leave()
        await runner.cleanup()


async def _watch_until(home: Path, policy: Policy, until: Callable[[], Awaitable[object]]) -> None:
    """Keep the daemon running and backup and prices current until `until` returns. Raises FencedError if replaced."""
    tasks = [
        asyncio.ensure_future(until()),
        asyncio.create_task(repeat(home, policy, ServerContext.restart_daemon_if_needed, every_s=WATCH_S)),
        asyncio.create_task(repeat(home, policy, _forget_files, every_s=FORGET_EVERY_S)),
        asyncio.create_task(keep_backup(home)),
        asyncio.create_task(keep_prices_fresh(SystemClock(), home)),
    ]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def repeat(home: Path, policy: Policy, act: Callable[[ServerContext], None], *, every_s: float) -> None:
    """Call `act` every `every_s` seconds with a new context. An error is logged: it must not end the server."""

    def act_once() -> None:
        context = ServerContext(home, policy=policy, on_note=log.warning)
        try:
            act(context)
        except BrokerError as error:
            log.warning("%s", error.message)
        except OSError as error:
            log.warning("%s", error)
        finally:
            context.close()

    clock = SystemClock()
    while True:
        await asyncio.to_thread(act_once)
        await clock.sleep(every_s)


def _forget_files(context: ServerContext) -> None:
    """Delete uploaded files that are no longer needed, and what killed backups have left behind."""
    forget_asides(context.config.home, now_s=context.clock.now_s())
    uploads = FileStore(context.config.home / "uploads")
    if count := uploads.forget_unused(context.store.retention.is_named, now_s=context.clock.now_s()):
        log.info("deleted %s uploads that no task names", count)
