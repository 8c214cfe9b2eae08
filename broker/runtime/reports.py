"""Reports on a run: its nodes' answers to one poll, and their pending uploads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from broker.frozen import frozen
from broker.types import NodeFault, NodeSample, OwnTime, Progress, RunStatus

TEXT_MAX = 300  # of a fault's reason and of a serial
OWN_S_MAX = 1e6
SERIALS_MAX = 32  # two for each GPU


@frozen
class GangReport:
    """The state of a run at one poll.

    `returncode` is None if no program failed by itself (lost node, preemption); `reason` then says why it ended.
    `advised`: ranks with an elevated preemption risk according to the cloud; most survive. `failed_rank`: the rank
    whose program failed first. `flush`: a node's report while the program has ended but its files are still being
    uploaded. `unflushed`: for a run that FAILED although its program succeeded, why its files did not arrive and where
    they are. `unfit`: ranks that could not join a running elastic gang because `setup` failed, with the reason.
    `faults`: what the nodes found wrong with their own GPUs before the program started.
    `own_times`: how long each rank needed for its own part of its newest step, if its program reports that.
    `samples`: what nodes reported of themselves since the last poll, with their ranks; a sample may be repeated.
    `is_ready`: the gang is set up and waits for its job group; `port`: the one chosen for its service in the group.
    """

    status: RunStatus
    returncode: int | None
    statuses: tuple[RunStatus | None, ...]
    unreachable: tuple[int, ...]
    progress: Progress | None
    run_id: int
    reason: str = ""
    advised: tuple[int, ...] = ()
    failed_rank: int | None = None
    flush: str = ""
    unflushed: str = ""
    unfit: tuple[tuple[int, str], ...] = ()
    faults: tuple[NodeFault, ...] = ()
    own_times: tuple[OwnTime, ...] = ()
    samples: tuple[tuple[int, NodeSample], ...] = ()
    is_ready: bool = False
    port: int | None = None


@frozen
class Uploads:
    """Files that the nodes of a cluster wrote to mounted buckets and have not uploaded yet.

    `sent_bytes` only grows while uploads make progress. `silent`: ids of nodes that did not answer.
    """

    file_count: int = 0
    size_bytes: int = 0
    sent_bytes: int = 0
    urls: tuple[str, ...] = ()
    has_mounts: bool = False
    silent: tuple[str, ...] = ()


def find_unfit(runs: Sequence[Mapping[str, Any] | None]) -> tuple[tuple[int, str], ...]:
    """Return replacement ranks whose `setup` failed while the head's program runs, with the reason."""
    if not runs or not runs[0] or runs[0]["status"] != RunStatus.RUNNING:
        return ()
    failed = ((rank, run) for rank, run in enumerate(runs) if run and run["status"] == RunStatus.FAILED_SETUP)
    return tuple((rank, str(run.get("reason") or "")) for rank, run in failed)


def find_faults(runs: Sequence[Mapping[str, Any] | None]) -> tuple[NodeFault, ...]:
    """Return the faults that nodes report of themselves; an invalid report, or none, is no fault."""
    found = []
    for rank, run in enumerate(runs):
        fault = run.get("fault") if run else None
        if isinstance(fault, Mapping) and isinstance(fault.get("reason"), str):
            serials = fault.get("serials")
            listed = serials[:SERIALS_MAX] if isinstance(serials, list) else []
            known = [each[:TEXT_MAX] for each in listed if isinstance(each, str)]
            found.append(NodeFault(rank=rank, reason=fault["reason"][:TEXT_MAX], serials=tuple(known)))
    return tuple(found)


def find_own_times(runs: Sequence[Mapping[str, Any] | None]) -> tuple[OwnTime, ...]:
    """Return the time of each rank whose newest progress line has a step and a valid `own_s`."""
    found = []
    for rank, run in enumerate(runs):
        line = run.get("progress") if run else None
        if not isinstance(line, Mapping):
            continue
        step, own_s = line.get("step"), line.get("own_s")
        if isinstance(step, bool) or not isinstance(step, int) or isinstance(own_s, bool):
            continue
        if isinstance(own_s, int | float) and 0 < own_s < OWN_S_MAX:
            found.append(OwnTime(rank=rank, step=step, own_s=float(own_s)))
    return tuple(found)


def parse_progress(line: Mapping[str, Any] | None) -> Progress | None:
    """Parse a progress line, ignoring invalid fields because it comes from the user's program."""
    if line is None:
        return None

    def number(name: str) -> float | None:
        value = line.get(name)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    def whole(name: str) -> int | None:
        value = number(name)
        return int(value) if value is not None and abs(value) < 2**63 else None

    return Progress(
        step=whole("step") or 0,
        total=whole("total"),
        loss=number("loss"),
        tokens_per_s=number("tokens_per_s"),
        checkpoint_step=whole("checkpoint_step"),
        time_s=number("time_s") or number("time") or 0.0,
        busy_s=number("busy_s"),
    )
