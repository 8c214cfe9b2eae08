"""The balancer passes a client's W3C trace context to every replica that works on the request, and adds none."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from tests.serve import test_haproxy
from tests.serve.stand_in import StandIn
from tests.serve.stands import needs_haproxy
from tests.serve.test_balancer import Bed, play

TRACE = {
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "tracestate": "vendor=a%20b,other=1",
}


def list_contexts(stands: list[StandIn]) -> list[dict[str, str]]:
    """List the trace context of each request that arrived, readiness requests left out."""
    return [
        {name.lower(): value for name, value in each.items() if name.lower().startswith("trace")}
        for stand in stands
        for each in stand.headers
    ]


@pytest.mark.parametrize("sent", [TRACE, {}])
def test_requests_and_websockets_arrive_with_the_context_of_their_client_or_none(
    tmp_path: Path, sent: dict[str, str]
) -> None:
    async def scene(bed: Bed) -> None:
        for method in ("GET", "POST"):
            async with bed.client.request(method, f"{bed.url}/a", data=b"x", headers=sent) as response:
                assert response.status == 200
        async with bed.client.ws_connect(f"{bed.url}/socket", headers=sent) as socket:
            await socket.send_str("a")
            assert await socket.receive_str() == "echo a"
        assert list_contexts(bed.stands) == [sent] * 3

    play(tmp_path, scene)


def test_replica_that_continues_a_stream_gets_the_context_of_its_request(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        bed.client.headers.update(TRACE)
        streaming, first, _ = await bed.begin()
        await first.kill()
        await streaming
        assert list_contexts(bed.stands) == [TRACE] * 2

    assert play(tmp_path, scene).resumed == 1


@needs_haproxy
def test_haproxy_passes_the_context(tmp_path: Path) -> None:
    async def scene(bed: test_haproxy.HaproxyBed) -> None:
        async with bed.client.post(f"{bed.url}/a", data=b"x", headers=TRACE) as response:
            assert response.status == 200
        assert list_contexts(bed.stands) == [TRACE]

    test_haproxy.play(tmp_path, scene, count=1)


def test_header_that_a_client_names_as_one_of_its_connection_ends_here(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        named = {**TRACE, "connection": "tracestate"}
        async with aiohttp.request("GET", f"{bed.url}/a", headers=named) as response:
            assert response.status == 200
        (arrived,) = list_contexts(bed.stands)
        assert arrived == {"traceparent": TRACE["traceparent"]}

    play(tmp_path, scene, count=1)
