"""Limits of users and projects, and what was admitted under them, on every backend."""

from __future__ import annotations

from broker.state.limits import Limit, LimitScope
from broker.state.people import Owned
from broker.state.store import Store
from tests.state.conftest import OpenStore
from tests.state.samples import START_S, Hands


def test_a_limit_is_replaced_by_a_later_one_and_removed_once(open_store: OpenStore) -> None:
    store = open_store()
    for usd_month in (100.0, 50.0):
        store.limits.put(Limit(scope=LimitScope.USER, name="ada", usd_month=usd_month, gpus=None))
    store.limits.put(Limit(scope=LimitScope.PROJECT, name="ada", usd_month=None, gpus=8.0))
    assert [(each.scope, each.usd_month, each.gpus) for each in open_store().limits.list()] == [
        (LimitScope.PROJECT, None, 8.0),
        (LimitScope.USER, 50.0, None),
    ]
    assert store.limits.delete(LimitScope.USER, "ada") is True
    assert store.limits.delete(LimitScope.USER, "ada") is False
    assert [each.scope for each in store.limits.list()] == [LimitScope.PROJECT]


def commit(store: Store, *names: str) -> int:
    return store.commitments.add(user="ada", project="p", kind=Owned.JOB, names=names, usd=5.0, usd_hour=2.0, gpus=8.0)


def test_a_commitment_is_pending_until_its_request_has_ended_and_is_forgotten_if_it_started_nothing(
    store: Store,
) -> None:
    bound, empty = commit(store), commit(store)
    assert [each.is_pending for each in store.commitments.list()] == [True, True]
    store.commitments.bind(bound, ["7"])
    for each in (bound, empty):
        store.commitments.settle(each)
    (left,) = store.commitments.list()
    assert (left.id, left.names, left.is_pending, left.usd, left.gpus) == (bound, ("7",), False, 5.0, 8.0)


def test_a_commitment_ends_once(store: Store, clock: Hands) -> None:
    first = commit(store, "7")
    clock.time_s += 60.0
    store.commitments.end(first)
    clock.time_s += 60.0
    store.commitments.end(first)
    assert [each.ended_s for each in store.commitments.list()] == [START_S + 60.0]
