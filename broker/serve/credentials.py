"""The certificates of one service: one for its balancer, one for its replicas. Each trusts only the other.

Both are in the service's folder, made once. A replica gets its own key and the balancer's certificate as secrets of its
job, which programs do not see (`broker/agent/agent_entrance.py`). Each gateway has a certificate of its own; replicas
admit those of all gateways that the service may have, so that their number may change.
"""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from broker.runtime.credentials import make_credential
from broker.serve.certificates import read_expiry_s
from broker.serve.files import ServiceFolder
from broker.state.faults import explain_os_error
from broker.types import GATEWAYS_MAX, Secret, TlsFiles

log = logging.getLogger(__name__)

VALID = timedelta(days=3650)  # longer than a service: new replicas join with the first one's certificate
CERTIFICATE = "-----BEGIN CERTIFICATE-----"
KEY_SECRET, CLIENT_SECRET = "BROKER_REPLICA_PEM", "BROKER_BALANCER_PEM"


def make_secrets(folder: ServiceFolder, service: str, *, has_gateways: bool = False) -> dict[str, Secret]:
    """Return the secrets of a replica: its key and certificate, and the certificates of its clients, the balancers.

    Raises StateError.
    """
    ensure_credentials(folder, service, has_gateways=has_gateways)
    clients = "".join(read_certificate(path) for path in _list_clients(folder, has_gateways=has_gateways))
    return {KEY_SECRET: Secret(value=_read(folder.replica_pem)), CLIENT_SECRET: Secret(value=clients)}


def ensure_credentials(folder: ServiceFolder, service: str, *, has_gateways: bool = False) -> None:
    """Create missing keys and certificates; only the service's controller calls this. Raises StateError."""
    for path in (folder.replica_pem, *_list_clients(folder, has_gateways=has_gateways)):
        if not path.exists():
            _write(path, make_credential(f"broker {path.stem} {service}", valid=VALID).value)


def read_gateway_files(folder: ServiceFolder, number: int) -> dict[str, str]:
    """Return the files of gateway `number`, by name: its own key, and the replicas' certificate. Raises StateError."""
    return {
        folder.balancer_pem.name: _read(folder.gateway_pem(number)),
        folder.replica_pem.name: read_certificate(folder.replica_pem),
    }


def _list_clients(folder: ServiceFolder, *, has_gateways: bool) -> list[Path]:
    if not has_gateways:
        return [folder.balancer_pem]
    return [folder.gateway_pem(number) for number in range(1, GATEWAYS_MAX + 1)]


def make_client_context(folder: ServiceFolder) -> ssl.SSLContext | None:
    """Return the TLS settings of the balancer's connections to replicas; None if no credentials were created."""
    if not (folder.balancer_pem.exists() and folder.replica_pem.exists()):
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the certificate is pinned: possession of its key is the identity
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(folder.balancer_pem)
    context.load_verify_locations(cadata=read_certificate(folder.replica_pem))
    return context


def make_listener_context(tls: TlsFiles, protocols: Sequence[str] = ()) -> ssl.SSLContext:
    """Return the TLS settings for clients, who may choose one of these application protocols.

    Raises OSError for a file that cannot be read or holds no such key or certificate.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tls.certificate_path, tls.key_path)
    if tls.client_ca_path is not None:
        context.load_verify_locations(tls.client_ca_path)
        context.verify_mode = ssl.CERT_REQUIRED
    if protocols:
        context.set_alpn_protocols(list(protocols))
    return context


class ListenerFiles:
    """The files of a listener's TLS settings, which are replaced when a certificate is renewed.

    `ends_s`: when the certificate in use expires; None if it cannot be read.
    """

    def __init__(self, tls: TlsFiles) -> None:
        self._tls = tls
        self._seen = self._read_stamps()
        self.ends_s = read_expiry_s(Path(tls.certificate_path))

    def are_renewed(self) -> bool:
        """Return whether the files have changed since the last call, and fit together.

        Key and certificate are replaced one after the other; in between, the old ones stay in use.
        """
        stamps = self._read_stamps()
        if stamps == self._seen:
            return False
        self._seen = stamps
        try:
            make_listener_context(self._tls)
        except OSError as error:
            log.warning("the changed certificate for clients is not used: %s", error)
            return False
        self.ends_s = read_expiry_s(Path(self._tls.certificate_path))
        return True

    def load_into(self, context: ssl.SSLContext) -> None:
        """Use the files for new connections. An authority that was removed stays trusted until a restart."""
        try:
            context.load_cert_chain(self._tls.certificate_path, self._tls.key_path)
            if self._tls.client_ca_path is not None:
                context.load_verify_locations(self._tls.client_ca_path)
        except OSError as error:
            log.warning("the changed certificate for clients is not used: %s", error)

    def _read_stamps(self) -> tuple[int | None, ...]:
        paths = (self._tls.certificate_path, self._tls.key_path, self._tls.client_ca_path)
        return tuple(None if path is None else read_stamp(Path(path)) for path in paths)


def read_stamp(path: Path) -> int | None:
    """Return the time of a file's last change in nanoseconds; None without a file."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def read_certificate(path: Path) -> str:
    """Return the certificate of a file that also has its key. Raises StateError."""
    return CERTIFICATE + _read(path).partition(CERTIFICATE)[2]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError as error:
        raise explain_os_error(error, default=path) from error


def _write(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="ascii") as file:
            file.write(text)
        aside.replace(path)
    except OSError as error:
        raise explain_os_error(error, default=path) from error
