"""Make a certificate with its private key, for the nodes of one run or for the two ends of a service."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from broker.clock import SystemClock
from broker.types import Secret

# A node's clock may lag behind ours until its first NTP answer.
BACKDATED = timedelta(days=1)
# Longer than any run: replacement nodes join with the first node's credential. The key disappears with the nodes.
VALID = timedelta(days=365)


def make_credential(subject: str, *, valid: timedelta = VALID) -> Secret:
    """Return a self-signed P-256 certificate and its key as one PEM text.

    Each end of a connection presents a certificate that the other was given and is the only one it trusts, so neither a
    CA nor host names are needed: possession of the key is membership. Dates are in real time even in a rehearsal,
    because nodes compare them with their own clocks.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, subject[:64])])  # X.520: at most 64 characters
    now = datetime.fromtimestamp(SystemClock().now_s(), UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + valid)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Secret(value=(private + certificate.public_bytes(serialization.Encoding.PEM)).decode())
