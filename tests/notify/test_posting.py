"""Webhooks of a shared server's users lead to no address of its machine, and none takes longer than its limit."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.config import Config
from broker.errors import TransientError, UsageError
from broker.notify.notification import Sink, SinkKind
from broker.notify.posting import check_address, check_host
from broker.notify.sending import send
from broker.notify.settings import NotifySettings
from tests.notify.receivers import HttpReceiver, run_receiver
from tests.notify.test_sending import NOTIFICATION

LOOPBACK = NotifySettings(allowed_networks=("127.0.0.0/8",))


@pytest.fixture
def http() -> Iterator[HttpReceiver]:
    with run_receiver(HttpReceiver()) as server:
        yield server


def deliver(folder: Path, target: str, settings: NotifySettings | None = None, *, is_limited: bool = True) -> None:
    sink = Sink(kind=SinkKind.WEBHOOK, target=target, is_limited=is_limited)
    asyncio.run(send(Config(home=folder, owner="me"), settings or NotifySettings(), sink, NOTIFICATION))


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.8.9.1", "0.0.0.0", "169.254.169.254", "169.254.170.2", "168.63.129.16", "100.100.100.200",
        "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1%eth0", "fd00:ec2::254", "fd20:ce::254", "ff02::1",
        "::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe",
    ],
)  # fmt: skip
def test_addresses_of_the_machine_and_of_its_cloud_are_refused(address: str) -> None:
    with pytest.raises(UsageError, match="server's own machine"):
        check_address(address)


@pytest.mark.parametrize(
    "address",
    ["93.184.215.14", "10.0.0.7", "2606:2800:21f::1", "fd12::7", "64:ff9b::5db8:d70e", "::ffff:93.184.215.14"],
)
def test_addresses_that_are_not_private_are_reached(address: str) -> None:
    check_address(address)


def test_operator_may_allow_a_private_network() -> None:
    check_address("127.0.0.1", allowed=["::1/128", "127.0.0.0/24"])
    with pytest.raises(UsageError):
        check_address("127.0.1.1", allowed=["::1/128", "127.0.0.0/24"])
    check_address("::ffff:127.0.0.1", allowed=["127.0.0.0/24"])


@pytest.mark.parametrize("url", ["https://localhost/hook", "https://127.0.0.1:8443/", "https://[::1]/"])
def test_address_in_a_url_is_refused_at_submission(url: str) -> None:
    with pytest.raises(UsageError, match="own machine"):
        check_host(url)
    check_host(url, allowed=["127.0.0.0/8", "::1/128"])
    check_host("https://hooks.example.org/x")


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_name_that_resolves_to_the_servers_machine_gets_nothing(
    tmp_path: Path, http: HttpReceiver, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    """The check precedes the handshake of TLS, which this receiver could not complete."""
    resolve = socket.getaddrinfo

    def answer(host: str, *arguments: Any, **named: Any) -> Any:
        return resolve("127.0.0.1" if host == "hook.example" else host, *arguments, **named)

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    target = f"{scheme}://hook.example:{http.server_port}/hook"
    with pytest.raises(UsageError, match=r"the address 127\.0\.0\.1 can only"):
        deliver(tmp_path, target)
    assert http.bodies == []
    if scheme == "http":
        deliver(tmp_path, target, LOOPBACK)
        deliver(tmp_path, target, is_limited=False)
        assert len(http.bodies) == 2


def test_variable_of_the_operator_may_lead_anywhere(
    tmp_path: Path, http: HttpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROKER_NOTIFY_HOOK", http.url)
    deliver(tmp_path, "env:BROKER_NOTIFY_HOOK")
    assert len(http.bodies) == 1


def test_proxy_of_the_operator_decides_which_names_are_reached(
    tmp_path: Path, http: HttpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", http.url)
    deliver(tmp_path, "http://hook.example/hook")
    assert len(http.bodies) == 1
    with pytest.raises(UsageError, match="server's own machine"):
        deliver(tmp_path, "http://169.254.169.254/latest")
    assert len(http.bodies) == 1


def test_answer_that_never_ends_is_given_up_with_its_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes within the time limit of an operation; sixteen such receivers would hold up all others."""
    monkeypatch.setattr("broker.notify.sending.POST_S_MAX", 0.3)
    before = set(threading.enumerate())
    has_ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            connection, _ = listener.accept()
            try:
                connection.sendall(b"HTTP/1.1 200 ")
                while not has_ended.wait(0.02):
                    connection.sendall(b"O")
            except OSError:
                has_ended.set()  # the other side has closed
            connection.close()

        dripping = threading.Thread(target=drip)
        dripping.start()
        with pytest.raises(TransientError, match="no answer within"):
            deliver(tmp_path, f"http://127.0.0.1:{listener.getsockname()[1]}/", is_limited=False)
        sending = [each for each in threading.enumerate() if each not in before and each is not dripping]
        for each in sending:
            each.join(60.0)
        ended = not any(each.is_alive() for each in sending)
        has_ended.set()
        dripping.join()
        assert ended
