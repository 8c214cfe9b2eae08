"""Copies of the state during training, on a GPU's streams: a simulation that runs each stream's work late."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from trainers.snapshot import Snapshot


class LateStreams:
    """Two queues, like CUDA's streams: work runs when something waits for it, after all that it depends on."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[Any]] = {"training": deque(), "copies": deque()}
        self._done: set[object] = set()

    def train(self, work: Callable[[], object]) -> None:
        self._queues["training"].append(work)

    def mark_training(self) -> object:
        return self._mark("training")

    def begin_copies(self, event: object) -> None:
        self._queues["copies"].append(lambda: self._run("training", event))

    def copy(self, target: Tensor, source: Tensor) -> None:
        self._queues["copies"].append(lambda: target.copy_(source))

    def mark_copies(self) -> object:
        return self._mark("copies")

    def hold_training(self, event: object) -> None:
        self._queues["training"].append(lambda: self._run("copies", event))

    def finish_copies(self) -> None:
        self._run("copies", self.mark_copies())

    def finish_training(self) -> None:
        self._run("training", self.mark_training())

    def _mark(self, stream: str) -> object:
        event = object()
        self._queues[stream].append(event)
        return event

    def _run(self, stream: str, event: object) -> None:
        while event not in self._done:
            work = self._queues[stream].popleft()
            if callable(work):
                work()
            else:
                self._done.add(work)


def take_in_thread(snapshot: Snapshot, live: dict[str, Any]) -> dict[str, Any]:
    """Take a copy in another thread, as `CheckpointManager` does."""
    result: dict[str, Any] = {}
    thread = threading.Thread(target=lambda: result.update(snapshot.take(live)))
    thread.start()
    thread.join()
    return result


def test_copy_is_of_the_step_taken_though_the_device_is_behind_and_the_host_ahead() -> None:
    """Neither the step before it nor the one after it: the update before is late, the one after early, in host time."""
    streams, weight = LateStreams(), torch.zeros(3)
    snapshot = Snapshot(streams, is_pinned=False)
    for step in (1, 2, 3):
        streams.train(lambda step=step: weight.fill_(step))  # type: ignore[misc]
        snapshot.begin()
        copied: dict[str, Any] = {}
        issued = threading.Event()
        finish = streams.finish_copies

        def wait_for_host(finish: Callable[[], None] = finish, issued: threading.Event = issued) -> None:
            issued.wait()  # the copies run only when the host has given the next update to the device
            finish()

        streams.finish_copies = wait_for_host  # type: ignore[method-assign]
        thread = threading.Thread(target=lambda into=copied: into.update(snapshot.take({"weight": weight, "step": 1})))
        thread.start()
        snapshot.wait_for_copy()
        assert snapshot.is_copied
        streams.train(lambda: weight.fill_(99.0))
        issued.set()
        thread.join()
        streams.finish_copies = finish  # type: ignore[method-assign]
        assert copied["weight"].tolist() == [step] * 3 and copied["step"] == 1
        streams.finish_training()
        assert weight.tolist() == [99.0] * 3 and copied["weight"].tolist() == [step] * 3


def test_the_simulation_detects_a_missing_wait() -> None:
    streams, weight = LateStreams(), torch.ones(3)
    snapshot = Snapshot(streams, is_pinned=False)
    snapshot.begin()
    streams.train(lambda: weight.fill_(99.0))
    streams.finish_training()
    assert take_in_thread(snapshot, {"weight": weight})["weight"].tolist() == [99.0] * 3


def test_buffers_are_allocated_once() -> None:
    snapshot = Snapshot(LateStreams(), is_pinned=False)
    live = {"model": {"weight": torch.ones(2)}, "moments": {"weight": torch.zeros(2)}}
    places = []
    for _ in range(2):
        snapshot.begin()
        state = take_in_thread(snapshot, live)
        snapshot.wait_for_copy()
        places.append([state[key]["weight"].data_ptr() for key in live])
    assert places[0] == places[1] and places[0][0] != places[0][1]


@pytest.mark.parametrize("streams", [None, LateStreams()])
def test_failed_copy_does_not_stop_training(streams: LateStreams | None) -> None:
    class Broken(dict[str, Any]):
        def items(self) -> Any:
            raise MemoryError

    snapshot = Snapshot(streams, is_pinned=False)
    snapshot.begin()
    with pytest.raises(MemoryError):
        snapshot.take(Broken())
    snapshot.wait_for_copy()
    assert snapshot.is_copied
