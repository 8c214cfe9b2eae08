"""Measure the network between the nodes of a gang, in the Python of the task: `python3 allreduce.py FOLDER`.

With torch, run an all-reduce of all GPUs (NCCL), or of all nodes (gloo) where torch has no GPU. If it is slow, each
pair of neighbours repeats it alone, which distinguishes a slow node from its neighbours. Without torch, each pair sends
bytes over one TCP connection. Read `allreduce.order.json` and write `allreduce.json`: `backend`, `gang_gbs`, `links` by
the neighbour's rank, in GB/s one way; otherwise `unmeasured`, the reason.

The pairs are the neighbours on a ring, in rounds in which each node takes part once:

    4 nodes    0-1 2-3, then 1-2 3-0            3 nodes    0-1, then 1-2, then 2-0
"""

from __future__ import annotations

import datetime
import hmac
import importlib
import importlib.util
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Found = dict[str, Any]  # of the result; not evaluated on the nodes, which may have Python 3.8

ORDER, RESULT = "allreduce.order.json", "allreduce.json"
TORCH_SHARE = 0.65  # of the time, for torch; the rest is for TCP if torch measured nothing
SHARE_FAST = 0.5  # of the expected figure: the pairs are not measured
EXPECTED_S = 0.03  # one tensor's way over the network at the expected speed
BYTES_MIN, BYTES_MAX = 4 << 20, 1 << 30
PROBE_SHARE = 1 / 16  # of the tensor, sent first: a slow network is measured by it alone
SLOW_S = 2.0
ROUNDS = 2  # the better one counts
WINDOW_S = 1.0  # of sending over TCP
CHUNK_BYTES = 1 << 18
HELLO = struct.Struct("!32sI")  # the gang's token, the rank
CONNECT_S = 0.1  # between two tries


def main(folder: Path) -> None:
    """Write the result; the kernel ends this process at the limit, whatever it waits for."""
    order = json.loads((folder / ORDER).read_text(encoding="utf-8"))
    end_s = time.monotonic() + order["limit_s"]
    signal.alarm(int(order["limit_s"]) + 1)
    found: Found = {}
    if importlib.util.find_spec("torch"):
        found = run_torch(folder, order, time.monotonic() + order["limit_s"] * TORCH_SHARE)
    if not found.get("links") and found.get("gang_gbs") is None:
        found = measure_tcp(order, end_s, lambda links: write(folder / RESULT, {"backend": "tcp", "links": links}))
    write(folder / RESULT, found)


def list_rounds(size: int) -> list[list[tuple[int, int]]]:
    """Return the neighbours on a ring of nodes, in rounds in which no node occurs twice."""
    if size == 2:
        return [[(0, 1)]]
    ring = [(rank, (rank + 1) % size) for rank in range(size)]
    rounds = [ring[0 : size - size % 2 : 2], ring[1:size:2]]
    return [*rounds, [ring[-1]]] if size % 2 else rounds


def list_own(order: dict[str, Any]) -> list[int]:
    """Return this node's neighbours, in the order of the rounds."""
    rank = int(order["rank"])
    pairs = [pair for pairs in list_rounds(len(order["addresses"])) for pair in pairs if rank in pair]
    return [a + b - rank for a, b in pairs]


# With torch: a process for each GPU.


