"""A minimal aiohttp proxy (copy, choose, forward): the baseline for the balancer's processor time per request.

python -m tests.bench.bare_proxy --port 8000 8001 8002    # listens on the first, forwards to the others
"""

from __future__ import annotations

import argparse
import asyncio

import aiohttp
from aiohttp import web

DROPPED = frozenset(("host", "connection", "content-length", "transfer-encoding"))


async def proxy_forever(port: int, replicas: list[int]) -> None:
    loads = dict.fromkeys(replicas, 0)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False) as session:

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            chosen = min(loads, key=loads.__getitem__)
            loads[chosen] += 1
            try:
                body = await request.read()
                headers = {name: value for name, value in request.headers.items() if name.lower() not in DROPPED}
                url = f"http://127.0.0.1:{chosen}{request.path_qs}"
                async with session.request(request.method, url, headers=headers, data=body) as response:
                    kept = {name: value for name, value in response.headers.items() if name.lower() not in DROPPED}
                    answer = web.StreamResponse(status=response.status, headers=kept)
                    await answer.prepare(request)
                    async for data in response.content.iter_any():
                        await answer.write(data)
                    await answer.write_eof()
                    return answer
            finally:
                loads[chosen] -= 1

        runner = web.ServerRunner(web.Server(handle, access_log=None))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("replicas", type=int, nargs="+")
    given = parser.parse_args()
    asyncio.run(proxy_forever(given.port, given.replicas))
