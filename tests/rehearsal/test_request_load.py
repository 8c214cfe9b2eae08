"""Requests to a rehearsed service, through a real connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from aiohttp import web

from broker.rehearsal.request_load import RequestSender, RequestTally
from broker.serve.data_path import WAIT_S_MAX
from broker.types import ReadinessProbe
from tests.serve.stand_in import StandIn


def send(
    path: str = "/health",
    *,
    probe: ReadinessProbe | None = None,
    read_outage_s: Callable[[], float] = lambda: 0.0,
    prepare: Callable[[StandIn], None] = lambda stand: None,
) -> tuple[RequestTally, StandIn]:
    """Send two requests to a stand-in."""

    async def play() -> tuple[RequestTally, StandIn]:
        stand = StandIn()
        await stand.start()
        prepare(stand)
        url = f"http://127.0.0.1:{stand.port}{path}"
        sender = RequestSender(url, probe or ReadinessProbe(path=path), read_outage_s)
        sender.is_sending = True
        sending = asyncio.ensure_future(sender.send_forever())
        while sender.tally.sent < 2:
            await asyncio.sleep(0)
        await sender.stop()
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sending
        await stand.kill()
        return sender.tally, stand

    return asyncio.run(play())


def test_request_sender_counts_answers_by_status() -> None:
    tally, _ = send()
    assert tally.sent == tally.answered >= 2 and not tally.failed and tally.median_s is not None


def test_an_error_is_a_failure_by_its_status() -> None:
    tally, _ = send(prepare=lambda stand: setattr(stand, "is_healthy", False))
    assert tally.failures == {"503": tally.sent} and tally.failed == tally.sent


def test_the_body_of_the_probe_is_posted() -> None:
    probe = ReadinessProbe(path="/echo", post_data='{"n": 1}', headers={"x-sent": "yes"})
    tally, stand = send("/echo", probe=probe)
    assert tally.answered == tally.sent and stand.seen[0] == ("POST", "/echo", b'{"n": 1}')
    assert stand.headers[0]["x-sent"] == "yes"


def test_an_answer_after_more_than_a_minute_without_replicas_is_late() -> None:
    outage_s = 0.0

    def read_outage_s() -> float:
        nonlocal outage_s
        outage_s += WAIT_S_MAX + 1
        return outage_s

    tally, _ = send(read_outage_s=read_outage_s)
    assert tally.late == tally.failed == tally.sent and tally.wait_s_max > WAIT_S_MAX


def test_a_redirect_is_an_answer_and_is_not_followed() -> None:
    """It may lead elsewhere, to where the probe's headers must not go."""
    seen: list[str] = []

    def redirect(stand: StandIn) -> None:
        async def answer(request: web.BaseRequest) -> web.StreamResponse:
            seen.append(request.path)
            return web.Response(status=302, headers={"location": f"http://localhost:{stand.port}/elsewhere"})

        stand._answer = answer  # type: ignore[method-assign]

    tally, _ = send("/login", prepare=redirect)
    assert tally.answered == tally.sent and set(seen) == {"/login"}
