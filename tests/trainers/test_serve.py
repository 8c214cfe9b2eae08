"""`trainers.serve`: batches, the cache, the journal, and continuations from token ids."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainers.config import ModelConfig
from trainers.models import create_language_model
from trainers.serve import find_host
from trainers.serve_api import Api
from trainers.serve_engine import Detokenizer, Engine, Generation, choose_token
from trainers.serve_http import Request, RequestError, start_server
from trainers.serve_model import CachedModel
from trainers.tokenizers import ByteTokenizer

CPU = torch.device("cpu")
KINDS = {
    "gpt": ModelConfig(kind="gpt", depth=2, width=32, heads=4, context=64, vocabulary=256),
    "llama": ModelConfig(kind="llama", depth=2, width=32, heads=4, key_value_heads=2, context=64, vocabulary=256),
    "qwen": ModelConfig(
        kind="llama", depth=1, width=32, heads=4, context=64, vocabulary=256, query_key_norm=True, attention_bias="qkv"
    ),
    "mixtral": ModelConfig(
        kind="llama", depth=2, width=32, heads=4, context=64, vocabulary=256, experts=4, experts_per_token=2
    ),
}


def make_model(kind: str, vocabulary: int = 256) -> tuple[Any, ModelConfig]:
    torch.manual_seed(3)
    config = dataclasses.replace(KINDS[kind], vocabulary=vocabulary)
    model = create_language_model(config.kind, config)
    with torch.no_grad():  # initial weights are so small that all tokens are nearly as likely
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8.0)
    return model.eval(), config


def make_engine(kind: str = "gpt", slots: int = 3, vocabulary: int = 256) -> Engine:
    model, config = make_model(kind, vocabulary)
    return Engine(CachedModel(model, config, slots=slots, device=CPU), slots=slots, vocabulary=256)


def generate_without_cache(kind: str, prompt: list[int], count: int) -> list[int]:
    model, config = make_model(kind)
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids[-config.context :]]))[0, -1].argmax()))
    return ids[len(prompt) :]


def run_steps(engine: Engine, *generations: Generation) -> None:
    for each in generations:
        engine.submit(each)
    while any(each.finish is None for each in generations):
        engine.step()


@pytest.mark.parametrize("kind", KINDS)
def test_batch_of_sequences_of_different_lengths_equals_the_trained_model(kind: str) -> None:
    prompts = [[5, 6, 7], list(range(40)), [200], [9] * 17]
    generations = [Generation(prompt=prompt, tokens_max=12) for prompt in prompts]
    run_steps(make_engine(kind), *generations)  # three slots, so the fourth joins the running batch
    assert [each.tokens for each in generations] == [generate_without_cache(kind, prompt, 12) for prompt in prompts]


def test_full_experts_do_not_let_one_request_change_another() -> None:
    model, config = make_model("mixtral")
    for block in model.blocks:
        block.perceptron.router.capacity = 0.5  # as trained with a tight `--model.expert_capacity`
    alone, together = (Generation(prompt=[5, 6, 7], tokens_max=12) for _ in range(2))
    for each, others in ((alone, ()), (together, (Generation(prompt=list(range(40)), tokens_max=12),))):
        engine = Engine(CachedModel(model, config, slots=3, device=CPU), slots=3, vocabulary=256)
        run_steps(engine, each, *others)
    assert alone.tokens == together.tokens == generate_without_cache("mixtral", [5, 6, 7], 12)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("cut", [1, 7, 19])
def test_continuation_from_ids_is_the_undisturbed_run(temperature: float, cut: int) -> None:
    prompt = [1, 2, 3]
    whole = Generation(prompt=prompt, tokens_max=20, temperature=temperature, seed=5)
    run_steps(make_engine(), whole)
    head = whole.tokens[:cut]
    rest = Generation(prompt=prompt + head, tokens_max=20 - cut, temperature=temperature, seed=5, resumed=cut)
    run_steps(make_engine(), rest)
    assert head + rest.tokens == whole.tokens


def test_generation_ends_at_the_context_and_at_a_stop_id() -> None:
    full = Generation(prompt=[1] * 60, tokens_max=100)
    run_steps(make_engine(), full)
    assert (len(full.tokens), full.finish) == (4, "length")
    stop = full.tokens[2]
    stopped = Generation(prompt=[1] * 60, tokens_max=100, stop_ids=frozenset([stop]))
    run_steps(make_engine(), stopped)
    assert stopped.tokens == full.tokens[: full.tokens.index(stop)] and stopped.finish == "stop"


def test_reader_that_is_slower_than_the_engine_gets_every_token() -> None:
    generation = Generation(prompt=[1, 2], tokens_max=10)

    async def read() -> list[int]:
        tokens: list[int] = []
        engine = make_engine()
        engine.submit(generation)
        reader = generation.read()
        while not generation.tokens:
            engine.step()
        async for token in reader:  # the engine ends between two reads
            tokens.append(token)
            while generation.finish is None:
                engine.step()
        return tokens

    assert asyncio.run(read()) == generation.tokens and len(generation.tokens) == 10


def test_cancelled_generation_frees_its_slot() -> None:
    engine = make_engine(slots=1)
    first, second = (Generation(prompt=[each], tokens_max=50) for each in (1, 2))
    engine.submit(first)
    engine.submit(second)
    engine.step()
    assert engine.counts == (1, 1)
    first.is_cancelled = True
    engine.step()
    assert first.finish == "stop" and second.tokens


def test_text_is_held_back_until_a_character_is_complete() -> None:
    ids = list("aé€\U0001f600b".encode())
    text = Detokenizer(ByteTokenizer().decode)
    pieces = [text.add(each) for each in ids]
    assert [piece for piece, _ in pieces if piece] == ["a", "é", "€", "\U0001f600", "b"]
    assert [token for _, taken in pieces for token in taken] == ids
    resumed = Detokenizer(ByteTokenizer().decode)
    resumed.skip(ids[:3])
    assert [resumed.add(each)[0] for each in ids[3:6]] == ["", "", "€"]


def test_bytes_that_form_no_character_are_sent_in_the_end() -> None:
    text = Detokenizer(ByteTokenizer().decode)
    pieces = [text.add(0xFF) for _ in range(20)]
    assert sum(len(ids) for _, ids in [*pieces, text.flush()]) == 20


# The API over HTTP.


def serve(
    check: Callable[[int], Awaitable[None]],
    preemption_file: Path | None = None,
    prepare: Callable[[Engine], None] = lambda engine: None,
    vocabulary: int = 256,
) -> None:
    async def run() -> None:
        engine = make_engine(vocabulary=vocabulary)
        prepare(engine)
        engine.start()
        api = Api(engine, ByteTokenizer(), name="tiny", context=64, preemption_file=preemption_file)
        server = await start_server(api.handle, "127.0.0.1", 0)
        try:
            await check(server.sockets[0].getsockname()[1])
        finally:
            server.close()
            await asyncio.to_thread(engine.close)

    asyncio.run(run())


async def call(port: int, path: str, fields: dict[str, Any] | None = None, method: str = "POST") -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(fields or {}).encode()
    writer.write(
        f"{method} {path} HTTP/1.1\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
    )
    answer = await reader.read()
    writer.close()
    head, _, content = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), content


def read_events(content: bytes) -> list[Any]:
    lines = [line.removeprefix(b"data: ") for line in content.splitlines() if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_client_that_leaves_before_its_whole_answer_frees_its_slot() -> None:
    """It would keep the slot until the limit of its tokens: of a chat without one, the model's context."""
    engine = make_engine(slots=1)  # not started: without a step, no generation ends by itself
    api = Api(engine, ByteTokenizer(), name="tiny", context=64, preemption_file=None)

    async def leave() -> None:
        server = await start_server(api.handle, "127.0.0.1", 0)
        async with server:
            _, writer = await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1])
            body = json.dumps({"prompt": "a"})
            writer.write(f"POST /v1/completions HTTP/1.1\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
            async with asyncio.timeout(60):
                while engine.counts != (0, 1):
                    await asyncio.sleep(0.01)
                engine.step()
                (generation,) = engine._active.values()
                writer.close()
                while not generation.is_cancelled:
                    await asyncio.sleep(0.01)
            engine.step()
            assert engine.counts == (0, 0)

    asyncio.run(leave())


def test_stream_says_the_same_as_the_whole_answer_with_all_ids() -> None:
    fields = {"prompt": "hello", "max_tokens": 20, "ignore_eos": True, "return_token_ids": True}

    async def check(port: int) -> None:
        whole = json.loads((await call(port, "/v1/completions", fields))[1])
        options = {"stream": True, "stream_options": {"include_usage": True}}
        events = read_events((await call(port, "/v1/completions", {**fields, **options}))[1])
        choices = [each["choices"][0] for each in events if each["choices"]]
        assert "".join(each["text"] for each in choices) == whole["choices"][0]["text"]
        assert [token for each in choices for token in each["token_ids"]] == whole["choices"][0]["token_ids"]
        assert events[0]["prompt_token_ids"] == list(b"hello")
        assert (
            events[-1]["usage"] == whole["usage"] == {"prompt_tokens": 5, "completion_tokens": 20, "total_tokens": 25}
        )

    serve(check)


def test_chat_streams_deltas_and_other_paths_answer() -> None:
    async def check(port: int) -> None:
        fields = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": True, "ignore_eos": True}
        events = read_events((await call(port, "/v1/chat/completions", fields))[1])
        assert events[0]["object"] == "chat.completion.chunk"
        assert events[0]["choices"][0]["delta"]["role"] == "assistant"
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert (await call(port, "/health", method="GET"))[0] == 200
        assert json.loads((await call(port, "/v1/models", method="GET"))[1])["data"][0]["id"] == "tiny"
        assert b"vllm:num_requests_running 0" in (await call(port, "/metrics", method="GET"))[1]
        assert (await call(port, "/nothing"))[0] == 404
        assert (await call(port, "/v1/completions", method="GET"))[0] == 405

    serve(check)


@pytest.mark.parametrize(
    "fields",
    [{"prompt": ""}, {"prompt": [999]}, {"prompt": "a" * 64}, {"prompt": "a", "max_tokens": "x"}, {"prompt": ["a"]},
     {"prompt": "a", "resumed_tokens": 2}, {"prompt": "a", "temperature": float("nan")}, {"prompt": "a", "seed": 1e999},
     {"prompt": "a", "stop": "x"}, {"prompt": "a", "n": 2}, {"prompt": "a", "logprobs": 0}, {"prompt": 5},
     {"prompt": {"a": 1}}, {"prompt": "\ud800"}, {"prompt": "a", "stream_options": "x"},
     {"prompt": "a", "temperature": 10**400}],
)  # fmt: skip
def test_request_that_cannot_be_answered_is_refused(fields: dict[str, Any]) -> None:
    async def check(port: int) -> None:
        status, content = await call(port, "/v1/completions", fields)
        assert status == 400 and json.loads(content)["error"]["message"]

    serve(check)


def test_tokens_beyond_the_vocabulary_of_the_model_are_refused_and_do_not_end_the_engine() -> None:
    """One such request, tried at one replica after the other, ended all of them."""

    async def check(port: int) -> None:
        for prompt in ("\u00e9", [5, 128]):
            status, content = await call(port, "/v1/completions", {"prompt": prompt})
            assert status == 400 and "ids below 128" in json.loads(content)["error"]["message"]
        assert (await call(port, "/v1/completions", {"prompt": [5, 127]}))[0] == 200

    serve(check, vocabulary=128)


def test_fields_with_their_defaults_are_accepted() -> None:
    async def check(port: int) -> None:
        plain = {"n": 1, "stop": None, "tools": [], "logprobs": None, "top_p": 1, "presence_penalty": 0, "user": "ann"}
        fields = {"prompt": "a", "max_tokens": 2, "response_format": {"type": "text"}, **plain}
        assert (await call(port, "/v1/completions", fields))[0] == 200

    serve(check)


def test_message_in_parts_is_their_text_and_an_image_is_refused() -> None:
    async def check(port: int) -> None:
        parts: list[dict[str, Any]] = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
        answers = []
        for content in ("hi", parts):
            fields = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "return_token_ids": True}
            answers.append(json.loads((await call(port, "/v1/chat/completions", fields))[1]))
        assert answers[0]["prompt_token_ids"] == answers[1]["prompt_token_ids"]
        parts.append({"type": "image_url", "image_url": {"url": "data:,"}})
        assert (await call(port, "/v1/chat/completions", fields))[0] == 400

    serve(check)


