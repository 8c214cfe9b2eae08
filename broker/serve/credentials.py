"""The certificates of one service: one for its balancer, one for its replicas. Each trusts only the other.

Both are in the service's folder, made once. A replica gets its own key and the balancer's certificate as secrets of its
job, which programs do not see (`broker/agent/agent_entrance.py`).
"""

from __future__ import annotations

import os
import ssl
from datetime import timedelta
from pathlib import Path

from broker.runtime.credentials import make_credential
from broker.serve.files import ServiceFolder
from broker.state.faults import explain_os_error
from broker.types import Secret

VALID = timedelta(days=3650)  # longer than a service: new replicas join with the first one's certificate
CERTIFICATE = "-----BEGIN CERTIFICATE-----"
KEY_SECRET, CLIENT_SECRET = "BROKER_REPLICA_PEM", "BROKER_BALANCER_PEM"


def make_secrets(folder: ServiceFolder, service: str) -> dict[str, Secret]:
    """Return the secrets of a replica: its key and certificate, and the certificate of its client, the balancer.

    Raises StateError.
    """
    ensure_credentials(folder, service)
    return {KEY_SECRET: Secret(value=_read(folder.replica_pem)), CLIENT_SECRET: Secret(value=_cut(folder.balancer_pem))}


def ensure_credentials(folder: ServiceFolder, service: str) -> None:
    """Make what is missing; only the service's controller calls this. Raises StateError."""
    for path, end in ((folder.replica_pem, "replica"), (folder.balancer_pem, "balancer")):
        if not path.exists():
            _write(path, make_credential(f"broker {end} {service}", valid=VALID).value)


def make_client_context(folder: ServiceFolder) -> ssl.SSLContext | None:
    """Return the TLS settings of the balancer's connections to replicas; None where no credentials were made."""
    if not (folder.balancer_pem.exists() and folder.replica_pem.exists()):
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the certificate is pinned: possession of its key is the identity
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(folder.balancer_pem)
    context.load_verify_locations(cadata=_cut(folder.replica_pem))
    return context


def _cut(path: Path) -> str:
    """Return the certificate of a file that also has its key."""
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
