"""Clients of a service: streams whose text is compared with the undisturbed output, and short requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import aiohttp

from tests.serve.stand_in import expect_text

PAUSE_S = 0.005  # between two requests of a client


@dataclass
class StreamTally:
    """What clients saw. `gaps_s` are the longest silences of streams, one each."""

    ended: int = 0
    broken: int = 0
    different: int = 0
    gaps_s: list[float] = field(default_factory=list)


@dataclass
class LoadTally:
    """What clients of a steady load saw; `errors` has one line for each request that failed."""

    requests: int = 0
    errors: list[str] = field(default_factory=list)
    streams: StreamTally = field(default_factory=StreamTally)

    @property
    def failed(self) -> int:
        """Requests that failed, and streams that were interrupted or differ."""
        return len(self.errors) + self.streams.broken + self.streams.different


async def read_streams(
    client: aiohttp.ClientSession,
    url: str,
    name: str,
    tally: StreamTally,
    *,
    tokens: int,
    stopped: asyncio.Event | None = None,
) -> None:
    """Read one stream after the other until `stopped`, or cancelled; compare each with the undisturbed output."""
    for turn in range(1_000_000):
        if stopped is not None and stopped.is_set():
            return
        prompt = f"{name}-{turn}"
        try:
            text, gap_s = await _read_stream(client, url, prompt, tokens)
        except (aiohttp.ClientError, ConnectionError):
            tally.broken += 1
            continue
        tally.ended += 1
        tally.different += text != expect_text(prompt, tokens)
        tally.gaps_s.append(gap_s)


async def _read_stream(client: aiohttp.ClientSession, url: str, prompt: str, tokens: int) -> tuple[str, float]:
    """Return the text, and the longest silence in seconds. Raises ClientError for an interrupted stream."""
    body = {"prompt": prompt, "stream": True, "max_tokens": tokens, "temperature": 0}
    last_s, gap_s, parts, is_done = time.monotonic(), 0.0, list[str](), False
    async with client.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise aiohttp.ClientError(f"the balancer answered with {response.status}")
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            now_s = time.monotonic()
            gap_s, last_s = max(gap_s, now_s - last_s), now_s
            if line.strip() == b"data: [DONE]":
                is_done = True
            else:
                parts.append(json.loads(line[6:])["choices"][0]["text"])
    if not is_done:
        raise aiohttp.ClientError("the stream ended early")
    return "".join(parts), gap_s


async def _ask(client: aiohttp.ClientSession, url: str, tally: LoadTally, stopped: asyncio.Event) -> None:
    """Send short requests that must not be repeated once a replica has them."""
    while not stopped.is_set():
        try:
            async with client.post(f"{url}/echo", data=b"x") as response:
                body = await response.read()
                if response.status != 200 or body != b"x":
                    tally.errors.append(f"{response.status}: {body[:200]!r}")
        except (aiohttp.ClientError, ConnectionError) as error:
            tally.errors.append(f"{type(error).__name__}: {error}")
        tally.requests += 1
        await asyncio.sleep(PAUSE_S)


@contextlib.asynccontextmanager
async def steady_load(url: str, *, clients: int, streams: int, tokens: int = 20) -> AsyncIterator[LoadTally]:
    """Send short requests from some clients and keep some streams open; at the end, let open streams end."""
    tally, stopped = LoadTally(), asyncio.Event()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        askers = [_ask(client, url, tally, stopped) for _ in range(clients)]
        readers = [
            read_streams(client, url, f"s{number}", tally.streams, tokens=tokens, stopped=stopped)
            for number in range(streams)
        ]
        running = asyncio.gather(*askers, *readers)
        try:
            yield tally
        finally:
            stopped.set()
            await running
