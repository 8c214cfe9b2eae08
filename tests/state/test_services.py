"""Services on every backend: their versions, the numbers of their replicas, and a story of bounded length."""

from __future__ import annotations

import pytest

from broker.errors import UsageError
from broker.state import services
from broker.state.store import Store
from broker.types import Secret, ServiceEventKind, Task, UpdateMode
from tests.state.conftest import OpenStore

PLACE = {"host": "127.0.0.1", "port": 30000, "wanted": 2}


def test_a_service_is_returned_as_it_was_added_and_its_name_is_used_once(open_store: OpenStore) -> None:
    store = open_store()
    made = store.services.add("chat", Task(run="serve"), **PLACE)  # type: ignore[arg-type]
    assert (made.name, made.version, made.port, made.wanted) == ("chat", 1, 30000, 2)
    assert open_store().services.get("chat") == made == store.services.list()[0]
    with pytest.raises(UsageError, match="`chat` already exists"):
        store.services.add("chat", Task(), **PLACE)  # type: ignore[arg-type]
    assert [event.kind for event in store.services.list_events("chat")] == [ServiceEventKind.CREATED]


def test_versions_are_numbered_and_keep_their_tasks_and_secrets(store: Store) -> None:
    store.services.add("chat", Task(run="one"), **PLACE)  # type: ignore[arg-type]
    second = Task(run="two", secrets={"TOKEN": Secret(value="hunter2")})
    assert store.services.add_version("chat", second, mode=UpdateMode.BLUE_GREEN) == 2
    service = store.services.get("chat")
    assert service is not None and (service.version, service.mode) == (2, UpdateMode.BLUE_GREEN)
    assert store.services.get_task("chat", 1).run == "one"
    assert store.services.get_task("chat", 2).secrets["TOKEN"].value == "hunter2"
    with pytest.raises(UsageError, match="no version 3"):
        store.services.get_task("chat", 3)


def test_services_are_claimed_by_numbers_of_their_own_and_leave_no_secret(store: Store) -> None:
    for name in ("chat", "embed", "rank"):
        store.services.add(name, Task(secrets={"TOKEN": Secret(value="hunter2")}), **PLACE)  # type: ignore[arg-type]
    assert store.services.list_claims() == {-1: "chat", -2: "embed", -3: "rank"}
    folder = store.path.parent / "service-secrets"
    kept = {path for path in folder.rglob("*") if path.is_file()}
    store.services.delete("embed")
    assert store.services.list_claims() == {-1: "chat", -3: "rank"}
    left = {path for path in folder.rglob("*") if path.is_file()}
    assert len(left) == len(kept) * 2 // 3
    assert store.services.get_task("rank", 1).secrets["TOKEN"].value == "hunter2"


def test_update_clears_the_failure_of_the_version_before(store: Store) -> None:
    store.services.add("chat", Task(), **PLACE)  # type: ignore[arg-type]
    store.services.set_failure("chat", "no replica became ready")
    assert store.services.list_failures() == {"chat": "no replica became ready"}
    store.services.add_version("chat", Task(run="two"))
    assert store.services.list_failures() == {}


def test_the_newest_version_that_was_ready_is_found(store: Store) -> None:
    store.services.add("chat", Task(), **PLACE)  # type: ignore[arg-type]
    store.services.add_version("chat", Task())
    assert store.services.find_ready_version("chat") is None
    store.services.mark_ready("chat", 1)
    assert store.services.find_ready_version("chat") == 1
    store.services.mark_ready("chat", 2)
    assert store.services.find_ready_version("chat") == 2


def test_numbers_of_replicas_are_never_given_twice(store: Store) -> None:
    store.services.add("chat", Task(), **PLACE)  # type: ignore[arg-type]
    assert [store.services.draw_number("chat") for _ in range(3)] == [1, 2, 3]


def test_events_stay_in_order_and_the_oldest_are_deleted_beyond_the_limit(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "EVENTS_MAX", 3)
    for name in ("chat", "other"):
        store.services.add(name, Task(), **PLACE)  # type: ignore[arg-type]
    for number in range(1, 5):
        store.services.add_event("chat", ServiceEventKind.CREATED, replica=number, detail=f"event {number}")
    assert [event.detail for event in store.services.list_events("chat")] == ["event 2", "event 3", "event 4"]
    assert len(store.services.list_events("other")) == 1


def test_down_is_requested_once(store: Store) -> None:
    store.services.add("chat", Task(), **PLACE)  # type: ignore[arg-type]
    for _ in range(2):
        store.services.request_down("chat")
    service = store.services.get("chat")
    assert service is not None and service.down_requested
    kinds = [event.kind for event in store.services.list_events("chat")]
    assert kinds == [ServiceEventKind.CREATED, ServiceEventKind.DOWN_REQUESTED]
