"""The killer: a seed draws each act, its target process, disk, clock or market, and when it is undone."""

from __future__ import annotations

import json
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.torture.bed import LocalBed
from tests.torture.history import History
from tests.torture.ledger import read_store
from tests.torture.processes import Process

TICK_S = 0.2
TRIES_MAX = 5  # draws for one act: many find no target
STOP_S_MAX = 25.0  # longer than a daemon without a beat is waited for (15 s)
SHORT_S_MAX = 9.0  # shorter than the gang's patience with a silent rank (15 s)
# A gang that fell apart three times at one step is given up, and the program is blamed. Acts that cause this are
# therefore done to a job twice at most, which keeps the end of every job defined.
BREAKS_MAX = 2
CLOCK_JUMPS_S = (-86400, -3600, -60, -5, 5, 60, 3600, 86400)
ZONES = ("local-a", "local-b", "local-c")
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
Acts = tuple[tuple[str, float], ...]
# Kind and weight. `<role>-<signal>` is done to one process of the role.
ACTS: Acts = (
    *(("daemon-kill", 4.0), ("daemon-stop", 2.0), ("daemon-term", 1.0)),
    *(("runner-kill", 1.0), ("runner-stop", 1.0), ("watcher-kill", 1.0), ("watcher-stop", 1.0)),
    *(("keeper-kill", 1.0), ("keeper-stop", 1.0), ("machine-kill", 1.0), ("machine-stop", 1.0), ("node-kill", 1.5)),
    *(("trainer-kill", 2.0), ("trainer-stop", 1.5), ("witness-kill", 1.0), ("program-kill", 1.0)),
    *(("preempt", 3.0), ("preempt-notice", 2.0), ("zone-full", 1.0), ("disk-full", 1.5), ("clock-jump", 1.5)),
)


@dataclass(order=True)
class Undo:
    due_s: float
    what: str = field(compare=False)
    action: Callable[[], object] = field(compare=False)


class Undos(threading.Thread):
    """A timer that undoes each act when its time is over, whatever the killer waits for meanwhile.

    A command that needs a resource held by a stopped process ends only when that process continues.
    """

    def __init__(self, history: History) -> None:
        super().__init__(name="undos", daemon=True)
        self._history = history
        self._left: list[Undo] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(TICK_S):
            self.undo(time.monotonic())

    def end(self) -> None:
        """Undo everything now."""
        self._ended.set()
        if self.is_alive():
            self.join()
        self.undo(float("inf"))

    def add(self, seconds: float, what: str, action: Callable[[], object]) -> None:
        with self._lock:
            self._left.append(Undo(time.monotonic() + seconds, what, action))

    def undo(self, now_s: float) -> None:
        with self._lock:
            due = sorted(each for each in self._left if each.due_s <= now_s)
            self._left = [each for each in self._left if each.due_s > now_s]
        for undo in due:
            undo.action()
            self._history.write("undo", of=undo.what)


