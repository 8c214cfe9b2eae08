"""A database that does not answer: requests that need it wait, the others are answered."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from broker.errors import StateError
from broker.server.context import Policy, ServerContext
from broker.server.store_thread import StoreThread
from broker.state.people import TokenRows
from tests.server.conftest import Hosted


def test_health_is_shown_while_the_store_does_not_answer(hosted: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its probe ended the server's pod: each request with a token blocked the event loop until it timed out."""
    reached, answered = threading.Event(), threading.Event()
    find = TokenRows.find

    def find_late(self: TokenRows, digest: str) -> object:
        reached.set()
        assert answered.wait(300)
        return find(self, digest)

    monkeypatch.setattr(TokenRows, "find", find_late)
    statuses: list[int] = []
    asking = threading.Thread(
        target=lambda: statuses.append(hosted.ask("/v1/handshake", token=hosted.tokens["viewer"])[0])
    )
    asking.start()
    assert reached.wait(300)
    assert hosted.ask("/healthz") == (200, {"status": "ok"})
    assert not statuses
    answered.set()
    asking.join()
    assert statuses == [200]


def test_failure_is_that_of_all_requests_that_waited_for_it_and_of_no_later_one(tmp_path: Path) -> None:
    async def scene() -> None:
        begun, ended = threading.Event(), threading.Event()
        calls: list[str] = []

        def fail() -> str:
            calls.append("first")
            begun.set()
            assert ended.wait(300)
            raise StateError("the server cannot be reached", hints=["start it"])

        def answer() -> str:
            calls.append("other")
            return "found"

        thread = StoreThread(ServerContext(tmp_path, policy=Policy()))
        first = asyncio.ensure_future(thread.run(fail))
        await asyncio.to_thread(begun.wait, 300)
        others = [asyncio.ensure_future(thread.run(answer)) for _ in range(3)]
        await asyncio.sleep(0)
        ended.set()
        errors = await asyncio.gather(first, *others, return_exceptions=True)
        assert [(str(each), getattr(each, "hints", ())) for each in errors] == [
            ("the server cannot be reached", ("start it",))
        ] * 4
        assert calls == ["first"]
        assert await thread.run(answer) == "found"
        thread.close()

    asyncio.run(scene())
