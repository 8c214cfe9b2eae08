"""A certificate for clients that is renewed is used at once, for new connections, without a restart."""

from __future__ import annotations

import asyncio
import os
import ssl
from pathlib import Path

import pytest

from broker.serve.certificates import read_expiry_s
from broker.types import ServiceProtocol
from tests.serve.test_tcp_path import Bed, make_tls, play, trust


def replace_file(path: str, source: str) -> None:
    """Replace a file as a renewal does, with a time of change that differs even on a coarse clock."""
    before = Path(path).stat().st_mtime_ns
    Path(source).replace(path)
    os.utime(path, ns=(before + 1_000_000, before + 1_000_000))


async def shake_hands(bed: Bed, context: ssl.SSLContext) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", bed.port, ssl=context)
    writer.transport.abort()


@pytest.mark.parametrize("protocol", [ServiceProtocol.TCP, ServiceProtocol.HTTP])
def test_renewed_certificate_is_used_for_new_connections(tmp_path: Path, protocol: ServiceProtocol) -> None:
    tls = make_tls(tmp_path)
    old = trust(tls)
    renewed = make_tls(tmp_path, "renewed.pem")
    new = trust(renewed)
    (tmp_path / "damaged.pem").write_text("not a certificate")

    async def scene(bed: Bed) -> None:
        await shake_hands(bed, old)
        replace_file(tls.certificate_path, str(tmp_path / "damaged.pem"))
        await bed.balancer.path.refresh()
        await shake_hands(bed, old)
        replace_file(tls.certificate_path, renewed.certificate_path)
        await bed.balancer.path.refresh()
        await shake_hands(bed, new)
        with pytest.raises(ssl.SSLError):
            await shake_hands(bed, old)

    load = play(tmp_path, scene, tls=tls, protocol=protocol, count=0)
    assert load.certificate_ends_s is not None
    assert load.certificate_ends_s == read_expiry_s(Path(tls.certificate_path))
