"""The command that starts the daemon, and its report if that fails."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from broker.clock import SystemClock
from broker.config import load_config
from broker.errors import StateError
from broker.jobs.daemon_process import ensure_daemon
from broker.state.store import Store

FAILING = (sys.executable, "-c", "import sys; print('    raise'); sys.exit(1)")


@pytest.mark.parametrize(("free_bytes", "reason"), [(0, "no space left on the disk of "), (1 << 30, "raise")])
def test_full_disk_is_named_instead_of_the_line_at_which_it_cut_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int, reason: str
) -> None:
    config = load_config(tmp_path)
    store = Store(config.database, clock=SystemClock())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free_bytes))
    with pytest.raises(StateError) as caught:
        ensure_daemon(config, store, FAILING)
    assert caught.value.message.startswith(f"the jobs daemon did not start: {reason}")
    store.close()
