"""Stand-ins that stream in the formats of real engines, taken from their sources. None of the engines was run.

vLLM 0.33.0 (`vllm/entrypoints/openai`), SGLang 0.5.23 (`sglang/srt/entrypoints/openai`), llama.cpp (`tools/server`) and
Triton's OpenAI frontend 26.07 (`python/openai`). Tokens are those of `StandIn`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

from aiohttp import web

from tests.serve.stand_in import StandIn, draw_token

CONTEXT = 40
UNLIMITED = 1 << 20
# Triton's schema forbids all fields but its own; of these, the ones that tests and the balancer send.
TRITON_FIELDS = {"model", "prompt", "messages", "max_tokens", "seed", "stream", "stream_options", "temperature"}
REFUSAL = {
    "object": "error",
    "message": "return_token_ids is not supported with streaming on /v1/chat/completions.",
    "type": "BadRequest",
    "param": None,
    "code": 400,
}


class EngineStandIn(StandIn):
    """An engine whose streams have the form of `engine`; the first `reasoning` tokens of a chat are reasoning."""

    def __init__(self, engine: str, *, reasoning: int = 0) -> None:
        super().__init__()
        self.engine, self.reasoning = engine, reasoning
        self.faults: list[dict[str, Any]] = []  # with which the next generations end after the first `free` tokens
        self.lingers = False  # after a fault the stream stays open, with comments only

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/v1/models":
            card = {"id": "m", "object": "model"}
            has_length = self.engine in ("vllm", "sglang")
            models = [{**card, "max_model_len": CONTEXT} if has_length else card]
            return web.json_response({"object": "list", "data": models})
        return await super()._answer(request)

    async def _generate(self, request: web.BaseRequest, fields: dict[str, Any]) -> web.StreamResponse:
        self.asked.append(fields)
        is_chat = request.path == "/v1/chat/completions"
        if self.engine == "sglang" and is_chat and fields.get("return_token_ids"):
            return web.json_response(REFUSAL, status=400)
        if self.engine == "triton" and (unknown := fields.keys() - TRITON_FIELDS):
            detail = [{"type": "extra_forbidden", "loc": ["body", name]} for name in sorted(unknown)]
            return web.json_response({"detail": detail}, status=422)
        prompt = fields["messages"][-1]["content"] if is_chat else fields["prompt"]
        ids = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
        size = len(ids)
        count = min(self._limit(fields, is_chat=is_chat), CONTEXT - size)
        answer = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await answer.prepare(request)
        has_ids = self.engine in ("vllm", "sglang") and bool(fields.get("return_token_ids"))
        head = {"id": f"gen-{self.port}", "created": 1, "model": "m"}
        head["object"] = "chat.completion.chunk" if is_chat else "text_completion"
        for chunk in self._begin(ids, is_chat=is_chat, has_ids=has_ids):
            await self._write(answer, {**head, **chunk})
        for index in range(count):
            if index >= self.free:
                await self.gate.wait()
                if self.faults:
                    return await self._fail(answer, {**head, **self.faults.pop(0)})
            ids.append(draw_token(ids))
            is_reasoning = is_chat and index < self.reasoning
            is_last = index + 1 == count
            choice = self._make_choice(chr(ids[-1]), is_chat=is_chat, is_reasoning=is_reasoning, is_last=is_last)
            if has_ids:
                choice["token_ids"] = [ids[-1]]
                if not is_chat and index == 0:
                    choice["prompt_token_ids"] = ids[:size]
            await self._write(answer, {**head, "choices": [choice]})
        if (fields.get("stream_options") or {}).get("include_usage"):
            usage = {"prompt_tokens": size, "completion_tokens": count, "total_tokens": size + count}
            await self._write(answer, {**head, "choices": [], "usage": usage})
        await answer.write(b"data: [DONE]\n\n")
        await answer.write_eof()
        return answer

    async def _fail(self, answer: web.StreamResponse, fault: dict[str, Any]) -> web.StreamResponse:
        """End a stream as vLLM and SGLang do if they are terminated or their engine fails."""
        await self._write(answer, fault)
        while self.lingers:  # until the client is gone
            await answer.write(b": ping\n\n")
            await asyncio.sleep(0.01)
        await answer.write(b"data: [DONE]\n\n")
        await answer.write_eof()
        return answer

    def _limit(self, fields: dict[str, Any], *, is_chat: bool) -> int:
        """Return the limit: 16 tokens for a completion whose limit is missing or null; a chat has none."""
        limit = (fields.get("max_completion_tokens") if is_chat else None) or fields.get("max_tokens")
        return int(limit or (UNLIMITED if is_chat else 16))

    def _begin(self, ids: list[int], *, is_chat: bool, has_ids: bool) -> Iterator[dict[str, Any]]:
        if is_chat:
            content = None if self.engine == "llama-cpp" else ""
            choice = {"index": 0, "delta": {"role": "assistant", "content": content}, "finish_reason": None}
            yield {"choices": [choice], **({"prompt_token_ids": list(ids)} if has_ids else {})}

    def _make_choice(self, text: str, *, is_chat: bool, is_reasoning: bool, is_last: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if is_last else None}
        if self.engine in ("vllm", "sglang"):
            choice |= {"logprobs": None, "stop_reason" if self.engine == "vllm" else "matched_stop": None}
        if not is_chat:
            return {**choice, "text": text}
        field = "reasoning" if self.engine == "vllm" else "reasoning_content"
        return {**choice, "delta": {field: text} if is_reasoning else {"content": text}}

    async def _write(self, answer: web.StreamResponse, chunk: dict[str, Any]) -> None:
        if self.engine == "llama-cpp":
            await answer.write(b":\n\n")  # a ping of --sse-ping-interval
        await answer.write(f"data: {json.dumps(chunk)}\n\n".encode())
