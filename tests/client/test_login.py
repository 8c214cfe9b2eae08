"""The login of a user: which servers a token may be sent to."""

from __future__ import annotations

import pytest

from broker.client.login import ServerLogin, check_login, is_loopback
from broker.errors import UsageError
from broker.types import Secret

PRINT = f"sha256:{'0a' * 32}"


@pytest.mark.parametrize(
    "url",
    [
        "https://broker.example",
        "https://broker.example:8443/",
        "http://127.0.0.1:80",
        "http://localhost:1",
        "http://[::1]:1",
    ],
)
def test_url_of_a_server_is_accepted(url: str) -> None:
    check_login(ServerLogin(url=url, token=Secret(value="t"), fingerprint=PRINT))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://broker.example", "invalid server URL"),
        ("broker.example", "invalid server URL"),
        ("https://", "invalid server URL"),
        ("https://broker.example/api", "invalid server URL"),
        ("https://broker.example/?a=1", "invalid server URL"),
        ("http://broker.example", "is not encrypted"),
        ("http://10.0.0.1:8080", "is not encrypted"),
        ("http://127.0.0.1.example", "is not encrypted"),
    ],
)
def test_other_urls_are_refused_before_a_token_is_sent(url: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_login(ServerLogin(url=url, token=Secret(value="t")))


@pytest.mark.parametrize("fingerprint", ["sha256:", PRINT[:-1], PRINT.upper(), f"{PRINT}0", "md5:00"])
def test_damaged_fingerprint_is_refused(fingerprint: str) -> None:
    with pytest.raises(UsageError, match="invalid fingerprint"):
        check_login(ServerLogin(url="https://b.example", token=Secret(value="t"), fingerprint=fingerprint))


def test_loopback_is_known_by_address_and_name() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost")))
    assert not any(map(is_loopback, ("10.0.0.1", "0.0.0.0", "::2", "localhost.example", "")))
