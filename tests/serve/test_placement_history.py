"""What a service has met is kept for later choices: cold starts of replicas that are gone, and the error budget."""

from __future__ import annotations

from pathlib import Path

from broker.clock import SystemClock
from broker.serve.placement_history import STARTS_MAX, HistoryKeeper, PlacementHistory
from broker.serve.reconciling import ReplicaView, Slot
from broker.state.store import Store
from broker.types import Task

A, B = (Slot(is_spot=True, region="r", zone=zone) for zone in "ab")


def make(number: int, took_s: float | None, *, version: int = 1, slot: Slot = A) -> ReplicaView:
    return ReplicaView(number=number, version=version, slot=slot, start_s=took_s)


def measure(*replicas: ReplicaView, version: int = 1) -> float:
    return PlacementHistory().add_starts(replicas).measure_cold_start_s(version)


def test_cold_start_is_the_median_of_what_replicas_took_within_bounds() -> None:
    assert measure() == measure(make(1, None)) == 600
    assert measure(make(1, 100.0), make(2, 300.0), make(3, 9e9), make(4, None)) == 300
    assert measure(make(1, 1.0)) == 60 and measure(make(1, 9e9)) == 3600


def test_cold_start_is_that_of_the_version_once_it_is_known() -> None:
    old = [make(number, 100.0) for number in range(3)]
    assert measure(*old, version=2) == 100
    assert measure(*old, make(4, 900.0, version=2), version=2) == 900


def test_start_counts_for_the_place_in_which_the_replica_was_when_it_became_ready() -> None:
    history = PlacementHistory().add_starts([make(1, 100.0), make(2, 200.0), make(3, None)])
    history = history.add_starts([make(1, 100.0, slot=B), make(3, 900.0, slot=B)])
    assert history.measure_starts_s(1) == {A: 150.0, B: 900.0}


def test_newest_starts_are_kept_when_their_replicas_are_gone() -> None:
    history = PlacementHistory().add_starts([make(number, 100.0 + number) for number in range(30)])
    assert history.add_starts([]) is history.add_starts([make(0, 100.0), make(29, 129.0)]) is history
    assert [each.number for each in history.starts] == list(range(30 - STARTS_MAX, 30))


def test_next_controller_reads_what_the_last_one_wrote_and_a_damaged_row_counts_as_none(tmp_path: Path) -> None:
    store = Store(tmp_path / "state.db", clock=SystemClock())
    service = store.services.add("web", Task(), host="127.0.0.1", port=1, wanted=1)
    keeper = HistoryKeeper(store)
    history = keeper.read(service)
    assert history == PlacementHistory()
    history = history.observe(0.0, is_counted=True, is_short=False).observe(600.0, is_counted=True, is_short=True)
    keeper.save(service, history)
    assert HistoryKeeper(store).read(service) == history and history.budget.short_hours > 0
    soon = history.observe(601.0, is_counted=True, is_short=True)
    keeper.save(service, soon)
    assert HistoryKeeper(store).read(service) == history, "once a minute, as each write costs"
    started = soon.add_starts([make(1, 90.0)])
    keeper.save(service, started)
    assert HistoryKeeper(store).read(service) == started, "a start is written at once"
    store.services.put_placement_history(service, "{")
    assert HistoryKeeper(store).read(service) == PlacementHistory()
    store.services.delete("web")
    assert store.services.get_placement_history(service) == ""
    store.close()
