"""The daemon as a process: its lock, and the command that starts it unless one is alive."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from broker.config import Config
from broker.errors import StateError
from broker.jobs.log_files import rotate_log
from broker.locks import try_lock
from broker.state.faults import explain_os_error
from broker.state.leader import STALE_S
from broker.state.store import Store

POLL_S = 0.05  # between two polls of the lock, or of a process that starts
LOG_BYTES_MIN = 64 << 10  # of free space: with less, the end of the log may be missing
POLLS_MAX = 2400  # two minutes: a busy machine or a network home starts Python slowly


@contextmanager
def hold_lock(config: Config) -> Iterator[bool]:
    """Try to lock; yield whether that succeeded.

    The kernel releases the lock when the process ends; children do not inherit it.
    """
    with ExitStack() as stack:
        try:
            is_held = stack.enter_context(try_lock(config.daemon_lock))
        except OSError as error:
            raise explain_os_error(error, default=config.daemon_lock) from error
        yield is_held


def ensure_daemon(config: Config, store: Store, argv: Sequence[str]) -> None:
    """Start `argv`, detached from this terminal, unless a daemon is alive; return once one is alive.

    Raises StateError, with the end of the log, if the new process exits instead.
    """
    if _is_alive(config, store):
        return
    path = config.daemon_log
    process = _start_process(argv, path)
    for _ in range(POLLS_MAX):
        if _is_alive(config, store):
            return
        try:
            returncode = process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            continue
        if returncode == 0:
            return  # another daemon was faster, or this one has already finished
        reason = _explain_exit(path, returncode)
        hints = ["`broker status` starts it again; recorded jobs then continue", f"see its log in {path}"]
        raise StateError(f"the jobs daemon did not start: {reason}", hints=hints)
    raise StateError("the jobs daemon did not acquire its lock within two minutes", hints=[f"see its log in {path}"])


def _explain_exit(log_path: Path, returncode: int) -> str:
    """Return why the process ended: by the last line of its log, which a full disk cuts off."""
    if returncode < 0:
        return f"killed by signal {-returncode}"
    if shutil.disk_usage(log_path.parent).free < LOG_BYTES_MIN:
        return f"no space left on the disk of {log_path.parent}"
    last = log_path.read_text(errors="replace").strip().rpartition("\n")[2]
    return last or f"it exited with code {returncode}"


def _start_process(argv: Sequence[str], log_path: Path) -> subprocess.Popen[bytes]:
    try:
        log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        rotate_log(log_path)
        with os.fdopen(os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as output:
            return subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
    except OSError as error:
        raise explain_os_error(error, default=log_path) from error


def _is_alive(config: Config, store: Store) -> bool:
    if store.is_shared:
        return store.claims.has_controller()
    with hold_lock(config) as is_ours:
        return not is_ours and store.leader.measure_beat_age_s() <= STALE_S