def test_tiny_temperature_does_not_end_the_engine() -> None:
    """Logits divided by it are infinite, and no token can be drawn from their probabilities."""
    cold, greedy = (Generation(prompt=[1, 2, 3], tokens_max=8, temperature=each) for each in (1e-300, 0.0))
    run_steps(make_engine(), cold, greedy)
    assert cold.tokens == greedy.tokens


def test_sampling_is_limited_to_the_most_likely_tokens() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, -1.0])
    drawn = {
        name: {
            choose_token(logits, Generation(prompt=[0], tokens_max=1, temperature=1.0, **limit), n) for n in range(200)
        }
        for name, limit in {
            "all": {}, "k": {"top_k": 2}, "p": {"top_p": 0.6}, "tiny": {"top_p": 1e-9}, "none": {"top_p": 0.0},
            "less": {"top_p": -1.0},
        }.items()
    }  # fmt: skip
    # A `top_p` of 0 left no token to draw, and that error ended the engine for all other requests.
    assert drawn == {"all": {0, 1, 2, 3}, "k": {1, 2}, "p": {1}, "tiny": {1}, "none": {1}, "less": {1}}


def test_fault_while_a_request_is_answered_is_an_answer(capfd: pytest.CaptureFixture[str]) -> None:
    """The connection stayed open without one, so the client waited forever."""

    async def fail(request: Request) -> Any:
        raise LookupError("a fault")

    async def check() -> None:
        server = await start_server(fail, "127.0.0.1", 0)
        async with server:
            status, content = await call(server.sockets[0].getsockname()[1], "/v1/completions", {})
            assert status == 500 and json.loads(content)["error"]["message"] == "internal error"

    asyncio.run(check())
    assert "a fault" in capfd.readouterr().err


