"""API keys at the balancer: which requests are admitted, what is counted, and what is stored."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from broker.errors import UsageError
from broker.serve.admission import Gate, KeyRefusal
from broker.serve.files import ServiceFolder
from broker.serve.keys import ApiKey, KeyRing, KeyUsage, UsageBook, create_key, read_keys, read_usage, revoke_key
from tests.serve.live_bed import LiveBed
from tests.serve.test_balancer import Bed, play


class SteppedClock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self._now_s = 1000.0

    def now_s(self) -> float:
        return self._now_s

    def advance(self, duration_s: float) -> None:
        self._now_s += duration_s

    async def sleep(self, duration_s: float) -> None:
        raise AssertionError("a gate does not sleep")


def make_gate(clock: SteppedClock, folder: Path, host: str = "127.0.0.1", **limits: Any) -> tuple[Gate, str]:
    _, text = create_key(ServiceFolder(path=folder), "ann", now_s=clock.now_s(), **limits)
    return Gate(read_keys(ServiceFolder(path=folder)), UsageBook(), host=host, clock=clock), text


def refuse(gate: Gate, text: str) -> KeyRefusal:
    found = gate.admit(text)
    assert isinstance(found, KeyRefusal)
    return found


def test_service_without_keys_is_open_on_the_loopback_only() -> None:
    clock = SteppedClock()
    assert Gate(KeyRing(), UsageBook(), host="127.0.0.1", clock=clock).admit("") is None
    assert refuse(Gate(KeyRing(), UsageBook(), host="0.0.0.0", clock=clock), "").status == 401
    assert refuse(Gate(None, UsageBook(), host="127.0.0.1", clock=clock), "").status == 401


def test_key_is_stored_as_a_hash_and_revoking_closes_rather_than_opens(tmp_path: Path) -> None:
    clock, folder = SteppedClock(), ServiceFolder(path=tmp_path)
    gate, text = make_gate(clock, tmp_path)
    assert text not in folder.keys.read_text()
    assert folder.keys.stat().st_mode & 0o777 == 0o600
    assert isinstance(gate.admit(text), ApiKey)
    assert refuse(gate, text[:-1]).status == refuse(gate, "broker-x-y").status == refuse(gate, "").status == 401
    with pytest.raises(UsageError, match="exists"):
        create_key(folder, "ann", now_s=0.0)
    revoke_key(folder, "ann", now_s=1.0)
    gate.adopt(read_keys(folder))
    assert refuse(gate, text).status == refuse(gate, "").status == 401
    with pytest.raises(UsageError, match="unknown key"):
        revoke_key(folder, "bob", now_s=1.0)


def test_limits_refuse_with_the_time_to_wait(tmp_path: Path) -> None:
    clock = SteppedClock()
    gate, text = make_gate(clock, tmp_path, requests_per_minute=2)
    assert not isinstance(gate.admit(text), KeyRefusal) and not isinstance(gate.admit(text), KeyRefusal)
    refusal = refuse(gate, text)
    assert (refusal.status, refusal.code, refusal.retry_s) == (429, "rate_limit_exceeded", 30)
    clock.advance(30)
    assert not isinstance(gate.admit(text), KeyRefusal)


def test_tokens_budget_and_expiry_refuse(tmp_path: Path) -> None:
    clock = SteppedClock()
    gate, text = make_gate(clock, tmp_path, tokens_per_minute=60, budget_tokens=200, expires_s=clock.now_s() + 500)
    key = gate.admit(text)
    assert isinstance(key, ApiKey)
    gate.charge(key, 50, 40)  # 30 more than the bucket held
    assert refuse(gate, text).retry_s == 31
    clock.advance(31)
    assert isinstance(gate.admit(text), ApiKey)
    gate.charge(key, 0, 110)
    assert (refuse(gate, text).status, refuse(gate, text).code) == (403, "insufficient_quota")
    clock.advance(500)
    assert refuse(gate, text).code == "expired_api_key"


def test_two_balancers_divide_limits_and_one_alone_has_them(tmp_path: Path) -> None:
    clock = SteppedClock()
    gate, text = make_gate(clock, tmp_path, requests_per_minute=4)
    gate.share(2)
    assert [isinstance(gate.admit(text), ApiKey) for _ in range(3)] == [True, True, False]
    clock.advance(30.0)  # half of a minute: one of two requests
    assert [isinstance(gate.admit(text), ApiKey) for _ in range(2)] == [True, False]
    gate.share(1)  # the other is gone: the two requests of its share are admitted here
    assert [isinstance(gate.admit(text), ApiKey) for _ in range(3)] == [True, True, False]
    gate.share(2)
    assert refuse(gate, text).status == 429


def test_limit_of_one_request_per_minute_is_not_zero_at_each_of_two_balancers(tmp_path: Path) -> None:
    clock = SteppedClock()
    gate, text = make_gate(clock, tmp_path, requests_per_minute=1)
    gate.share(2)
    assert isinstance(gate.admit(text), ApiKey) and refuse(gate, text).retry_s == 120
    clock.advance(120.0)
    assert isinstance(gate.admit(text), ApiKey)


def test_budget_counts_the_usage_at_other_balancers(tmp_path: Path) -> None:
    clock = SteppedClock()
    gate, text = make_gate(clock, tmp_path, budget_tokens=100)
    key = gate.admit(text)
    assert isinstance(key, ApiKey)
    gate.charge(key, 20, 20)
    gate.adopt_elsewhere(UsageBook(keys={key.id: KeyUsage(completion_tokens=59)}))
    assert isinstance(gate.admit(text), ApiKey)
    gate.adopt_elsewhere(UsageBook(keys={key.id: KeyUsage(completion_tokens=60)}))
    assert refuse(gate, text).code == "insufficient_quota"
    assert gate.usage.keys[key.id].tokens == 40  # its own only


def test_streams_are_counted_by_key_and_replicas_do_not_see_it(tmp_path: Path) -> None:
    folder = ServiceFolder(path=tmp_path)
    _, text = create_key(folder, "ann", now_s=0.0)

    async def scene(bed: Bed) -> None:
        async with bed.client.post(f"{bed.url}/v1/completions", json={}) as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"]) == (401, "invalid_api_key")
        bed.client.headers["authorization"] = f"Bearer {text}"
        for asks in (False, True):
            events = await bed.stream(prompt="abc", stream_options={"include_usage": True} if asks else None)
            assert len(events) == 12 + asks and ("usage" in events[-1]) == asks
        events = await bed.stream(prompt="abcd", stop="never")  # cannot be continued, and is counted by `usage` as well
        assert len(events) == 12 and "usage" not in events[-1]
        async with bed.client.ws_connect(f"{bed.url}/socket") as socket:
            await socket.send_str("a")
            assert (await socket.receive()).data == "echo a"
        seen = json.dumps([each.headers for each in bed.stands], default=str)
        assert text not in seen and any(each.headers for each in bed.stands)

    load = play(tmp_path, scene)
    used = next(iter(read_usage(folder).keys.values()))
    assert (used.requests, used.completion_tokens) == (4, 36) and used.prompt_tokens == 10
    assert load.arrivals == 4, "a request without a key is no load"
    assert load.window.requests >= 3 and load.window.ttft_p50_s is not None
    assert not any(text in each.read_text() for each in tmp_path.iterdir() if each.is_file())


@pytest.mark.parametrize("scheme", ["Bearer {}", "bearer {}", ""])
def test_key_is_taken_as_clients_of_either_api_send_it(scheme: str, tmp_path: Path) -> None:
    _, text = create_key(ServiceFolder(path=tmp_path), "ann", now_s=0.0)
    sent = {"Authorization": scheme.format(text)} if scheme else {"X-Api-Key": text, "Authorization": "Basic eA=="}

    async def scene(bed: Bed) -> None:
        async with bed.client.post(f"{bed.url}/v1/messages", json={"x": 1}, headers=sent) as response:
            assert response.status == 200
        async with bed.client.post(f"{bed.url}/v1/messages", json={}, headers={"x-api-key": text[:-1]}) as response:
            assert response.status == 401
        names = {name.lower() for stand in bed.stands for each in stand.headers for name in each}
        assert names and not names & {"authorization", "x-api-key"}

    play(tmp_path, scene)
    assert [each.requests for each in read_usage(ServiceFolder(path=tmp_path)).keys.values()] == [1]


def test_browser_may_ask_without_a_key_which_origins_may_send_one(tmp_path: Path) -> None:
    """The question is no load, and starts no replica: anyone can send it."""
    create_key(ServiceFolder(path=tmp_path), "ann", now_s=0.0)
    question = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}

    async def scene(bed: Bed) -> None:
        url = f"{bed.url}/v1/chat/completions"
        async with bed.client.options(url, headers=question) as response:
            assert response.status == 200
        assert [each[:2] for stand in bed.stands for each in stand.seen] == [("OPTIONS", "/v1/chat/completions")]
        for method, headers, body in (
            ("OPTIONS", question, b"x"),
            ("OPTIONS", {"Origin": "https://app.example"}, None),
            ("POST", question, None),
        ):
            async with bed.client.request(method, url, headers=headers, data=body) as response:
                assert response.status == 401
        for each in bed.stands:
            await each.kill()
        await bed.until_ready(0)
        async with bed.client.options(url, headers=question) as response:  # at once: it does not wait for a replica
            assert response.status == 503

    load = play(tmp_path, scene)
    assert (load.arrivals, load.waiting, load.in_flight) == (0, 0, 0)


def test_question_of_a_browser_is_refused_where_every_request_is(tmp_path: Path) -> None:
    create_key(ServiceFolder(path=tmp_path), "ann", now_s=0.0)
    ServiceFolder(path=tmp_path).keys.write_text("{")
    question = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}

    async def scene(bed: Bed) -> None:
        async with bed.client.options(bed.url, headers=question) as response:
            assert response.status == 401

    play(tmp_path, scene)


def test_usage_survives_a_balancer_that_is_killed(tmp_path: Path) -> None:
    folder = ServiceFolder(path=tmp_path)
    _, text = create_key(folder, "ann", now_s=0.0)

    async def run() -> None:
        bed = LiveBed(tmp_path, pause_s=0.0)
        async with bed.run(1), aiohttp.ClientSession(headers={"authorization": f"Bearer {text}"}) as client:

            async def ask() -> None:
                body = {"prompt": "abc", "stream": True, "max_tokens": 5}
                async with client.post(f"{bed.url}/v1/completions", json=body) as response:
                    assert response.status == 200
                    await response.read()

            async def until_used(tokens: int) -> None:
                while not (used := list(read_usage(folder).keys.values())) or used[0].tokens != tokens:
                    await asyncio.sleep(0.01)

            await ask()
            await until_used(8)
            await bed.replace_balancer()
            await ask()
            await until_used(16)

    asyncio.run(run())
