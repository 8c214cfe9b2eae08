"""Bodies of requests: kept for another try up to a limit, passed on beyond it."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from tests.serve.stand_in import StandIn
from tests.serve.test_balancer import Bed, play
from tests.serve.test_proxying import send_raw, until


async def split(body: bytes) -> AsyncIterator[bytes]:
    """Yield a body in two parts, so that it is sent without its length."""
    yield body[: len(body) // 2]
    yield body[len(body) // 2 :]


def count_kept_bytes(bed: Bed) -> object:
    return bed.balancer.path._proxy.bodies.kept_bytes  # type: ignore[attr-defined]


@pytest.mark.parametrize("mebibytes", [2, 5])
@pytest.mark.parametrize("has_length", [True, False])
def test_body_of_any_length_passes(tmp_path: Path, mebibytes: int, *, has_length: bool) -> None:
    body = b"x" * (mebibytes << 20)

    async def scene(bed: Bed) -> None:
        for path in ("/image", "/generate"):
            data = body if has_length else split(body)
            async with bed.client.post(bed.url + path, data=data) as response:
                assert response.status == 200
        assert [len(each) for _, _, each in bed.stands[0].seen] == [len(body)] * 2
        assert count_kept_bytes(bed) == 0

    play(tmp_path, scene, count=1, make_stands=lambda count: [LargeStand()])


class LargeStand(StandIn):
    """Accepts bodies of any length, and answers without them."""

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/health":
            return web.Response()
        size = 0
        async for part in request.content.iter_any():
            size += len(part)
        self.seen.append((request.method, request.path_qs, b"x" * size))
        return web.Response()


def test_stream_that_is_asked_for_without_a_length_survives_its_replica(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        body = json.dumps({"prompt": "hi", "stream": True, "max_tokens": 3}).encode()
        headers = {"content-type": "application/json"}
        async with bed.client.post(f"{bed.url}/v1/completions", data=split(body), headers=headers) as response:
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        assert bed.stands[0].asked[0]["return_token_ids"], "the stream has a journal"

    play(tmp_path, scene, count=1)


def test_beyond_the_total_bodies_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.serve.bodies.KEPT_TOTAL_BYTES_MAX", 100)

    async def scene(bed: Bed) -> None:
        bed.stands[0].gate.clear()
        first = asyncio.ensure_future(bed.client.post(f"{bed.url}/slow", data=b"x" * 80))
        while not bed.stands[0].seen:
            await asyncio.sleep(0.005)
        assert count_kept_bytes(bed) == 80
        async with bed.client.post(f"{bed.url}/a", data=b"y" * 80) as response:
            assert await response.read() == b"y" * 80
        assert count_kept_bytes(bed) == 80
        bed.stands[0].gate.set()
        assert (await first).status == 200
        assert count_kept_bytes(bed) == 0

    play(tmp_path, scene, count=1)


def test_bodies_count_while_they_are_read(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        head = b"POST /generate HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n"
        _, writer = await send_raw(bed, head + b"x" * 80)
        await until(lambda: count_kept_bytes(bed) == 80)
        writer.transport.abort()
        await until(lambda: not bed.balancer.path.counts.in_flight)
        assert count_kept_bytes(bed) == 0

    play(tmp_path, scene, count=1)


def test_compressed_body_arrives_as_it_was_sent(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        for path in ("/a", "/generate"):
            data, headers = gzip.compress(b"x" * 100), {"content-encoding": "gzip"}
            async with bed.client.post(bed.url + path, data=data, headers=headers) as response:
                assert response.status == 200
        assert [body for _, _, body in bed.stands[0].seen] == [b"x" * 100] * 2

    play(tmp_path, scene, count=1)


def test_client_that_waits_before_it_sends_its_body_is_asked_for_it(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        head = b"POST /a HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\n"
        reader, writer = await send_raw(bed, head)
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"abc")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
        assert bed.stands[0].seen[0][2] == b"abc"
        assert "Expect" not in bed.stands[0].headers[0]

    play(tmp_path, scene, count=1)
