"""OpenAI's completion and chat API over an engine, optionally with token ids (`return_token_ids`, as in vLLM)."""

import json
import math
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainers.serve_engine import Detokenizer, Engine, EngineFailedError, FullError, Generation
from trainers.serve_http import Request, RequestError, Response, make_error
from trainers.tokenizers import Tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# Fields of OpenAI's and vLLM's API that would change the answer and are not implemented, with the values that do not.
NEUTRAL: Mapping[str, Sequence[Any]] = {
    **dict.fromkeys(("stop", "tools", "functions", "logit_bias", "echo", "suffix", "min_tokens", "min_p"), ()),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "top_logprobs", "stop_token_ids"), ()),
    **dict.fromkeys(("n", "best_of", "repetition_penalty"), (1,)),
    "response_format": ({"type": "text"},),
}
FAILED = "the engine has failed"


class Api:
    """Answers requests. After a preemption notice, `/health` fails and running generations continue."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, *, name: str, context: int, preemption_file: Path | None
    ) -> None:
        """Answer with `name` as the name of the model."""
        self._engine, self._tokenizer = engine, tokenizer
        self._name, self._context, self._preemption_file = name, context, preemption_file

    async def handle(self, request: Request) -> Response:
        """Answer one request. Raises RequestError."""
        if request.path == "/health":
            if self._engine.has_failed:
                return make_error(503, FAILED)
            is_leaving = self._preemption_file is not None and self._preemption_file.exists()
            return make_error(503, "this machine is about to be preempted") if is_leaving else _answer({"status": "ok"})
        if request.path == "/v1/models":
            return _answer({"object": "list", "data": [{"id": self._name, "object": "model", "owned_by": "broker"}]})
        if request.path == "/metrics":
            return self._describe_load()
        if request.path not in (COMPLETIONS, CHAT):
            raise RequestError(404, f"unknown path `{request.path}`")
        if request.method != "POST":
            raise RequestError(405, f"`{request.path}` requires POST")
        return await self._generate(request.read_json(), is_chat=request.path == CHAT)

    def _describe_load(self) -> Response:
        running, waiting = self._engine.counts
        lines = (
            f"vllm:num_requests_running {running}",
            f"vllm:num_requests_waiting {waiting}",
            f"vllm:generation_tokens_total {self._engine.token_count}",
        )
        return Response(content="".join(f"{line}\n" for line in lines).encode(), content_type="text/plain")

    async def _generate(self, fields: Mapping[str, Any], *, is_chat: bool) -> Response:
        generation = self._read_generation(fields, is_chat=is_chat)
        writer = _Writer(self._tokenizer, generation, fields, name=self._name, is_chat=is_chat)
        try:
            self._engine.submit(generation)
        except FullError:
            return make_error(429, "too many requests are waiting")
        except EngineFailedError:
            return make_error(503, FAILED)
        if fields.get("stream"):
            return Response(content_type="text/event-stream", events=writer.stream())
        return _answer(await writer.collect())

    def _read_generation(self, fields: Mapping[str, Any], *, is_chat: bool) -> Generation:
        _refuse_unsupported(fields)
        prompt = self._read_prompt(fields, is_chat=is_chat)
        # A tokenizer may have tokens for which the model has no embedding: such an id would end the engine.
        vocabulary = self._engine.vocabulary
        if not prompt or not all(isinstance(each, int) and 0 <= each < vocabulary for each in prompt):
            raise RequestError(
                400, f"the prompt must consist of tokens that the model knows, with ids below {vocabulary}"
            )
        if len(prompt) >= self._context:
            raise RequestError(400, f"the prompt has {len(prompt)} tokens; the model's context is {self._context}")
        rest = self._context - len(prompt)
        most = fields.get("max_completion_tokens") or fields.get("max_tokens", rest if is_chat else 16)
        resumed = _read_number(fields, "resumed_tokens", 0, int)
        if not 0 <= resumed <= len(prompt):
            raise RequestError(400, "`resumed_tokens` must be the number of the prompt's last ids that were generated")
        return Generation(
            prompt=prompt,
            tokens_max=max(1, _read_number({"max_tokens": most}, "max_tokens", rest, int)),
            temperature=_read_number(fields, "temperature", 0.0, float),
            seed=_read_number(fields, "seed", 0, int),
            top_k=_read_number(fields, "top_k", 0, int),
            top_p=_read_number(fields, "top_p", 1.0, float),
            resumed=resumed,
            stop_ids=frozenset() if fields.get("ignore_eos") else frozenset(self._tokenizer.separator),
        )

    def _read_prompt(self, fields: Mapping[str, Any], *, is_chat: bool) -> list[int]:
        if not is_chat:
            prompt = fields.get("prompt", "")
            if not isinstance(prompt, (str, list)):
                raise RequestError(400, "`prompt` must be text, or a list of token ids")
            return self._encode(prompt) if isinstance(prompt, str) else prompt
        messages = fields.get("messages")
        if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
            raise RequestError(400, "`messages` must be a list of messages")
        # These models are trained without a chat template, so no template is correct.
        lines = [f"{each.get('role', 'user')}: {_join_parts(each.get('content'))}\n" for each in messages]
        return self._encode("".join([*lines, "assistant: "]))

    def _encode(self, text: str) -> list[int]:
        try:
            return list(self._tokenizer.encode(text.encode()))
        except UnicodeEncodeError:  # JSON can hold half of a surrogate pair
            raise RequestError(400, "the text is not valid Unicode") from None


class _Writer:
    """Formats one generation as OpenAI's API does, whole or in chunks."""

    def __init__(
        self, tokenizer: Tokenizer, generation: Generation, fields: Mapping[str, Any], *, name: str, is_chat: bool
    ) -> None:
        self._generation, self._is_chat = generation, is_chat
        self._has_ids = bool(fields.get("return_token_ids"))
        options = fields.get("stream_options") or {}
        if not isinstance(options, dict):
            raise RequestError(400, "`stream_options` must be an object")
        self._has_usage = bool(options.get("include_usage"))
        self._text = Detokenizer(tokenizer.decode)
        self._text.skip(generation.prompt[len(generation.prompt) - generation.resumed :])
        prefix = "chatcmpl" if is_chat else "cmpl"
        self._head = {"id": f"{prefix}-{secrets.token_hex(8)}", "created": int(time.time()), "model": name}

    async def stream(self) -> AsyncIterator[str]:
        """Yield the events. A client that disconnects cancels the generation."""
        is_first = True
        try:
            async for text, ids in self._pieces():
                yield self._chunk(text, ids, is_first=is_first)
                is_first = False
            text, ids = self._text.flush()
            yield self._chunk(text, ids, is_first=is_first, finish=self._generation.finish)
            if self._has_usage:
                yield json.dumps({**self._describe("chunk"), "choices": [], "usage": self._count()})
            yield "[DONE]"
        finally:
            self._generation.is_cancelled = True

    async def collect(self) -> dict[str, Any]:
        """Return the whole answer."""
        try:
            pieces = [piece async for piece in self._pieces()]
        finally:
            self._generation.is_cancelled = True
        pieces.append(self._text.flush())
        text = "".join(piece for piece, _ in pieces)
        choice: dict[str, Any] = {"index": 0, "finish_reason": self._generation.finish}
        choice |= {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
        answer = {**self._describe(""), "choices": [choice], "usage": self._count()}
        if self._has_ids:
            choice["token_ids"] = list(self._generation.tokens)
            answer["prompt_token_ids"] = self._generation.prompt
        return answer

    async def _pieces(self) -> AsyncIterator[tuple[str, list[int]]]:
        async for token in self._generation.read():
            text, ids = self._text.add(token)
            if ids:
                yield text, ids

    def _chunk(self, text: str, ids: Sequence[int], *, is_first: bool, finish: str | None = None) -> str:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        if self._is_chat:
            choice["delta"] = {**({"role": "assistant"} if is_first else {}), "content": text}
        else:
            choice["text"] = text
        chunk = {**self._describe("chunk"), "choices": [choice]}
        if self._has_ids:
            choice["token_ids"] = list(ids)
            if is_first:
                chunk["prompt_token_ids"] = self._generation.prompt
        return json.dumps(chunk, separators=(",", ":"))

    def _describe(self, piece: str) -> dict[str, Any]:
        if not self._is_chat:
            return {**self._head, "object": "text_completion"}
        return {**self._head, "object": f"chat.completion{'.' if piece else ''}{piece}"}

    def _count(self) -> dict[str, int]:
        prompt, made = len(self._generation.prompt), len(self._generation.tokens)
        return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def _answer(content: Mapping[str, Any]) -> Response:
    return Response(content=json.dumps(content).encode())


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    """Raise RequestError for a field that would change the answer: ignored, it would make a wrong one."""
    for name, neutral in NEUTRAL.items():
        if fields.get(name) and fields[name] not in neutral:
            raise RequestError(400, f"`{name}` is not supported")
    # 0 asks for the probability of the token itself.
    if fields.get("logprobs") not in (None, False) or type(fields.get("logprobs")) is int:
        raise RequestError(400, "`logprobs` is not supported")


def _join_parts(content: Any) -> str:
    """Return the text of a message, which may come in parts."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = [each.get("text") for each in content if isinstance(each, dict)] if isinstance(content, list) else []
    if not isinstance(content, list) or len(texts) < len(content) or not all(isinstance(each, str) for each in texts):
        raise RequestError(400, "the `content` of a message must be text")
    return "".join(str(each) for each in texts)


def _read_number(fields: Mapping[str, Any], name: str, default: Any, kind: Any) -> Any:
    value = fields.get(name)
    if value is None:
        return default
    try:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise RequestError(400, f"`{name}` must be a number")
        return kind(value)
    except OverflowError:  # an integer beyond the range of floats
        raise RequestError(400, f"`{name}` is out of range") from None
