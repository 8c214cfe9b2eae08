"""The scaled clock: rates, holding, sleeping. Real time enters only as `more than none`, never as a bound."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

from broker.clock import STALL_S_MAX, ScaledClock, within

HOUR_S = 3600.0


def test_an_hour_of_sleep_is_an_hour_of_simulated_time() -> None:
    clock = ScaledClock(rate=1e6)
    start_s = clock.now_s()
    asyncio.run(clock.sleep(HOUR_S))
    assert clock.now_s() - start_s >= HOUR_S


def test_a_held_clock_stops_and_continues() -> None:
    clock = ScaledClock(rate=1e9)
    with clock.hold():
        first_s = clock.now_s()
        with clock.hold():
            pass
        assert clock.now_s() == first_s
    assert clock.now_s() > first_s


def test_a_sleeper_waits_until_the_clock_is_released() -> None:
    clock = ScaledClock(rate=1e9)

    async def play() -> tuple[bool, bool]:
        with clock.hold():
            sleeping = asyncio.ensure_future(clock.sleep(1.0))
            for _ in range(100):
                await asyncio.sleep(0)
            is_awake_while_held = sleeping.done()
        await sleeping
        return is_awake_while_held, sleeping.done()

    assert asyncio.run(play()) == (False, True)


def test_a_new_rate_applies_to_current_sleepers() -> None:
    clock = ScaledClock(rate=1e-6)  # at this rate the sleep would last for years

    async def play() -> None:
        sleeping = asyncio.ensure_future(clock.sleep(HOUR_S))
        await asyncio.sleep(0)
        clock.set_rate(1e9)
        await sleeping

    start_s = clock.now_s()
    asyncio.run(play())
    assert clock.now_s() - start_s >= HOUR_S


def test_time_never_runs_backwards_when_the_rate_changes() -> None:
    clock = ScaledClock(rate=1e6)
    seen = []
    for rate in (1.0, 1e6, 1e-3, 50.0):
        seen.append(clock.now_s())
        clock.set_rate(rate)
    assert seen == sorted(seen)


def test_a_stall_at_a_high_rate_does_not_make_hours_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    real_s = 1000.0
    monkeypatch.setattr("broker.clock.time", SimpleNamespace(monotonic=lambda: real_s, time=lambda: 0.0))
    clock = ScaledClock(rate=300.0)
    real_s += 30.0
    assert clock.now_s() == pytest.approx(300.0 * STALL_S_MAX)
    clock.set_rate(1.0)
    real_s += 30.0
    assert clock.now_s() == pytest.approx(300.0 * STALL_S_MAX + 30.0), "at the real rate, all time counts"


def test_a_sleep_at_a_high_rate_observes_the_time_often_enough() -> None:
    clock = ScaledClock(rate=100.0)
    real_s, start_s = time.monotonic(), clock.now_s()
    asyncio.run(clock.sleep(100.0 * 3 * STALL_S_MAX))
    assert clock.now_s() - start_s >= 100.0 * 3 * STALL_S_MAX and time.monotonic() - real_s >= 3 * STALL_S_MAX


def test_an_advanced_clock_wakes_sleepers_that_are_due() -> None:
    clock = ScaledClock(rate=1e-6)

    async def play() -> None:
        sleeping = asyncio.ensure_future(clock.sleep(HOUR_S))
        await asyncio.sleep(0)
        clock.advance(HOUR_S)
        await sleeping

    asyncio.run(play())


def test_a_sleeper_that_is_woken_and_cancelled_at_once_ends() -> None:
    """`asyncio.wait_for` of Python 3.11 loses such a cancellation: the sleeper would go back to sleep."""

    async def play() -> bool:
        clock = ScaledClock()
        sleeper = asyncio.ensure_future(clock.sleep(3600))
        await asyncio.sleep(0)  # it sleeps
        await asyncio.sleep(0)
        clock.set_rate(2.0)  # wakes it
        await asyncio.sleep(0)
        sleeper.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        return sleeper.cancelled()

    assert asyncio.run(play())


@pytest.mark.parametrize("turns", range(5))
def test_task_that_is_cancelled_as_its_wait_ends_does_not_continue(turns: int) -> None:
    async def play() -> bool:
        event = asyncio.Event()

        async def work() -> None:
            await within(event.wait(), 3600)
            await asyncio.sleep(3600)

        working = asyncio.ensure_future(work())
        await asyncio.sleep(0)
        event.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        working.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        return working.cancelled()

    assert asyncio.run(play())


def test_wait_beyond_its_limit_is_a_timeout_and_ends_what_it_waited_for() -> None:
    async def play() -> None:
        never = asyncio.get_running_loop().create_future()
        with pytest.raises(TimeoutError):
            await within(never, 0.001)
        assert never.cancelled()
        assert await within(asyncio.sleep(0, "done"), None) == "done"

    asyncio.run(play())
