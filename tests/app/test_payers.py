"""The payer of each bill: the request that was admitted, else the recorded owner, else this machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from broker.app.payers import NO_PROJECT, UNOWNED, Payer, find_payers
from broker.app.spending import Grouping, read_spending
from broker.state.people import Owned
from broker.state.store import Store
from tests.clouds.beds import make_node
from tests.state.conftest import OpenStore, clock, open_postgres, open_sqlite, open_store, postgres, store
from tests.state.samples import Hands

__all__ = ["OpenStore", "clock", "open_postgres", "open_sqlite", "open_store", "postgres", "store"]


def bill(store: Store, name: str, *, cluster: str, usd_hour: float = 1.0) -> tuple[str, str]:
    node = replace(make_node(name), cluster=cluster, usd_hour=usd_hour, created_s=store.clock.now_s())
    store.bills.record(node)
    return node.cloud, node.id


def commit(store: Store, kind: Owned, *names: str, user: str, project: str) -> None:
    store.commitments.add(user=user, project=project, kind=kind, names=names, usd=1.0, usd_hour=1.0, gpus=1.0)


def test_requests_and_owners_pay_and_the_rest_belongs_to_this_machine(store: Store, clock: Hands) -> None:
    owned, unowned = bill(store, "n1", cluster="dev"), bill(store, "n2", cluster="own")
    store.owners.put(Owned.CLUSTER, "dev", "ada")
    commit(store, Owned.CLUSTER, "shared", user="ben", project="vision")
    clock.time_s += 60
    admitted = bill(store, "n3", cluster="shared", usd_hour=3.0)
    assert find_payers(store, store.bills.list()) == {
        owned: Payer(user="ada", project=NO_PROJECT),
        unowned: Payer(user=UNOWNED, project=NO_PROJECT),
        admitted: Payer(user="ben", project="vision"),
    }
    clock.time_s += 3600
    spent = {by: read_spending(store, by, clock.now_s()) for by in Grouping}
    assert {user: usd for user, (_, usd) in spent[Grouping.USER].rows.items()} == pytest.approx(
        {"ada": 61 / 60, UNOWNED: 61 / 60, "ben": 3.0}
    )
    assert spent[Grouping.PROJECT].rows["vision"] == pytest.approx((1.0, 3.0))
    assert len({round(each.usd, 9) for each in spent.values()}) == 1, "every key sums to the same total"


def test_a_cluster_of_the_same_name_is_paid_by_its_own_request(store: Store, clock: Hands) -> None:
    commit(store, Owned.CLUSTER, "dev", user="ada", project="p")
    first = bill(store, "n1", cluster="dev")
    clock.time_s += 60
    (earlier,) = store.commitments.list()
    store.commitments.end(earlier.id)
    clock.time_s += 60
    commit(store, Owned.CLUSTER, "dev", user="ben", project="p")
    second = bill(store, "n2", cluster="dev")
    payers = find_payers(store, store.bills.list())
    assert (payers[first].user, payers[second].user) == ("ada", "ben")


def test_a_machine_that_starts_when_a_request_ends_is_paid_by_the_next_one(store: Store, clock: Hands) -> None:
    commit(store, Owned.CLUSTER, "dev", user="ada", project="")
    first = bill(store, "n1", cluster="dev")
    clock.time_s += 60
    (earlier,) = store.commitments.list()
    store.commitments.end(earlier.id)
    second = bill(store, "n2", cluster="dev")
    assert find_payers(store, store.bills.list())[second] == Payer(), "no request started it"
    commit(store, Owned.CLUSTER, "dev", user="ben", project="p")
    payers = find_payers(store, store.bills.list())
    assert payers[first] == Payer(user="ada", project=NO_PROJECT), "its token had no project"
    assert payers[second] == Payer(user="ben", project="p")
