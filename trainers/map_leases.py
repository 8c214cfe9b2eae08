"""Share the shards of a map among workers, which coordinate only by conditional writes in one place.

    part-00012.jsonl              the result of shard 12; created only if it does not exist
    _map/plan.json                the shards, written once by `broker map`
    _map/leases/00012/0002        the second lease of shard 12; empty: released
    _map/items/00012.500          shard 12 has 500 results
    _map/failed/00012/...         the program failed on shard 12
    _map/clock/...                written to read the clock of the place

A worker takes a shard by creating the shard's next lease, and renews the lease by writing it again. A lease that has
not been written for `lease_s` seconds has expired. All times come from the clock of the place, so no two clocks are
compared. Creating the part commits the result, so a worker that has lost its lease can at worst repeat work; it cannot
add or replace a result.
"""

from __future__ import annotations

import json
import random
import re
import uuid
from dataclasses import dataclass, field

from trainers.map_places import Entry, Place

PLAN = "_map/plan.json"
LEASES, ITEMS, FAILED, CLOCK = "_map/leases", "_map/items", "_map/failed", "_map/clock"
PART = re.compile(r"part-(\d+)\.jsonl")
TRIES = 3  # failures of the program after which a shard is skipped
# Losses of a shard's holder that count as one failure: most are preemptions, but a node may run out of memory.
LOSSES = 3


@dataclass(frozen=True)
class Shard:
    """The lines of a file that begin at or after byte `start`, and before byte `end`."""

    key: str
    start: int
    end: int
    size_bytes: int  # size of the file
    mark: str = ""  # of the file's content when the map began, as `Place.read_range` compares it


@dataclass(frozen=True)
class MapPlan:
    """The plan of a map, for its workers. A lease is valid for `lease_s` without renewal."""

    input: str
    lease_s: float
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class Lease:
    """A lease of shard `number`; each new lease of a shard has a higher `epoch`."""

    number: int
    epoch: int
    content: bytes

    @property
    def key(self) -> str:
        """Key of the lease's object: its shard and epoch."""
        return name_lease(self.number, self.epoch)


def name_part(number: int) -> str:
    """Return the key of the results of a shard."""
    return f"part-{number:05d}.jsonl"


def name_lease(number: int, epoch: int) -> str:
    """Return the key of one lease of a shard."""
    return f"{LEASES}/{number:05d}/{epoch:04d}"


def commit_part(place: Place, number: int, content: bytes, *, items: int) -> bool:
    """Write the results of a shard. Return False without changing anything if the shard already has some."""
    is_first = place.create(name_part(number), content)
    if is_first:
        place.create(f"{ITEMS}/{number:05d}.{items}", b"")
    return is_first


def read_plan(place: Place) -> MapPlan:
    """Read the plan that `broker map` wrote. Raises FileNotFoundError if there is none."""
    content = place.read(PLAN)
    if content is None:
        raise FileNotFoundError(f"no {PLAN} in the output folder")
    plan = json.loads(content)
    marks = plan.get("marks") or [""] * len(plan["files"])
    shards = tuple(
        Shard(plan["files"][file], start, end, plan["sizes"][file], marks[file]) for file, start, end in plan["shards"]
    )
    return MapPlan(plan["input"], float(plan["lease_s"]), shards)


@dataclass
class View:
    """The state of all shards at one moment."""

    done: set[int] = field(default_factory=set)
    free: list[tuple[int, int]] = field(default_factory=list)  # shard, and the epoch of its next lease


