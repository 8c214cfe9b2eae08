"""The credential of a gang: how OpenSSL on a node reads it, and where it is not visible."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from broker.runtime.credentials import make_credential


def test_certificate_is_of_the_run_and_outlives_a_month_on_a_node_with_a_slow_clock() -> None:
    pem = make_credential("broker train-" + "x" * 80 + " run 7").value
    certificate = x509.load_pem_x509_certificate(pem[pem.index("-----BEGIN CERT") :].encode())
    key = certificate.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name == "secp256r1"
    assert certificate.subject.rfc4514_string().startswith("CN=broker train-xxx")
    now = datetime.now(UTC)
    assert certificate.not_valid_before_utc < now - timedelta(hours=23)
    assert certificate.not_valid_after_utc > now + timedelta(days=300)
    assert certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False


def test_each_credential_is_unique_and_never_printed() -> None:
    one, other = make_credential("run 1"), make_credential("run 1")
    assert one.value != other.value
    assert "PRIVATE KEY" in one.value and "PRIVATE KEY" not in f"{one!r} {one}"


def test_credential_is_valid_for_as_long_as_was_asked() -> None:
    pem = make_credential("service", valid=timedelta(days=30)).value
    certificate = x509.load_pem_x509_certificate(pem[pem.index("-----BEGIN CERT") :].encode())
    left = certificate.not_valid_after_utc - datetime.now(UTC)
    assert timedelta(days=29) < left <= timedelta(days=30)
