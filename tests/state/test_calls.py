"""Budgets of failed calls and learned paces, with a row for each cloud, shared by all processes that open the file."""

from __future__ import annotations

from broker.provision.hedge_timer import update_response_time
from broker.state.calls import ResponseTime
from broker.state.store import Store
from tests.state.samples import Hands


def test_failed_calls_take_tokens_and_time_gives_them_back(store: Store, clock: Hands) -> None:
    def wait_s(cloud: str = "x") -> float:
        return store.retries.measure_wait_s(cloud, tokens_max=3.0, refill_s=2.0)

    def fail(cloud: str = "x") -> None:
        store.retries.take(cloud, tokens_max=3.0, refill_s=2.0)

    assert wait_s() == 0.0
    for _ in range(2):
        fail()
    assert wait_s() == 0.0, "a token is left"
    fail()
    assert (wait_s(), wait_s("y")) == (2.0, 0.0), "each cloud has its own"
    fail()
    assert wait_s() == 2.0, "never below zero tokens"
    clock.time_s += 1.0
    assert wait_s() == 1.0
    clock.time_s += 1.0
    assert wait_s() == 0.0
    fail()
    clock.time_s += 1000.0
    for _ in range(3):
        assert wait_s() == 0.0, "no more than the maximum comes back"
        fail()
    assert wait_s() == 2.0
    clock.time_s -= 5.0
    assert wait_s() == 2.0, "a clock that was set back a little gives nothing and takes nothing"
    clock.time_s -= 500.0
    assert wait_s() == 0.0, "a timestamp far in the future delays no call"


def test_paces_are_kept_by_cloud_and_answer(store: Store) -> None:
    store.response_times.update("x", "created", lambda pace: update_response_time(pace, 8.0))
    store.response_times.update("x", "whole", lambda pace: update_response_time(pace, 80.0))
    store.response_times.update("y", "created", lambda pace: update_response_time(pace, 2.0))
    store.response_times.update("x", "created", lambda pace: update_response_time(pace, 16.0))
    assert store.response_times.get("x", "created") == ResponseTime(mean_s=9.0, deviation_s=5.0)
    assert store.response_times.get("x", "whole") == ResponseTime(mean_s=80.0, deviation_s=40.0)
    assert store.response_times.get("y", "created") == ResponseTime(mean_s=2.0, deviation_s=1.0)
    assert store.response_times.get("y", "whole") is None