class Killer(threading.Thread):
    """A killer that acts until it is stopped, then undoes all outstanding acts."""

    def __init__(
        self,
        bed: LocalBed,
        history: History,
        *,
        seed: int,
        every_s: float,
        acts: Acts = ACTS,
    ) -> None:
        super().__init__(name="killer", daemon=True)
        self._bed, self._history = bed, history
        self._draw = random.Random(f"{seed}-acts")
        self._every_s = every_s
        self._acts = acts
        self._undos = Undos(history)
        self._breaks: Counter[str] = Counter()
        self._ended = threading.Event()

    def run(self) -> None:
        self._undos.start()
        next_s = time.monotonic() + self._draw.expovariate(1 / self._every_s)
        while not self._ended.wait(TICK_S):
            if time.monotonic() >= next_s:
                any(self.act() for _ in range(TRIES_MAX))
                next_s = time.monotonic() + self._draw.expovariate(1 / self._every_s)
        self.heal()

    def end(self) -> None:
        """End, and return when everything is healed."""
        self._ended.set()
        self.join()

    def act(self, kind: str = "") -> bool:
        """Perform one act; return whether it found a target."""
        kinds, weights = zip(*self._acts, strict=True)
        kind = kind or self._draw.choices(kinds, weights)[0]
        special = self._list_special()
        done = special[kind](kind) if kind in special else self._signal(kind)
        if done:
            self._history.act(kind, **done)
        return done is not None

    def _list_special(self) -> dict[str, Callable[[str], dict[str, object] | None]]:
        """List acts that are more than a signal to one process.

        Each returns what it did, None where it found no target.
        """
        return {
            "node-kill": self._kill_node,
            "preempt": self._preempt,
            "preempt-notice": self._preempt,
            "zone-full": self._fill_zones,
            "disk-full": self._fill_disk,
            "clock-jump": self._jump,
        }

    def heal(self) -> None:
        """Undo everything now."""
        self._undos.end()

    def _later(self, seconds: float, what: str, action: Callable[[], object]) -> None:
        self._undos.add(seconds, what, action)

    def _signal(self, kind: str) -> dict[str, object] | None:
        """Signal one process of a role. A stopped one continues after a while."""
        role, _, action = kind.partition("-")
        found = sorted((each for each in self._bed.list_processes() if each.kind == role), key=lambda each: each.pid)
        if not found:
            return None
        target = self._draw.choice(found)
        if kind == "runner-kill" and not self._may_break_apart(self._name_job(target.node)):
            return None
        return self._send(target, kind, action)

    def _send(self, target: Process, kind: str, action: str) -> dict[str, object] | None:
        bed = self._bed
        if not bed.signal(target, SIGNALS[action]):
            return None
        details: dict[str, object] = {"pid": target.pid, "node": target.node}
        if action == "stop":
            seconds = self._draw.uniform(1.0, STOP_S_MAX if target.kind == "daemon" else SHORT_S_MAX)
            self._later(seconds, f"{kind} {target.pid}", lambda: bed.signal(target, signal.SIGCONT))
            details["for_s"] = round(seconds, 1)
        return details

    def _may_break_apart(self, job: str) -> bool:
        """Count acts that make a gang fall apart; return whether another is allowed."""
        self._breaks[job] += 1
        return self._breaks[job] <= BREAKS_MAX

    def _name_job(self, node: str) -> str:
        """Return `job-12` for the node `job-12-1-2-3fb1a0c9de-0`."""
        found = re.match(r"job-\d+", node)
        return found[0] if found else node

    def _kill_node(self, kind: str) -> dict[str, object] | None:
        """Kill keeper and machine at once: no process is left that could end the node's other processes."""
        found = [each for each in self._bed.list_processes() if each.kind in ("keeper", "machine")]
        nodes = sorted({each.node for each in found})
        if not nodes:
            return None
        node = self._draw.choice(nodes)
        hit = [self._bed.signal(each, signal.SIGKILL) for each in found if each.node == node]
        return {"node": node, "processes": sum(hit)} if any(hit) else None

    def _preempt(self, kind: str) -> dict[str, object] | None:
        """Preempt as a spot market does, through the user's command for that."""
        view = read_store(self._bed.database)
        names = sorted(name for name, job_id in view.clusters.items() if job_id is not None) if view else []
        if not names:
            return None
        name = self._draw.choice(names)
        arguments = ["local", "preempt", name]
        arguments += ["--node", str(self._draw.choice((0, 1, 1)))] if self._draw.random() < 0.6 else []
        arguments += ["--notice", str(self._draw.randint(1, 8))] if kind == "preempt-notice" else []
        code = self._bed.run(*arguments).returncode
        return {"cluster": name, "arguments": arguments} if code == 0 else None

    def _fill_zones(self, kind: str) -> dict[str, object] | None:
        """Let one or two zones refuse; a third always gives."""
        path = self._bed.home / "local" / "faults.json"
        if not path.parent.exists() or path.exists():
            return None
        zones = self._draw.sample(ZONES, self._draw.randint(1, 2))
        aside = path.with_name(".faults")
        try:
            aside.write_text(json.dumps({"zones": dict.fromkeys(zones, "capacity")}))
            aside.rename(path)
        except OSError:  # the disk is full
            aside.unlink(missing_ok=True)
            return None
        seconds = self._draw.uniform(5, 30)
        self._later(seconds, "zone-full", lambda: path.unlink(missing_ok=True))
        return {"zones": zones, "for_s": round(seconds, 1)}

    def _fill_disk(self, kind: str) -> dict[str, object] | None:
        bed = self._bed
        if not bed.can_fill or bed.is_full:
            return None
        left = self._draw.choice((0, 4096, 65536))
        seconds = self._draw.uniform(2, 12)
        bed.fill_disk(left)
        self._later(seconds, kind, bed.free_disk)
        return {"left_bytes": left, "for_s": round(seconds, 1)}

    def _jump(self, kind: str) -> dict[str, object] | None:
        """Move the wall clock of broker's own processes. It is corrected after a while, which is a jump too."""
        if not self._bed.can_jump:
            return None
        skew_s = self._draw.choice(CLOCK_JUMPS_S)
        seconds = self._draw.uniform(3, 25)
        self._bed.set_clock(skew_s)
        self._later(seconds, kind, lambda: self._bed.set_clock(0))
        return {"skew_s": skew_s, "for_s": round(seconds, 1)}
