"""Clean up after a run whose runner is gone. Standard library only."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from broker.agent import agent_files, agent_lease
else:
    import agent_files
    import agent_lease

SUDO_S = 10.0
PHASES = ("setup", "health", "network", "run")


def make_mark(run_id: int, phase: str) -> str:
    """Return the environment entry by which processes of a run's phase are found after their parent died."""
    return f"BROKER_RUN={agent_files.HOME}:{run_id}:{phase}"


def kill_marked(mark: str, session: int = 0) -> None:
    """Send SIGKILL to every process that carries the mark; processes already gone are ignored.

    With `session`, also to those of other users in that session.
    """
    for stray in agent_files.find_marked(mark):
        try:
            os.kill(stray, signal.SIGKILL)
        except OSError:
            pass
    if session:
        signal_as_root(session, signal.SIGKILL)


def signal_group(pid: int, mark: str, number: int) -> None:
    """Signal a process group, and processes that left it but carry the mark, or that belong to another user."""
    try:
        os.killpg(pid, number)
    except OSError:
        pass
    for stray in agent_files.find_marked(mark):
        try:
            if os.getpgid(stray) != pid:
                os.kill(stray, number)
        except OSError:
            pass
    signal_as_root(pid, number)


def signal_as_root(session: int, number: int) -> None:
    """Signal the processes of a session that belong to another user, such as root's in `sudo python train.py`.

    They carry no mark, because sudo cleans the environment. No effect where sudo asks for a password.
    """
    foreign = [str(pid) for pid in agent_files.find_session(session) if is_foreign(pid)]
    if not foreign:
        return
    import subprocess  # needed by few programs

    name = signal.Signals(number).name[len("SIG") :]
    words = ["sudo", "-n", "sh", "-c", 'kill -s "$@"', "sh", name, *foreign]
    try:
        subprocess.run(words, check=False, timeout=SUDO_S, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        pass


def is_foreign(pid: int) -> bool:
    """Return whether a process exists and this user may not signal it."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        pass
    return False


def end_if_dead(run_id: int) -> None:
    """Kill the processes of a run whose runner died, and write its outcome. Runs with a live runner are left alone."""
    folder = agent_files.run_folder(run_id)
    if not (folder / "state.json").exists() or (folder / "outcome.json").exists():
        return
    lock = agent_files.try_lock(folder / "runner.lock")
    if lock is None:
        return
    try:
        if not (folder / "outcome.json").exists():  # the runner may have written it since the first check
            end_dead_run(run_id)
    except OSError:
        pass  # on a full disk, the next call tries again
    finally:
        os.close(lock)  # or the run would count as live


def end_dead_run(run_id: int) -> None:
    """Kill the processes of a runner that was killed, and write the outcome in its place."""
    spec = agent_files.read_json(agent_files.run_folder(run_id) / "spec.json") or {}
    container = None
    if spec.get("image"):
        import agent_container  # type: ignore[import-not-found]  # imported late: few runs need it, and the watcher rarely does

        container = agent_container.find_container(spec, agent_files.HOME)
    for phase in PHASES:
        if container:
            container.signal(make_mark(run_id, phase), signal.SIGKILL)
        kill_marked(make_mark(run_id, phase))
    outcome = {"status": "FAILED", "returncode": None, "reason": "the runner died", "ended_s": time.time()}
    outcome["lease_left_s"] = agent_lease.measure_left_s()
    import agent_record  # type: ignore[import-not-found]  # few runs die, and each call of the agent would import it

    agent_record.release(agent_files.run_folder(run_id) / agent_record.RESERVE)
    agent_files.write_json(agent_files.run_folder(run_id) / "outcome.json", outcome)
