from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from tests.torture.history import History
from tests.torture.killer import Killer

WAIT_S = 300.0  # generous: only a broken killer reaches it


def test_the_next_act_waits_until_an_act_is_undone(tmp_path: Path) -> None:
    """A stopped daemon may hold a resource that the command of the next act needs."""
    is_undone = threading.Event()
    heard: list[bool] = []

    class Waiting(Killer):
        def act(self, kind: str = "") -> bool:
            self._later(0.0, "daemon-stop", is_undone.set)
            heard.append(is_undone.wait(WAIT_S))
            self._ended.set()
            return True

    bed: Any = None
    killer = Waiting(bed, History(tmp_path / "history.jsonl", seed=1, bed="local"), seed=1, every_s=0.001)
    killer.start()
    killer.join(2 * WAIT_S)
    assert heard == [True]


def test_remaining_faults_are_healed_at_the_end(tmp_path: Path) -> None:
    undone: list[str] = []
    bed: Any = None
    killer = Killer(bed, History(tmp_path / "history.jsonl", seed=1, bed="local"), seed=1, every_s=1e9)
    killer.start()
    killer._later(1e9, "clock-jump", lambda: undone.append("clock"))
    killer.end()
    assert undone == ["clock"]