def run_torch(folder: Path, order: dict[str, Any], end_s: float) -> Found:
    """Start a process for each GPU of this node, and return what the first one found until then."""
    result = folder / (RESULT + ".torch")
    argv = [sys.executable, str(Path(__file__).resolve()), str(folder)]
    children = [subprocess.Popen([*argv, str(index)]) for index in range(max(1, int(order["gpus"])))]
    for child in children:
        try:
            child.wait(max(0.0, end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
    for child in children:
        child.kill()  # without effect on one that has ended; not awaited for long: a call into a driver may not end
    try:
        found: Found = json.loads(result.read_text(encoding="utf-8"))
        return found
    except (OSError, ValueError):
        return {}


def join_torch(folder: Path, index: int) -> None:
    """Take part as the process of one GPU. Any error ends this process, and the parent measures in another way."""
    order = json.loads((folder / ORDER).read_text(encoding="utf-8"))
    left_s = order["limit_s"] * TORCH_SHARE
    torch, dist = importlib.import_module("torch"), importlib.import_module("torch.distributed")
    has_gpus = torch.cuda.is_available() and order["gpus"] >= 1
    if not has_gpus and index:
        return
    size, per_node = len(order["addresses"]), int(order["gpus"]) if has_gpus else 1
    head = str(order["addresses"][0])
    host = f"[{head}]" if ":" in head else head
    dist.init_process_group(
        "nccl" if has_gpus else "gloo",
        init_method=f"tcp://{host}:{order['ports'][0]}",
        rank=order["rank"] * per_node + index,
        world_size=size * per_node,
        timeout=datetime.timedelta(seconds=left_s),
    )
    if has_gpus:
        torch.cuda.set_device(index)
    gang = Allreduce(torch, dist, f"cuda:{index}" if has_gpus else "cpu")
    expected_gbs = order["gbs"] if has_gpus else min(order["gbs"], order["tcp_gbs"])
    found: Found = {"backend": "nccl" if has_gpus else "gloo", "links": {}}
    found["gang_gbs"] = gang.measure(None, size * per_node, expected_gbs)
    keep(folder, index, found)
    if size == 2 or found["gang_gbs"] >= expected_gbs * SHARE_FAST:
        leave(dist)
    pairs = [pair for pairs in list_rounds(size) for pair in pairs]
    ranks = {pair: [node * per_node + each for node in pair for each in range(per_node)] for pair in pairs}
    groups = {pair: dist.new_group(ranks[pair]) for pair in pairs}  # a call of all ranks
    for a, b in pairs:
        if order["rank"] in (a, b):
            found["links"][str(a + b - order["rank"])] = gang.measure(groups[a, b], 2 * per_node, expected_gbs)
            keep(folder, index, found)
    leave(dist)


def keep(folder: Path, index: int, found: Found) -> None:
    """Write what was found so far, on the first process of the node."""
    if index == 0:
        write(folder / (RESULT + ".torch"), found)


def leave(dist: Any) -> None:
    """End at once; the first rank ends last, because it holds the store that the others need."""
    dist.barrier()
    os._exit(0)


class Allreduce:
    """Times all-reduces on one device. All ranks of a group get the same figures, so that they decide alike."""

    def __init__(self, torch: Any, dist: Any, device: str) -> None:
        self._torch, self._dist, self._device = torch, dist, device

    def measure(self, group: Any, size: int, expected_gbs: float) -> float:
        """Return the GB/s that each rank sent to its neighbour on a ring: 2 (n - 1) / n of the tensor."""
        whole = min(BYTES_MAX, max(BYTES_MIN, int(expected_gbs * 1e9 * EXPECTED_S)))
        count = int(whole * PROBE_SHARE) // 4
        took_s = self._time(group, count)
        if took_s / PROBE_SHARE <= SLOW_S:
            count = whole // 4
            took_s = min(self._time(group, count) for _ in range(ROUNDS))
        return float(count * 4 * 2 * (size - 1) / size / took_s / 1e9)

    def _time(self, group: Any, count: int) -> float:
        tensor = self._torch.ones(count, dtype=self._torch.float32, device=self._device)
        self._reduce(group, self._torch.ones(1, device=self._device))  # connects, and lets all begin together
        begin_s = time.perf_counter()
        self._reduce(group, tensor)
        took = self._torch.tensor([time.perf_counter() - begin_s], device=self._device)
        self._dist.all_reduce(took, op=self._dist.ReduceOp.MAX, group=group)
        return max(1e-9, float(took.item()))

    def _reduce(self, group: Any, tensor: Any) -> None:
        self._dist.all_reduce(tensor, group=group)
        if self._device != "cpu":
            self._torch.cuda.synchronize()


# Without torch: one TCP connection for each pair.


def measure_tcp(order: dict[str, Any], end_s: float, on_link: Any) -> Found:
    """Exchange bytes with each neighbour, and return what was received; an absent one only costs its share of time."""
    neighbours = list_own(order)
    try:
        others = Neighbours(order, neighbours, end_s)
    except OSError as error:
        return {"backend": "tcp", "unmeasured": f"cannot listen: {error.strerror}"}
    links: dict[str, float] = {}
    absent = []
    try:
        for number, peer in enumerate(neighbours):
            now_s = time.monotonic()
            give_up_s = now_s + (end_s - now_s) / (len(neighbours) - number)
            try:
                connection = others.connect(peer, give_up_s)
                links[str(peer)] = exchange(connection, give_up_s)
                on_link(links)
            except OSError:
                absent.append(peer)
    finally:
        others.close()
    if absent:
        return {"backend": "tcp", "links": links, "unmeasured": f"no connection to rank {absent[0]}"}
    return {"backend": "tcp", "links": links}


class Neighbours:
    """Connect to neighbours of a lower rank, and accept those of a higher one, which prove that they know the token."""

    def __init__(self, order: dict[str, Any], neighbours: list[int], end_s: float) -> None:
        self._order, self._end_s = order, end_s
        self._rank = int(order["rank"])
        self._token = str(order["token"]).encode()
        self._arrived: dict[int, socket.socket] = {}
        self._changed = threading.Condition()
        family = socket.AF_INET6 if ":" in str(order["addresses"][self._rank]) else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if any(peer > self._rank for peer in neighbours):
            self._bind(int(order["ports"][self._rank]))
            self._listener.listen(8)
            threading.Thread(target=self._accept, daemon=True).start()

    def _bind(self, port: int) -> None:
        """Bind the port, which torch's store may still hold for a moment. Raises OSError if it stays taken."""
        while True:
            try:
                return self._listener.bind(("", port))
            except OSError:
                if time.monotonic() + CONNECT_S >= self._end_s:
                    raise
                time.sleep(CONNECT_S)

    def connect(self, peer: int, give_up_s: float) -> socket.socket:
        """Return a connection on which both ends begin now. Raises OSError if the peer does not connect in time."""
        if peer > self._rank:
            with self._changed:
                self._changed.wait_for(lambda: peer in self._arrived, max(0.0, give_up_s - time.monotonic()))
                if peer not in self._arrived:
                    raise ConnectionError("absent")
                connection = self._arrived.pop(peer)
            connection.sendall(b"!")
            return connection
        while True:
            try:
                return self._call(peer, give_up_s)
            except OSError:
                if time.monotonic() + CONNECT_S >= give_up_s:
                    raise
                time.sleep(CONNECT_S)

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()

    def _call(self, peer: int, give_up_s: float) -> socket.socket:
        address = (str(self._order["addresses"][peer]), int(self._order["ports"][peer]))
        connection = socket.create_connection(address, timeout=max(CONNECT_S, give_up_s - time.monotonic()))
        try:
            connection.sendall(HELLO.pack(self._token, self._rank))
            if connection.recv(1) != b"!":
                raise ConnectionError("refused")
        except OSError:
            connection.close()
            raise
        return connection

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()[0]
            except OSError:
                return
            threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(max(CONNECT_S, self._end_s - time.monotonic()))
            token, rank = HELLO.unpack(connection.recv(HELLO.size, socket.MSG_WAITALL))
            if not hmac.compare_digest(token, self._token):
                raise ConnectionError("a stranger")
        except (OSError, struct.error):
            connection.close()
            return
        with self._changed:
            self._arrived[rank] = connection
            self._changed.notify_all()


def exchange(connection: socket.socket, give_up_s: float) -> float:
    """Send for a while and receive at the same time; return the GB/s received. Raises OSError if nothing came."""
    begin_s = time.monotonic()
    end_s = min(give_up_s, begin_s + 3 * WINDOW_S)
    connection.settimeout(0.1)
    sender = threading.Thread(target=send, args=(connection, min(end_s, begin_s + WINDOW_S)), daemon=True)
    sender.start()
    buffer, count, last_s = bytearray(CHUNK_BYTES), 0, begin_s
    while time.monotonic() < end_s:
        try:
            size = connection.recv_into(buffer)
        except socket.timeout:
            continue
        if not size:
            break
        count, last_s = count + size, time.monotonic()
    sender.join(max(0.0, end_s - time.monotonic()))
    connection.close()
    if not count:
        raise ConnectionError("nothing received")
    return count / max(last_s - begin_s, 1e-6) / 1e9


def send(connection: socket.socket, end_s: float) -> None:
    """Send zeros until then, and end the stream."""
    data = bytes(CHUNK_BYTES)
    try:
        while time.monotonic() < end_s:
            try:
                connection.send(data)
            except socket.timeout:
                pass
        connection.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # the peer has ended


def write(path: Path, value: Found) -> None:
    """Replace the result at once: the process may end at any moment."""
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(value), encoding="utf-8")
    new.replace(path)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        join_torch(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        main(Path(sys.argv[1]))
