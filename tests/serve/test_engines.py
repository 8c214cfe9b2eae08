"""Streams of each engine pass the balancer whole; those of engines that return ids survive their replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp.base_protocol import BaseProtocol

from broker.serve.engines import EngineFacts, parse_context
from broker.serve.files import Backend
from broker.serve.routes import BackendRoute
from broker.serve.streams import UNANSWERED_MAX
from tests.serve.engines import CONTEXT, EngineStandIn
from tests.serve.stand_in import StandIn, expect_text
from tests.serve.test_balancer import Bed, play

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SURVIVES = {("vllm", CHAT), ("vllm", COMPLETIONS), ("sglang", COMPLETIONS)}
REFUSES = {("sglang", CHAT), ("triton", CHAT), ("triton", COMPLETIONS)}
ENGINES = ("vllm", "sglang", "llama-cpp", "triton")
all_streams = pytest.mark.parametrize("path", [CHAT, COMPLETIONS], ids=["chat", "completions"])


def make_stands(engine: str, **options: Any) -> Any:
    return lambda count: [EngineStandIn(engine, **options) for _ in range(count)]


def ask(path: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}


def join(events: list[Any], field: str = "content") -> str:
    choices = [each["choices"][0] for each in events if each["choices"]]
    return "".join((each["delta"].get(field) if "delta" in each else each["text"]) or "" for each in choices)


async def lose_the_first(bed: Bed, path: str, **fields: Any) -> tuple[asyncio.Future[list[Any]], StandIn, StandIn]:
    """Begin a stream, and kill its replica once its first tokens have arrived; the other one sends all."""
    for each in bed.stands:
        each.gate.clear()
    begun = asyncio.Event()
    events = bed.stands[0].free + (path == CHAT)  # a chat begins with the role
    streaming = asyncio.ensure_future(bed.stream(path, begun=begun, first=events, **{**ask(path), **fields}))
    await begun.wait()
    first = await bed.until_asked()
    second = next(each for each in bed.stands if each is not first)
    second.gate.set()
    await first.kill()
    return streaming, first, second


@all_streams
@pytest.mark.parametrize("engine", ENGINES)
def test_undisturbed_stream_of_each_engine_is_whole(tmp_path: Path, engine: str, path: str) -> None:
    async def scene(bed: Bed) -> None:
        for _ in range(2):
            events = await bed.stream(path, **ask(path), stream_options={"include_usage": True})
            assert join(events) == expect_text("hi", 12)
            assert events[-1]["usage"]["completion_tokens"] == 12
            choices = [choice for each in events for choice in each["choices"]]
            assert not any("prompt_token_ids" in each for each in (*events, *choices)), "the client did not ask"
            assert not any("token_ids" in each for each in choices)
        asked = [each.get("return_token_ids") for stand in bed.stands for each in stand.asked]
        refused = 1 if (engine, path) in REFUSES else 0
        assert len(asked) == 2 + refused, "a refusal is remembered"
        assert asked.count(True) == (1 if refused else 2)

    assert play(tmp_path, scene, count=1, make_stands=make_stands(engine)).broken == 0


@all_streams
@pytest.mark.parametrize("engine", ENGINES)
def test_stream_of_an_engine_that_returns_ids_survives_its_replica(tmp_path: Path, engine: str, path: str) -> None:
    survives = (engine, path) in SURVIVES

    async def scene(bed: Bed) -> None:
        streaming, first, second = await lose_the_first(bed, path)
        if not survives:
            with pytest.raises(aiohttp.ClientError):
                await streaming
            return
        assert join(await streaming) == expect_text("hi", 12)
        (continued,) = second.asked
        assert continued["prompt"][:2] == list(b"hi") and continued["max_tokens"] < 12
        assert first.asked[0]["seed"] == continued["seed"]

    load = play(tmp_path, scene, make_stands=make_stands(engine))
    assert (load.resumed, load.broken) == ((1, 0) if survives else (0, 1))


def test_client_that_asks_for_ids_gets_them_where_the_engine_puts_them(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        whole = await bed.stream(COMPLETIONS, **ask(COMPLETIONS), return_token_ids=True)
        assert whole[0]["choices"][0]["prompt_token_ids"] == list(b"hi") and whole[0]["choices"][0]["token_ids"]
        chat = await bed.stream(CHAT, **ask(CHAT), return_token_ids=True)
        assert chat[0]["prompt_token_ids"] == list(b"hi")

    play(tmp_path, scene, count=1, make_stands=make_stands("vllm"))


def test_chat_without_a_limit_continues_to_the_end_of_the_context(tmp_path: Path) -> None:
    """A continuation is a completion, which would end after 16 tokens without a limit."""

    async def scene(bed: Bed) -> None:
        streaming, _, second = await lose_the_first(bed, CHAT, max_tokens=None)
        assert join(await streaming) == expect_text("hi", CONTEXT - 2)
        assert second.asked[0]["max_tokens"] == CONTEXT - len(second.asked[0]["prompt"])

    assert play(tmp_path, scene, make_stands=make_stands("vllm")).broken == 0


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama-cpp"])
def test_reasoning_reaches_the_client(tmp_path: Path, engine: str) -> None:
    async def scene(bed: Bed) -> None:
        events = await bed.stream(CHAT, **ask(CHAT))
        field = "reasoning" if engine == "vllm" else "reasoning_content"
        assert join(events, field) + join(events) == expect_text("hi", 12) and len(join(events, field)) == 5

    play(tmp_path, scene, count=1, make_stands=make_stands(engine, reasoning=5))


@pytest.mark.parametrize("reasoning", [2, 5])
def test_answer_is_continued_after_its_reasoning_and_reasoning_itself_is_not(tmp_path: Path, reasoning: int) -> None:
    async def scene(bed: Bed) -> None:
        for each in bed.stands:
            each.free = 4  # tokens before the loss
        streaming, _, _ = await lose_the_first(bed, CHAT)
        if reasoning == 5:
            with pytest.raises(aiohttp.ClientError):
                await streaming
            return
        events = await streaming
        assert join(events, "reasoning") + join(events) == expect_text("hi", 12)

    load = play(tmp_path, scene, make_stands=make_stands("vllm", reasoning=reasoning))
    assert load.broken == (1 if reasoning == 5 else 0)


DEAD = {"error": {"message": "EngineCore encountered an issue", "type": "InternalServerError", "code": 500}}
INVALID = {"error": {"message": "the prompt is too long", "type": "BadRequestError", "code": 400}}


def make_abort(path: str) -> dict[str, Any]:
    text: dict[str, Any] = {"delta": {"content": "?"}} if path == CHAT else {"text": "?"}
    return {"choices": [{"index": 0, **text, "finish_reason": "abort", "token_ids": [63]}]}


@all_streams
@pytest.mark.parametrize("is_abort", [True, False], ids=["terminated", "dead"])
def test_stream_that_an_engine_ends_because_of_itself_continues_elsewhere(
    tmp_path: Path, path: str, *, is_abort: bool
) -> None:
    """vLLM aborts its requests on SIGTERM: the stream then ends as if it were whole."""

    async def scene(bed: Bed) -> None:
        for stand in bed.stands:
            assert isinstance(stand, EngineStandIn)
            stand.faults = [make_abort(path) if is_abort else DEAD]
        events = await bed.stream(path, **ask(path))
        assert join(events) == expect_text("hi", 12)
        assert not any("error" in each for each in events)

    load = play(tmp_path, scene, make_stands=make_stands("vllm"))
    assert (load.resumed, load.broken) == (2, 0)


def test_stream_that_an_engine_keeps_open_after_its_fault_continues_elsewhere(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        for stand in bed.stands:
            assert isinstance(stand, EngineStandIn)
            stand.faults, stand.lingers = [DEAD], True
        try:
            events = await asyncio.wait_for(bed.stream(COMPLETIONS, **ask(COMPLETIONS)), 20.0)
        finally:
            for stand in bed.stands:
                stand.lingers = False  # type: ignore[attr-defined]
        assert join(events) == expect_text("hi", 12)

    load = play(tmp_path, scene, make_stands=make_stands("vllm"))
    assert (load.resumed, load.broken) == (2, 0)


def test_error_of_the_request_itself_reaches_the_client_without_another_try(tmp_path: Path) -> None:
    async def scene(bed: Bed) -> None:
        for stand in bed.stands:
            assert isinstance(stand, EngineStandIn)
            stand.faults = [INVALID]
        events = await bed.stream(COMPLETIONS, **ask(COMPLETIONS))
        assert [each["error"]["code"] for each in events if "error" in each] == [400]

    load = play(tmp_path, scene, make_stands=make_stands("vllm"))
    assert (load.resumed, load.broken) == (0, 0)


def test_stream_that_all_engines_end_is_given_up_after_a_few_tries_with_their_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.serve.streams.PAUSE_S", 0.001)

    async def scene(bed: Bed) -> None:
        for stand in bed.stands:
            assert isinstance(stand, EngineStandIn)
            stand.free, stand.faults = 0, [DEAD] * 20
        events = await bed.stream(COMPLETIONS, **ask(COMPLETIONS))
        assert [each["error"]["code"] for each in events] == [500]
        assert sum(len(each.asked) for each in bed.stands) == UNANSWERED_MAX

    assert play(tmp_path, scene, make_stands=make_stands("vllm")).broken == 1


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        (b'{"data": [{"max_model_len": 4096}]}', 4096),
        (b'{"data": [{"id": "m"}]}', None),
        (b'{"data": []}', None),
        (b'{"data": [{"max_model_len": true}]}', None),
        (b'{"data": [{"max_model_len": "4096"}]}', None),
        (b"[]", None),
        (b"not found", None),
    ],
)
def test_context_is_what_the_list_of_models_states(body: bytes, tokens: int | None) -> None:
    assert parse_context(body) == tokens


def test_list_of_models_that_arrives_in_parts_is_read_whole() -> None:
    """Without the context, a resumed chat would have no limit of tokens, which is 16 for a completion."""
    body = b'{"data": [{"id": "base", "max_model_len": 4096}, {"id": "adapter"}]}'

    async def read() -> int | None:
        loop = asyncio.get_running_loop()
        protocol = BaseProtocol(loop)
        protocol.connection_made(asyncio.Transport())
        content = aiohttp.StreamReader(protocol, 2**16, loop=loop)
        content.feed_data(body[:30])

        @asynccontextmanager
        async def get(url: str, **options: Any) -> AsyncIterator[Any]:
            loop.call_soon(lambda: (content.feed_data(body[30:]), content.feed_eof()))
            yield SimpleNamespace(content=content)

        session: Any = SimpleNamespace(get=get)
        route = BackendRoute(Backend(number=1, version=1, host="127.0.0.1", port=1), now_s=0.0)
        return await EngineFacts().find_context(session, route)

    assert asyncio.run(read()) == 4096
