"""Users that a proxy in front of the server names: only from its address, and only with its secret."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.errors import UsageError
from broker.server.context import Policy
from broker.server.proxy import SECRET_HEADER, TrustedProxy
from broker.state.people import Role
from broker.types import Secret
from tests.server.conftest import Hosted

SECRET = "correct horse battery staple"
HEADER = "X-Forwarded-User"


def make_proxy(*addresses: str) -> TrustedProxy:
    return TrustedProxy(header=HEADER, addresses=addresses, secret=Secret(value=SECRET), role=Role.VIEWER)


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    policy = Policy(has_controller=False, proxy=make_proxy("127.0.0.1"))
    hosted = Hosted(tmp_path_factory.mktemp("server"), policy=policy)
    yield hosted
    hosted.stop()


def test_proxy_names_the_user_with_its_role(proxied: Hosted) -> None:
    headers = {HEADER: "ada@example.org", SECRET_HEADER: SECRET}
    status, answer = proxied.ask("/v1/handshake", headers=headers)
    assert status == 200 and (answer["user"], answer["role"]) == ("ada@example.org", "viewer")
    assert proxied.ask("/v1/launch", {}, headers=headers)[0] == 403


@pytest.mark.parametrize(
    "headers",
    [
        {HEADER: "ada"},
        {HEADER: "ada", SECRET_HEADER: "wrong"},
        {HEADER: "ada", SECRET_HEADER: ""},
        {HEADER: "", SECRET_HEADER: SECRET},
        {HEADER: "ada, ben", SECRET_HEADER: SECRET},
        {SECRET_HEADER: SECRET},
    ],
)
def test_header_without_the_secret_is_refused(proxied: Hosted, headers: dict[str, str]) -> None:
    assert proxied.ask("/v1/handshake", headers=headers)[0] == 401


def test_token_still_admits(proxied: Hosted) -> None:
    assert proxied.ask("/v1/handshake", token=proxied.tokens["user"])[0] == 200


def test_header_means_nothing_without_a_proxy(hosted: Hosted) -> None:
    assert hosted.ask("/v1/handshake", headers={HEADER: "ada", SECRET_HEADER: SECRET})[0] == 401


def test_other_addresses_are_not_the_proxy() -> None:
    headers = {HEADER: "ada", SECRET_HEADER: SECRET}
    proxy = make_proxy("10.0.0.1")
    assert proxy.find_user("10.0.0.2", headers) is None and proxy.find_user(None, headers) is None
    for peer in ("10.0.0.1", "::ffff:10.0.0.1"):
        found = proxy.find_user(peer, headers)
        assert found is not None and found.user == "ada"


def test_options_are_checked(tmp_path: Path) -> None:
    secret, short = tmp_path / "secret", tmp_path / "short"
    secret.write_text(SECRET + "\n")
    short.write_text("abc")

    def read(header: str = HEADER, addresses: tuple[str, ...] = ("10.0.0.1",), file: Path | None = secret) -> object:
        return TrustedProxy.read(header=header, addresses=addresses, secret_file=file, role=Role.VIEWER)

    assert read() == make_proxy("10.0.0.1")
    for wrong in (
        {"header": "Authorization"}, {"header": "a b"}, {"addresses": ()}, {"addresses": ("proxy.example",)},
        {"file": None}, {"file": tmp_path / "none"}, {"file": short},
    ):  # fmt: skip
        with pytest.raises(UsageError):
            read(**wrong)  # type: ignore[arg-type]