def test_engine_that_fails_aborts_its_generations_and_is_unhealthy(capfd: pytest.CaptureFixture[str]) -> None:
    """Its thread would otherwise be gone: requests would hang, and the probe would succeed."""
    reported = threading.Event()

    async def check(port: int) -> None:
        status, content = await call(port, "/v1/completions", {"prompt": "a", "max_tokens": 9})
        assert status == 200 and json.loads(content)["choices"][0]["finish_reason"] == "abort"
        assert (await call(port, "/health", method="GET"))[0] == 503
        assert (await call(port, "/v1/completions", {"prompt": "a"}))[0] == 503
        assert await asyncio.to_thread(reported.wait, 60)

    def damage(engine: Engine) -> None:
        engine.on_failure = reported.set
        engine._model.forward = lambda *parts: 1 / 0  # type: ignore[method-assign]

    serve(check, prepare=damage)
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_replica_with_a_preemption_notice_is_no_longer_healthy(tmp_path: Path) -> None:
    notice = tmp_path / "notice"

    async def check(port: int) -> None:
        assert (await call(port, "/health", method="GET"))[0] == 200
        notice.touch()
        assert (await call(port, "/health", method="GET"))[0] == 503

    serve(check, notice)


def test_body_that_is_not_an_object_is_refused() -> None:
    for body in (b"{", b"[]", b"\xff"):
        with pytest.raises(RequestError):
            Request(method="POST", path="/", body=body).read_json()


def test_only_nodes_of_clouds_listen_beyond_the_loopback() -> None:
    assert find_host({}) == find_host({"SKYPILOT_NODE_IPS": "127.0.0.7"}) == "127.0.0.1"
    assert find_host({"SKYPILOT_NODE_IPS": "10.0.0.2\n10.0.0.3"}) == "0.0.0.0"
    assert find_host({"SKYPILOT_NODE_IPS": "10.0.0.2", "BROKER_REPLICA_HOST": "127.0.0.1"}) == "127.0.0.1"
