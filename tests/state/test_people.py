"""Tokens, owners and the audit of a server, on every backend."""

from __future__ import annotations

from broker.state.people import Owned, Role
from broker.state.store import Store
from tests.state.conftest import OpenStore
from tests.state.samples import Hands


def test_token_is_valid_until_it_expires_or_is_revoked(store: Store, clock: Hands) -> None:
    brief = store.tokens.add(digest="a", user="ada", role=Role.USER, expires_s=clock.now_s() + 10)
    lasting = store.tokens.add(digest="b", user="ben", role=Role.ADMIN, expires_s=None)
    found = store.tokens.find("a")
    assert found is not None and (found.id, found.user, found.role) == (brief, "ada", Role.USER)
    assert store.tokens.find("c") is None
    clock.time_s += 10
    assert store.tokens.find("a") is None and store.tokens.find("b") is not None
    assert store.tokens.revoke(lasting) and not store.tokens.revoke(lasting)
    assert store.tokens.find("b") is None
    assert [each.user for each in store.tokens.list()] == ["ada", "ben"]


def test_owners_and_audit_are_kept(open_store: OpenStore) -> None:
    store = open_store()
    store.owners.put(Owned.CLUSTER, "dev", "ada")
    store.owners.put(Owned.CLUSTER, "dev", "ben")
    for verb in ("launch", "terminate_clusters"):
        store.audit.add(user="ben", verb=verb, target="cluster dev", outcome="done")
    again = open_store()
    assert again.owners.get(Owned.CLUSTER, "dev") == "ben" and again.owners.get(Owned.JOB, "dev") is None
    assert [each.verb for each in again.audit.list()] == ["launch", "terminate_clusters"]
    assert [each.verb for each in again.audit.list(newest=1)] == ["terminate_clusters"]


def test_the_audit_is_filtered_by_user_verb_and_outcome(store: Store, clock: Hands) -> None:
    for user, verb, outcome in (("ada", "launch", "done"), ("ben", "launch", "DeniedError"), ("ada", "exec", "done")):
        clock.time_s += 1
        store.audit.add(user=user, verb=verb, target="", outcome=outcome)
    assert [each.verb for each in store.audit.list(user="ada")] == ["launch", "exec"]
    assert [each.user for each in store.audit.list(verb="launch", outcome="DeniedError")] == ["ben"]
    assert [each.verb for each in store.audit.list(user="ada", newest=1)] == ["exec"]
    assert store.audit.list(user="' OR 1 = 1 --") == []
    assert store.audit.list_newest_s() == {"ada": clock.time_s, "ben": clock.time_s - 1}
    store.owners.put(Owned.JOB, "7", "ada")
    assert store.owners.list() == {(Owned.JOB, "7"): "ada"}