class Leases:
    """The leases of one worker. `worker` is the same in every attempt of its job; `attempt` increases."""

    def __init__(
        self, place: Place, plan: MapPlan, *, worker: str, attempt: int = 1, draw: random.Random | None = None
    ) -> None:
        self._place, self._plan = place, plan
        self._worker, self._attempt = worker, attempt
        self._draw = draw or random.Random(f"{worker} {attempt}")
        self._former: dict[str, bool] = {}  # lease -> whether an earlier attempt of this worker held it
        self.view = View()

    def acquire(self) -> Lease | None:
        """Take a shard at random; return None if all remaining shards are held by others.

        A lost holder is replaced by its own job, so a worker that finds no free shard should exit rather than wait and
        cost money. Leases that an earlier attempt of this worker held are reclaimed.
        """
        if not self.view.free:
            self.refresh()
        for _ in range(10 * len(self._plan.shards) + 10):
            if not self.view.free:
                return None
            lease = self._take(*self._pop())
            if lease is not None and not self._is_given_up(lease):
                return lease
            self.refresh()  # another worker was faster, or the shard is given up: the view is outdated
        return None

    def refresh(self) -> None:
        """Read the state of all shards."""
        clock = f"{CLOCK}/{self._worker.replace('/', '-')}"
        self._place.write(clock, b"")
        now_s = max((each.modified_s for each in self._place.list_entries(CLOCK)), default=0.0)
        # List leases before parts: if a lease is gone because its shard was committed, the later list has the part.
        newest: dict[int, Entry] = {}
        for entry in sorted(self._place.list_entries(LEASES)):
            newest[int(entry.key.split("/")[-2])] = entry
        failures: dict[int, int] = {}
        for entry in self._place.list_entries(FAILED):
            number = int(entry.key.split("/")[-2])
            failures[number] = failures.get(number, 0) + 1
        done = {int(found[1]) for name in self._place.list_files() if (found := PART.fullmatch(name))}
        free = []
        for number in range(len(self._plan.shards)):
            if number in done or failures.get(number, 0) >= TRIES:
                continue
            lease = newest.get(number)
            if lease is None or self._is_free(lease, now_s):
                free.append((number, 1 if lease is None else int(lease.key.rpartition("/")[2]) + 1))
        self.view = View(done, free)

    def _is_free(self, lease: Entry, now_s: float) -> bool:
        if lease.size_bytes == 0 or now_s - lease.modified_s > self._plan.lease_s:
            return True
        if lease.key not in self._former:
            holder = json.loads(self._place.read(lease.key) or b"{}")
            self._former[lease.key] = holder.get("worker") == self._worker and holder["attempt"] < self._attempt
        return self._former[lease.key]

    def _pop(self) -> tuple[int, int]:
        free = self.view.free
        index = self._draw.randrange(len(free))
        free[index], free[-1] = free[-1], free[index]
        return free.pop()

    def _take(self, number: int, epoch: int) -> Lease | None:
        content = {"worker": self._worker, "attempt": self._attempt, "token": uuid.uuid4().hex}
        lease = Lease(number, epoch, json.dumps(content).encode())
        # If the library retried the call, it may find the lease that its own first try created.
        if not self._place.create(lease.key, lease.content) and self._place.read(lease.key) != lease.content:
            return None
        if self._is_done(number):  # committed since the view was read
            self._place.delete(lease.key)
            return None
        return lease

    def _is_given_up(self, lease: Lease) -> bool:
        """Return whether the shard has lost its holder too often, and release it then.

        A holder that was lost has left its lease behind: neither released nor committed.
        """
        if lease.epoch == 1:
            return False
        earlier = sorted(
            each for each in self._place.list_entries(f"{LEASES}/{lease.number:05d}") if each.key < lease.key
        )
        lost = sum(each.size_bytes > 0 for each in earlier)
        if not lost or lost % LOSSES or not earlier[-1].size_bytes:  # the last one is counted once, by its successor
            return False
        self._report(lease, f"the workers that had this shard were lost {lost} times (out of memory?)")
        if len(self._place.list_entries(f"{FAILED}/{lease.number:05d}")) < TRIES:
            return False
        self.release(lease)
        return True

    def renew(self, lease: Lease) -> bool:
        """Renew a lease; return False if another worker took it over or finished the shard."""
        entries = self._place.list_entries(f"{LEASES}/{lease.number:05d}")
        if any(entry.key > lease.key for entry in entries) or self._is_done(lease.number):
            return False
        self._place.write(lease.key, lease.content)
        return True

    def commit(self, lease: Lease, content: bytes, *, items: int) -> bool:
        """Write the result. Return False without changing anything if the shard already has one."""
        is_first = commit_part(self._place, lease.number, content, items=items)
        self.view.done.add(lease.number)
        self._place.delete(lease.key)
        return is_first

    def release(self, lease: Lease) -> None:
        """Release the shard to other workers. The empty lease remains, so that its epoch is never reused."""
        self._place.write(lease.key, b"")

    def fail(self, lease: Lease, reason: str) -> None:
        """Record that the program failed on this shard, and release it."""
        self._report(lease, reason)
        self.release(lease)

    def _report(self, lease: Lease, reason: str) -> None:
        report = {"worker": self._worker, "attempt": self._attempt, "reason": reason[-2000:]}
        self._place.create(f"{FAILED}/{lease.number:05d}/{uuid.uuid4().hex[:8]}", json.dumps(report).encode())

    def _is_done(self, number: int) -> bool:
        return self._place.has(name_part(number))
