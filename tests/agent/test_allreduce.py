"""The nodes of a gang measure the network between them: real sockets of this machine, with a proxy as a slow link."""

from __future__ import annotations

import importlib.util
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from broker.agent import FOLDER
from broker.serve.replicas import draw_free_port

PROGRAM = FOLDER / "agent_allreduce.py"
TOKEN = "0" * 32
FAST_GBS = 0.02  # far below what this machine does, even if it is busy
SLOW_BYTES = 4096  # each 0.02 s through the proxy: 1 % of the above
TRIES = 20  # far more than required: a machine that stalls for seconds is measured as slow, or not at all
LOOPBACK = "lo" if sys.platform.startswith("linux") else "lo0"
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")


def import_program() -> Any:
    spec = importlib.util.spec_from_file_location("allreduce", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


allreduce = import_program()


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_each_pair_of_neighbours_meets_once_and_no_node_is_in_two_pairs_of_a_round(size: int) -> None:
    rounds = allreduce.list_rounds(size)
    pairs = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert len(set(pairs)) == len(pairs) == (1 if size == 2 else size)
    assert all({rank, (rank + 1) % size} in pairs for rank in range(size))
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(set(ranks)) == len(ranks)


class Nodes:
    """The programs of some nodes, each in a folder of its own, as the agent starts them."""

    def __init__(self, folder: Path, *, flags: tuple[str, ...] = ("-I", "-S"), limit_s: float = 60.0) -> None:
        self._folder, self._flags, self._limit_s = folder, flags, limit_s

    def run(self, ports: list[list[int]], *, ranks: list[int] | None = None, **fields: Any) -> list[dict[str, Any]]:
        """Run the program of each rank with its view of the ports, and return the results."""
        ranks = list(range(len(ports))) if ranks is None else ranks
        processes = []
        for rank in ranks:
            folder = self._folder / f"{rank}"
            folder.mkdir(parents=True)
            shutil.copy(PROGRAM, folder / "allreduce.py")
            order = {
                "addresses": ["127.0.0.1"] * len(ports), "ports": ports[rank], "token": TOKEN, "gpus": 1, "rank": rank,
                "gbs": FAST_GBS, "tcp_gbs": 0.625, "limit_s": self._limit_s, **fields,
            }  # fmt: skip
            (folder / "allreduce.order.json").write_text(json.dumps(order))
            argv = [sys.executable, *self._flags, str(folder / "allreduce.py"), str(folder)]
            processes.append(subprocess.Popen(argv, env={"GLOO_SOCKET_IFNAME": LOOPBACK, "OMP_NUM_THREADS": "1"}))
        for process in processes:
            process.wait(300)
        return [json.loads((self._folder / f"{rank}" / "allreduce.json").read_text()) for rank in ranks]


def find_ports(count: int) -> list[int]:
    ports = list[int]()
    while len(ports) < count:
        ports += {draw_free_port()} - {*ports}
    return ports


@contextmanager
def open_slow_link(target: int) -> Iterator[int]:
    """Pass connections on to a port of this machine, slowly in both directions."""
    listener = socket.create_server(("127.0.0.1", 0))

    def copy(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(SLOW_BYTES):
                time.sleep(0.02)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def accept() -> None:
        while True:
            try:
                near = listener.accept()[0]
                far = socket.create_connection(("127.0.0.1", target))
            except ConnectionRefusedError:
                near.close()
                continue
            except OSError:
                return
            for pair in ((near, far), (far, near)):
                threading.Thread(target=copy, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def test_pairs_are_measured_over_tcp_without_torch(tmp_path: Path) -> None:
    for attempt in range(TRIES):
        ports = find_ports(3)
        results = Nodes(tmp_path / f"{attempt}").run([ports] * 3)
        if all(len(each["links"]) == 2 and min(each["links"].values()) > FAST_GBS for each in results):
            break
    assert [sorted(each["links"]) for each in results] == [["1", "2"], ["0", "2"], ["0", "1"]]
    assert all(each["backend"] == "tcp" and "unmeasured" not in each for each in results)
    assert all(gbs > FAST_GBS for each in results for gbs in each["links"].values())


def test_slow_link_is_measured_as_slow_at_both_ends(tmp_path: Path) -> None:
    for attempt in range(TRIES):
        ports = find_ports(3)
        with open_slow_link(ports[0]) as slow:
            results = Nodes(tmp_path / f"{attempt}").run([ports, ports, [slow, *ports[1:]]])
        links = {(rank, int(peer)): gbs for rank, each in enumerate(results) for peer, gbs in each["links"].items()}
        if len(links) == 6 and all(gbs > FAST_GBS for pair, gbs in links.items() if set(pair) != {0, 2}):
            break
    assert min(links[2, 0], links[0, 2]) < FAST_GBS / 4
    assert all(gbs > FAST_GBS for pair, gbs in links.items() if set(pair) != {0, 2})


class SkippingClock:
    """Real time, with jumps on request that waits notice soon."""

    def __init__(self) -> None:
        self.skipped_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.skipped_s

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def make_condition(self) -> threading.Condition:
        clock = self

        class Condition(threading.Condition):
            def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
                end_s = clock.monotonic() + (timeout or 0.0)
                while not (found := predicate()) and clock.monotonic() < end_s:
                    self.wait(0.02)
                return found

        return Condition()


@pytest.mark.long
def test_peer_that_never_comes_costs_its_own_pairs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is longer than any stall; the clock skips what is left of a share once all else is measured."""
    clock, limit_s, ports = SkippingClock(), 1200.0, find_ports(4)
    connected, links, results = set[tuple[int, int]](), dict[int, set[str]](), dict[int, Any]()
    begin = allreduce.Neighbours.connect

    def connect(neighbours: Any, peer: int, give_up_s: float) -> socket.socket:
        connected.add((neighbours._rank, peer))
        return begin(neighbours, peer, give_up_s)  # type: ignore[no-any-return]

    monkeypatch.setattr(allreduce, "time", clock)
    threads_with = SimpleNamespace(**{**vars(threading), "Condition": clock.make_condition})
    monkeypatch.setattr(allreduce, "threading", threads_with)
    monkeypatch.setattr(allreduce.Neighbours, "connect", connect)
    end_s = clock.monotonic() + limit_s

    def run(rank: int) -> None:
        order = {"addresses": ["127.0.0.1"] * 4, "ports": ports, "token": TOKEN, "rank": rank}
        results[rank] = allreduce.measure_tcp(order, end_s, lambda found: links.update({rank: set(found)}))

    def wait_until(is_so: Callable[[], bool]) -> None:
        give_up_s = time.monotonic() + 300
        while not is_so():
            assert time.monotonic() < give_up_s, (connected, links)
            time.sleep(0.02)

    threads = [threading.Thread(target=run, args=[rank], daemon=True) for rank in (0, 1, 3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: links == {0: {"1"}, 1: {"0"}} and {(0, 3), (1, 2), (3, 2)} <= connected)
    clock.skipped_s += limit_s / 2  # of rank 3, half is for rank 2 and the rest for rank 0
    wait_until(lambda: links == {0: {"1", "3"}, 1: {"0"}, 3: {"0"}})
    clock.skipped_s += limit_s
    for thread in threads:
        thread.join(300)
    assert [sorted(results[rank]["links"]) for rank in (0, 1, 3)] == [["1", "3"], ["0"], ["0"]]
    assert [results[rank].get("unmeasured") for rank in (0, 1, 3)] == [
        None, "no connection to rank 2", "no connection to rank 2",
    ]  # fmt: skip


def test_stranger_without_the_token_is_not_a_peer(tmp_path: Path) -> None:
    ports = find_ports(2)
    stop = threading.Event()

    def disturb() -> None:
        while not stop.wait(0.01):
            try:
                with socket.create_connection(("127.0.0.1", ports[0]), timeout=60) as stranger:
                    stranger.sendall(b"1" * 32 + (1).to_bytes(4, "big"))
            except OSError:
                pass

    thread = threading.Thread(target=disturb)
    thread.start()
    results = Nodes(tmp_path).run([ports] * 2)
    stop.set()
    thread.join()
    assert [sorted(each["links"]) for each in results] == [["1"], ["0"]]


@pytest.mark.exhaustive
@needs_torch
def test_fast_gang_measures_one_allreduce_with_torch(tmp_path: Path) -> None:
    ports = find_ports(2)
    results = Nodes(tmp_path, flags=()).run([ports] * 2, gbs=1e-4)
    assert all(each["backend"] == "gloo" and each["gang_gbs"] > 1e-4 and not each["links"] for each in results)


@pytest.mark.long
@needs_torch
def test_pairs_of_a_slow_gang_repeat_the_allreduce(tmp_path: Path) -> None:
    ports = find_ports(3)
    results = Nodes(tmp_path, flags=(), limit_s=120.0).run([ports] * 3, gbs=4.0, tcp_gbs=4.0)
    assert all(each["backend"] == "gloo" for each in results)
    assert [sorted(each["links"]) for each in results] == [["1", "2"], ["0", "2"], ["0", "1"]]


@needs_torch
@pytest.mark.long  # torch's share of the limit passes
def test_node_without_torch_is_measured_over_tcp_by_all(tmp_path: Path) -> None:
    """The others wait for it at most for torch's share of the time."""
    ports = find_ports(2)
    with_torch, without = Nodes(tmp_path, flags=(), limit_s=60.0), Nodes(tmp_path, limit_s=60.0)
    found: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: found.extend(with_torch.run([ports] * 2, ranks=[0])))
    thread.start()
    found += without.run([ports] * 2, ranks=[1])
    thread.join()
    assert sorted(peer for each in found for peer in each["links"]) == ["0", "1"]
    assert {each["backend"] for each in found} == {"tcp"}
