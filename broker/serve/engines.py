"""Record facts about the engines of a service that the balancer learns from their answers, by version."""

from __future__ import annotations

import json

import aiohttp

from broker.serve.routes import BackendRoute

REFUSALS = frozenset((400, 422))  # of a request with a field that the engine does not accept
MODELS = "/v1/models"
ASK_S = 5.0
BODY_BYTES_MAX = 1 << 20


class EngineFacts:
    """The facts of all versions: each may have another engine or another model."""

    def __init__(self) -> None:
        self._plain: set[tuple[int, str]] = set()
        self._contexts: dict[int, int] = {}

    def refuses_ids(self, route: BackendRoute, path: str) -> bool:
        """Return whether streams of a path are refused with `return_token_ids`, as SGLang's chats are."""
        return (route.backend.version, path) in self._plain

    def note_refusal(self, route: BackendRoute, path: str) -> None:
        """Record that a stream was refused with `return_token_ids`, and answered without."""
        self._plain.add((route.backend.version, path))

    async def find_context(self, session: aiohttp.ClientSession, route: BackendRoute) -> int | None:
        """Return how many tokens the engine accepts, as its list of models states; None if it does not."""
        version = route.backend.version
        if version not in self._contexts:
            timeout = aiohttp.ClientTimeout(total=ASK_S)
            try:
                address = route.base_url + MODELS  # a redirect could lead to any server that this machine reaches
                async with session.get(address, timeout=timeout, allow_redirects=False) as response:
                    tokens = parse_context(await _read_whole(response.content))
            except (aiohttp.ClientError, TimeoutError, OSError):
                return None
            if tokens is None:
                return None
            self._contexts[version] = tokens
        return self._contexts[version]


async def _read_whole(content: aiohttp.StreamReader) -> bytes:
    """Read a body to its end, or a little beyond `BODY_BYTES_MAX`. One read returns what has arrived, not all of it."""
    body = bytearray()
    async for part in content.iter_any():
        body += part
        if len(body) > BODY_BYTES_MAX:
            break
    return bytes(body)


def parse_context(body: bytes) -> int | None:
    """Return `max_model_len` of the first model in a list of OpenAI's API; vLLM and SGLang state it."""
    try:
        models = json.loads(body)["data"]
        tokens = models[0]["max_model_len"]
    except (ValueError, TypeError, KeyError, IndexError):
        return None
    return tokens if isinstance(tokens, int) and not isinstance(tokens, bool) and tokens > 0 else None
