"""Ports of replicas on this machine: free, and not given to others while they are waited for."""

from __future__ import annotations

import random
import socket

import pytest

from broker.app.gateways import PORTS, is_free, show_endpoint
from broker.serve import replicas
from broker.serve.replicas import FREE_PORTS, LOOPBACK, draw_free_port, draw_free_ports


def test_ports_of_replicas_are_neither_those_of_services_nor_of_outgoing_connections() -> None:
    assert not {*PORTS} & {*FREE_PORTS}
    assert FREE_PORTS.stop <= 32768, "Linux gives those from there on to outgoing connections"


def test_a_port_in_use_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr(replicas, "FREE_PORTS", range(port, port + 1))
        with pytest.raises(OSError, match="is free"):
            draw_free_port()


@pytest.mark.parametrize(("host", "url"), [(LOOPBACK, "127.0.0.1:7"), ("localhost", "localhost:7"), ("::1", "[::1]:7")])
def test_a_port_is_free_unless_it_is_in_use_at_any_kind_of_address(host: str, url: str) -> None:
    assert show_endpoint(host, 7) == url
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as taken:
        try:
            taken.bind((host, 0))
        except OSError:
            pytest.skip(f"this machine has no {host}")
        taken.listen()
        assert not is_free(host, taken.getsockname()[1])
    assert is_free(host, draw_free_port())
    assert not is_free(host, 65536)


def test_processes_with_one_seed_draw_different_ports() -> None:
    """Trainers and tests seed the global generator."""
    drawn = set()
    for _ in range(5):
        random.seed(1)
        drawn.add(draw_free_port())
    assert len(drawn) > 1


def test_program_and_entrance_have_ports_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas.random.Random, "sample", lambda own, ports, count: [20_011, 20_012, 20_013, 20_014])
    drawn = draw_free_ports()
    assert drawn.program != drawn.entrance
