"""Starts one worker process per GPU on this node: `python -m trainers.launch -m trainers.lm --flags`.

A trainer started plainly on the broker's nodes comes here by itself.

A light torchrun: it imports no torch (torchrun takes 2 s to the worker's first line, this 0.04 s) and has fixed ranks.
"""

import contextlib
import os
import random
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

PORT_DEFAULT = 29500  # torchrun's own
USAGE = "usage: python -m trainers.launch [--workers COUNT] -m MODULE [ARGUMENT ...]"
# Workers get this long to end after one has failed; past that they hang in a collective and are killed.
GRACE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Who runs on this node, as part of the whole."""

    workers: int
    node_rank: int
    node_count: int
    master_address: str
    master_port: int | None

    def worker_variables(self, local_rank: int, port: int) -> dict[str, str]:
        """What one worker learns about itself, in torch's names."""
        return {
            "RANK": str(self.node_rank * self.workers + local_rank),
            "WORLD_SIZE": str(self.node_count * self.workers),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.workers),
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(port),
        }


def main(arguments: Sequence[str]) -> int:
    """Run the workers to their end; return 0, or the first failing worker's exit code."""
    workers, command = split_arguments(arguments)
    plan = read_plan(os.environ, workers)
    port = plan.master_port or (find_free_port() if plan.node_count == 1 else PORT_DEFAULT)
    command = [sys.executable, *command]
    if plan.workers == 1:
        os.environ.update(plan.worker_variables(0, port))
        os.execv(command[0], command)
    return run_workers([(command, {**os.environ, **plan.worker_variables(rank, port)}) for rank in range(plan.workers)])


def launch_if_needed(module: str, arguments: Sequence[str]) -> int | None:
    """For a trainer's first line: learn this process's place among the ranks, or start them all.

    Returns the exit code of the workers that were started in its stead; None where this process is itself a rank.
    """
    if "RANK" in os.environ:  # under torchrun, or one of our own workers
        return None
    plan = read_plan(os.environ)
    if plan.workers > 1:
        return main(["-m", module, *arguments])
    if plan.node_count > 1:
        os.environ.update(plan.worker_variables(0, plan.master_port or PORT_DEFAULT))
    return None


def end_process(exit_code: int) -> NoReturn:
    """End at once, without taking the interpreter down.

    While it goes down, a thread of gloo that lets go of a last tensor is ended where C++ forbids it, and the process
    aborts after a run that succeeded: seen once in some thirty runs of `pipeline+fsdp` on torch 2.13.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def split_arguments(arguments: Sequence[str]) -> tuple[int | None, list[str]]:
    """Our own flag, if given, and the workers' command line from `-m` on."""
    rest = list(arguments)
    workers = None
    if len(rest) >= 2 and rest[0] == "--workers" and rest[1].isdigit() and int(rest[1]) > 0:
        workers, rest = int(rest[1]), rest[2:]
    if len(rest) < 2 or rest[0] != "-m":
        raise SystemExit(USAGE)
    return workers, rest


def read_plan(variables: Mapping[str, str], workers: int | None = None) -> Plan:
    """Derive ranks from the SKYPILOT_* variables; without them, this node is the only one."""
    addresses = variables.get("SKYPILOT_NODE_IPS", "").split()
    node_count = int(variables.get("SKYPILOT_NUM_NODES") or len(addresses) or 1)
    port = variables.get("BROKER_MASTER_PORT")
    return Plan(
        workers=workers or max(1, int(variables.get("SKYPILOT_NUM_GPUS_PER_NODE") or 1)),
        node_rank=int(variables.get("SKYPILOT_NODE_RANK") or 0),
        node_count=node_count,
        master_address=addresses[0] if addresses and node_count > 1 else "127.0.0.1",
        master_port=int(port) if port else None,
    )


def run_workers(commands: Sequence[tuple[list[str], Mapping[str, str]]]) -> int:
    """Start all, pass SIGTERM on, and end the others when one fails."""
    running: set[int] = set()
    # Plain processes rather than Popen objects: those reap a child behind our back when they are sent a signal.
    signal.signal(signal.SIGTERM, lambda *_: _send(signal.SIGTERM, running))
    signal.signal(signal.SIGALRM, lambda *_: _send(signal.SIGKILL, running))
    for command, environment in commands:
        running.add(os.posix_spawn(command[0], command, environment))
    exit_code = 0
    while running:
        pid, status = os.wait()
        running.discard(pid)
        code = os.waitstatus_to_exitcode(status)
        if code and not exit_code:
            exit_code = 128 - code if code < 0 else code  # death by a signal, as a shell reports it
            # Not at once: after a preemption the first rank may still be telling that its checkpoint is made.
            signal.setitimer(signal.ITIMER_REAL, GRACE_S)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return exit_code


def _send(signal_number: int, pids: set[int]) -> None:
    for pid in tuple(pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal_number)


def find_free_port() -> int:
    """Free now, and below the ephemeral ports (Linux: 32768 up), so that no outgoing connection takes it meanwhile."""
    for port in random.sample(range(20000, 32000), 200):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port between 20000 and 32000")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
