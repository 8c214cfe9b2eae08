"""A stand-in engine: tokens depend on all ids before them, so that a wrong continuation shows. It can be killed.

python -m tests.serve.stand_in --port 8000 --pause 0.02     # a process of its own, seconds between two tokens
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
from typing import Any

from aiohttp import web


def draw_token(ids: list[int]) -> int:
    return 97 + hashlib.blake2b(bytes(ids), digest_size=2).digest()[0] % 26


def expect_text(prompt: str, count: int) -> str:
    ids = list(prompt.encode())
    for _ in range(count):
        ids.append(draw_token(ids))
    return bytes(ids[len(prompt) :]).decode()


class StandIn:
    """One replica on the loopback. `gate` holds back all tokens after the first `free` ones until it is set."""

    def __init__(self, *, has_ids: bool = True) -> None:
        self.has_ids = has_ids
        self.gate = asyncio.Event()
        self.gate.set()
        self.free = 3
        self.pause_s = 0.0  # before each token
        self.port = 0
        self.is_healthy = True
        self.refusals = 0  # of the next generations
        self.is_torn = False  # echoes break off after half of the body
        self.seen: list[tuple[str, str, bytes]] = []
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self._requests: list[web.BaseRequest] = []
        self._runner: web.ServerRunner | None = None

    async def start(self) -> None:
        self._runner = web.ServerRunner(web.Server(self._handle, access_log=None), shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = int(self._runner.addresses[0][1])

    async def vanish(self) -> None:
        """Accept no more connections, and leave the open ones without an end, as a machine without power does."""
        assert self._runner is not None
        for site in list(self._runner.sites):
            await site.stop()

    async def kill(self) -> None:
        """End as `kill -9` does: connections are reset, the port is closed."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            for site in list(runner.sites):
                await site.stop()
            for each in list(self._requests):
                if each.transport is not None:
                    each.transport.abort()
            await runner.cleanup()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self._requests.append(request)
        try:
            return await self._answer(request)
        except ConnectionError:  # the balancer has closed the stream
            return web.Response(status=499)
        finally:
            self._requests.remove(request)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/health":
            return web.Response(status=200 if self.is_healthy else 503)
        self.headers.append(dict(request.headers))
        if request.path == "/socket":
            return await self._echo(request)
        body = await request.read()
        self.seen.append((request.method, request.raw_path, body))
        if request.method == "POST" and request.path.endswith("completions"):
            if self.refusals:
                self.refusals -= 1
                return web.Response(status=429)
            return await self._generate(request, json.loads(body))
        if request.path.startswith("/slow"):
            await self.gate.wait()
        if self.is_torn:
            return await self._tear(request, body)
        headers = {"x-seen": request.headers.get("x-sent", ""), "set-cookie": "user=ann"}
        return web.Response(body=body, headers=headers)

    async def _tear(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"content-length": str(len(body))})
        await answer.prepare(request)
        await answer.write(body[: len(body) // 2])
        assert request.transport is not None
        request.transport.close()  # after what was written
        return answer

    async def _echo(self, request: web.BaseRequest) -> web.StreamResponse:
        socket = web.WebSocketResponse(protocols=["chat"])
        await socket.prepare(request)
        async for message in socket:
            await socket.send_str(f"echo {message.data}")
        return socket

    async def _generate(self, request: web.BaseRequest, fields: dict[str, Any]) -> web.StreamResponse:
        self.asked.append(fields)
        is_chat = "messages" in fields
        prompt = fields["messages"][-1]["content"] if is_chat else fields["prompt"]
        ids = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
        start, count = len(ids), fields.get("max_tokens") or 16
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        head = {"id": f"cmpl-{self.port}", "model": "stand-in"}
        for index in range(count):
            if index >= self.free:
                await self.gate.wait()
            if self.pause_s:
                await asyncio.sleep(self.pause_s)
            ids.append(draw_token(ids))
            text = chr(ids[-1])
            choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if index + 1 == count else None}
            choice |= {"delta": {"content": text}} if is_chat else {"text": text}
            chunk: dict[str, Any] = {**head, "choices": [choice]}
            if self.has_ids and fields.get("return_token_ids"):
                choice["token_ids"] = [ids[-1]]
                if index == 0:
                    chunk["prompt_token_ids"] = ids[:start]
            await answer.write(f"data: {json.dumps(chunk)}\n\n".encode())
        if (fields.get("stream_options") or {}).get("include_usage"):
            usage = {"prompt_tokens": start, "completion_tokens": count, "total_tokens": start + count}
            await answer.write(f"data: {json.dumps({**head, 'choices': [], 'usage': usage})}\n\n".encode())
        await answer.write(b"data: [DONE]\n\n")
        await answer.write_eof()
        return answer


async def serve_forever(port: int, pause_s: float) -> None:
    stand = StandIn()
    stand.port, stand.pause_s = port, pause_s
    await stand.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--pause", type=float, default=0.0)
    given = parser.parse_args()
    asyncio.run(serve_forever(given.port, given.pause))
