"""What a balancer does about its heap: when free memory returns to the system, and what is never collected."""

from __future__ import annotations

import asyncio
import gc
import sys
from asyncio.sslproto import SSLProtocol
from dataclasses import replace
from pathlib import Path

import pytest

from broker.clock import SystemClock
from broker.serve.balancer import run_balancer
from broker.serve.files import Load, Routing, ServiceFolder, read_file, write_file
from broker.serve.memory import CHANGE_MIN, MemoryTrimmer, find_malloc_trim
from broker.serve.replicas import draw_free_port
from broker.types import ReadinessProbe


def count_trims(*in_flight: int) -> list[int]:
    """Return how often memory was trimmed up to each of these observations."""
    trims: list[None] = []
    trimmer = MemoryTrimmer(lambda: trims.append(None))
    counts = []
    for each in in_flight:
        trimmer.observe(each)
        counts.append(len(trims))
    return counts


def test_burst_is_trimmed_once_it_has_settled() -> None:
    assert count_trims(0, 300, 600, 630, 640, 640) == [0, 0, 0, 1, 1, 1]


def test_streams_that_ended_are_trimmed_as_well() -> None:
    assert count_trims(600, 600, 0, 0, 0) == [0, 1, 1, 2, 2]


def test_small_and_steady_loads_are_never_trimmed() -> None:
    assert count_trims(*[0, CHANGE_MIN - 1] * 5) == [0] * 10
    assert count_trims(*[0, 500] * 5) == [0] * 10


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has it")
def test_trim_function_of_the_c_library_can_be_called() -> None:
    trim = find_malloc_trim()
    if trim is not None:  # None with musl
        trim()
    MemoryTrimmer(None).observe(CHANGE_MIN)


def test_serving_balancer_does_not_collect_what_was_there_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SSLProtocol, "max_size", SSLProtocol.max_size)  # the balancer's own setting ends with the test
    folder = ServiceFolder(path=tmp_path)
    routing = Routing(generation=1, host="127.0.0.1", port=draw_free_port(), probe=ReadinessProbe(path="/"))
    write_file(folder.routing, routing)

    old = [object()]  # there before the balancer

    async def run() -> bool:
        running = asyncio.ensure_future(run_balancer(folder, clock=SystemClock()))
        while read_file(folder.load, Load) is None:
            await asyncio.sleep(0.01)
        is_collected = any(each is old for each in gc.get_objects())
        write_file(folder.routing, replace(routing, generation=2, is_stopped=True))
        await running
        return is_collected

    assert not asyncio.run(run())
