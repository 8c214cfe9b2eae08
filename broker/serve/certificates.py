"""Read when a listener's certificate expires. Standard library only: gateways have no library for certificates.

Certificate ::= SEQUENCE { tbs SEQUENCE { [0] version, serial, algorithm, issuer, validity SEQUENCE { from, to } ...
"""

from __future__ import annotations

import calendar
import re
import ssl
import time
from pathlib import Path

WARN_S = 14 * 86400.0  # Let's Encrypt's clients renew 30 days before the end: in two weeks, a failure can be fixed
CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
VERSION, UTC_TIME, GENERALIZED_TIME = 0xA0, 0x17, 0x18  # tags of DER


def read_expiry_s(path: Path) -> float | None:
    """Return when the first certificate of a PEM file expires, which is the server's own; None if it is unreadable.

    The certificates after it, up to the authority, may expire earlier without harm, because clients know other chains.
    """
    try:
        found = CERTIFICATE.search(path.read_text(encoding="ascii", errors="replace"))
        return None if found is None else find_expiry_s(ssl.PEM_cert_to_DER_cert(found[0]))
    except (OSError, ValueError, IndexError):  # ValueError: also an invalid time, and base64 that is damaged
        return None


def find_expiry_s(certificate: bytes) -> float:
    """Return when a certificate in DER expires. Raises ValueError or IndexError for other bytes."""
    _, begin, _ = _read_head(certificate, 0)
    _, at, _ = _read_head(certificate, begin)
    tag, _, _ = _read_head(certificate, at)
    for _ in range(4 if tag == VERSION else 3):  # up to the issuer
        _, _, at = _read_head(certificate, at)
    _, at, _ = _read_head(certificate, at)
    _, _, at = _read_head(certificate, at)  # the beginning
    tag, begin, end = _read_head(certificate, at)
    if tag not in (UTC_TIME, GENERALIZED_TIME):
        raise ValueError(f"a time has the tag {tag}")
    text = certificate[begin:end].decode("ascii")
    if tag == UTC_TIME:  # RFC 5280, section 4.1.2.5.1: from 50 on, the year is one of the 20th century
        text = ("19" if text[:2] >= "50" else "20") + text
    return float(calendar.timegm(time.strptime(text, "%Y%m%d%H%M%SZ")))


def _read_head(data: bytes, at: int) -> tuple[int, int, int]:
    """Return the tag of the value at this place, and where its content begins and ends."""
    tag, length, begin = data[at], data[at + 1], at + 2
    if length & 0x80:
        count = length & 0x7F
        length, begin = int.from_bytes(data[begin : begin + count], "big"), begin + count
    return tag, begin, begin + length
