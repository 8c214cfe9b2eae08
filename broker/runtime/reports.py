"""Build reports on a run from its nodes' answers to one poll, and on their pending uploads."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from broker.frozen import frozen
from broker.types import (
    NodeFault,
    NodeSample,
    ObservedCheckpoints,
    OwnTime,
    Progress,
    Run,
    RunStatus,
    SetupResult,
    SlowNetwork,
)

TEXT_MAX = 300  # characters of a reason, a serial or another text from a node
OWN_S_MAX = 1e6
NUMBER_MAX = 1e15
FLOAT_MAX = sys.float_info.max
SETUP_RESULTS = ("used", "kept", "not_kept")  # as in `agent_setup_steps.py`
SERIALS_MAX = 32  # two for each GPU


@frozen
class ExchangeReply:
    """A node's answer to an exchange of files: the text of those that were read, and the SHA-256 of each it holds."""

    files: Mapping[str, str]
    digests: Mapping[str, str]


@frozen
class GangReport:
    """The state of a run at one poll.

    `returncode` is None if no program failed by itself (lost node, preemption); `reason` then states why it ended.
    `advised`: ranks with an elevated preemption risk according to the cloud; most survive. `noticed`: ranks whose
    preemption the cloud has announced. `failed_rank`: the rank whose program failed first. `flush`: a node's report
    while the program has ended but its files are still being uploaded. `unflushed`: for a run that FAILED although its
    program succeeded, why its files did not arrive and where they are. `unfit`: ranks that could not join a running
    elastic gang because `setup` failed, with the reason.
    `faults`: faults of nodes that were detected before the program started; `network`: the network's speed if it is
    slow. `own_times`: how long each rank needed for its own part of its newest step, if its program reports that.
    `setups`: the result of caching `setup` on each node that used an archive or may keep one.
    `followers`: the ranks whose program continues when another node becomes the gang's head.
    `samples`: what nodes reported about themselves since the last poll, with their ranks; a sample may be repeated.
    `checkpoints`: the head's view of the checkpoint folder after the program has failed; None if it is not a folder.
    `is_ready`: the gang is set up and waits for its job group; `port`: the port chosen for its service in the group.
    """

    status: RunStatus
    returncode: int | None
    statuses: tuple[RunStatus | None, ...]
    unreachable: tuple[int, ...]
    progress: Progress | None
    run_id: int
    reason: str = ""
    advised: tuple[int, ...] = ()
    noticed: tuple[int, ...] = ()
    failed_rank: int | None = None
    flush: str = ""
    unflushed: str = ""
    unfit: tuple[tuple[int, str], ...] = ()
    faults: tuple[NodeFault, ...] = ()
    network: SlowNetwork | None = None
    own_times: tuple[OwnTime, ...] = ()
    setups: tuple[SetupResult, ...] = ()
    followers: tuple[int, ...] = ()
    samples: tuple[tuple[int, NodeSample], ...] = ()
    is_ready: bool = False
    port: int | None = None
    checkpoints: ObservedCheckpoints | None = None


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


def find_head(runs: Sequence[Mapping[str, Any] | None]) -> int:
    """Return the rank of the head: the one of the highest epoch that a node knows, 0 if no node answered."""
    heads = [(run.get("head_epoch"), run.get("head_rank")) for run in runs if run]
    valid = [(epoch, rank) for epoch, rank in heads if isinstance(epoch, int) and isinstance(rank, int)]
    rank = max(valid, default=(0, 0))[1]
    return rank if 0 <= rank < len(runs) else 0


def find_newest_progress(runs: Sequence[Mapping[str, Any] | None], head: int) -> Progress | None:
    """Return the progress of the run: the first rank's, or that of another rank that reports in its place.

    Programs continue to report on one node, which need not be the head once that has moved; the furthest line counts.
    A launcher may also give the program's first rank to another node: the first node then has no line at all. Lines
    with `own_s` of other nodes are measurements of these nodes alone (`find_own_times`).
    """
    first = runs[0] if runs else None
    if head == 0 and first is None:
        return None
    if head == 0 and first is not None and not first.get("head_epoch"):
        others = [run["progress"] for run in runs if run and run["progress"] and "own_s" not in run["progress"]]
        found = [first["progress"]] if first["progress"] else others
    else:
        found = [run["progress"] for run in runs if run]
    reported = [line for each in found if (line := parse_progress(each)) is not None]
    return max(reported, key=lambda line: (line.step, line.loss is not None or line.is_diverged), default=None)


def gather_runs(cluster: str, answers: Mapping[int, Mapping[str, Any] | None]) -> Sequence[Run]:
    """Return the runs that nodes know, by id, each in the state that its current head reports.

    `answers`: the nodes' answers by rank. If the head of a run does not answer, the node of the lowest rank counts.
    """
    known: dict[int, list[tuple[int, bool, int, Mapping[str, Any]]]] = {}
    for rank, answer in answers.items():
        for run in answer["runs"] if answer else ():
            heard = (run.get("head_epoch") or 0, (run.get("head_rank") or 0) == rank, -rank, run)
            known.setdefault(run["id"], []).append(heard)
    return [_make_run(cluster, max(known[run_id], key=lambda heard: heard[:3])[3]) for run_id in sorted(known)]


def _make_run(cluster: str, run: Mapping[str, Any]) -> Run:
    return Run(
        id=run["id"],
        cluster=cluster,
        name=run["name"],
        status=RunStatus(run["status"]),
        started_s=run["started_s"],
        ended_s=run["ended_s"],
        returncode=run["returncode"],
        accelerators=str(run.get("accelerators") or ""),
        cards=tuple((run.get("held") or {}).get("cards") or ()),
    )


def find_unfit(runs: Sequence[Mapping[str, Any] | None], head: int = 0) -> tuple[tuple[int, str], ...]:
    """Return the ranks whose `setup` failed while the head's program runs, with the reason: replacement nodes."""
    leader = runs[head] if runs else None
    if leader is None or leader["status"] != RunStatus.RUNNING:
        return ()
    failed = ((rank, run) for rank, run in enumerate(runs) if run and run["status"] == RunStatus.FAILED_SETUP)
    return tuple((rank, str(run.get("reason") or "")) for rank, run in failed)


def find_faults(runs: Sequence[Mapping[str, Any] | None]) -> tuple[NodeFault, ...]:
    """Return the faults that nodes report about themselves; invalid reports are ignored."""
    found = []
    for rank, run in enumerate(runs):
        fault = run.get("fault") if run else None
        if isinstance(fault, Mapping) and isinstance(fault.get("reason"), str):
            serials = fault.get("serials")
            listed = serials[:SERIALS_MAX] if isinstance(serials, list) else []
            known = [each[:TEXT_MAX] for each in listed if isinstance(each, str)]
            found.append(NodeFault(rank=rank, reason=fault["reason"][:TEXT_MAX], serials=tuple(known)))
    return tuple(found)


def find_slow_network(run: Mapping[str, Any]) -> SlowNetwork | None:
    """Return the head's report of a slow network; None if the network is not slow or the report is invalid."""
    report = run.get("network")
    if not isinstance(report, Mapping) or report.get("is_slow") is not True:
        return None
    gang_gbs, pair_gbs = (_read_number(report.get(name)) for name in ("gang_gbs", "pair_gbs"))
    expected_gbs, pair = _read_number(report.get("expected_gbs")), report.get("pair")
    is_pair = isinstance(pair, list) and len(pair) == 2 and all(type(rank) is int for rank in pair)
    if expected_gbs is None or (gang_gbs is None and pair_gbs is None):
        return None
    return SlowNetwork(
        backend=str(report.get("backend") or "")[:TEXT_MAX],
        expected_gbs=expected_gbs,
        gang_gbs=gang_gbs,
        pair=(pair[0], pair[1]) if pair is not None and is_pair else None,
        pair_gbs=pair_gbs,
    )


def _read_number(value: object) -> float | None:
    is_valid = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < NUMBER_MAX
    return float(value) if is_valid and isinstance(value, int | float) else None


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


def find_setups(runs: Sequence[Mapping[str, Any] | None]) -> tuple[SetupResult, ...]:
    """Return what nodes report about their setup archives; invalid reports are ignored."""
    found = []
    for rank, run in enumerate(runs):
        report = run.get("setup") if run else None
        if not isinstance(report, Mapping) or report.get("result") not in SETUP_RESULTS:
            continue
        numbers = {name: report.get(name, 0) for name in ("setup_s", "took_s", "size_bytes")}
        if all(type(each) in (int, float) and 0 <= each < NUMBER_MAX for each in numbers.values()):
            found.append(
                SetupResult(
                    rank=rank,
                    result=str(report["result"]),
                    setup_s=float(numbers["setup_s"]),
                    took_s=float(numbers["took_s"]),
                    size_bytes=int(numbers["size_bytes"]),
                    reason=str(report.get("reason") or "")[:TEXT_MAX],
                )
            )
    return tuple(found)


def read_run_status(answer: Mapping[str, Any] | None) -> RunStatus | None:
    """Return the status of the run in a node's answer; None without an answer or a run."""
    return RunStatus(answer["runs"][0]["status"]) if answer and answer["runs"] else None


def find_checkpoints(run: Mapping[str, Any]) -> ObservedCheckpoints | None:
    """Return the head's view of the checkpoint folder; None if there is none (older agents) or it is invalid."""
    report = run.get("checkpoints")
    if not isinstance(report, Mapping):
        return None
    number, unnumbered_s, time_s = (_read_number(report.get(name)) for name in ("number", "unnumbered_s", "time_s"))
    if number is None or unnumbered_s is None or time_s is None:
        return None
    return ObservedCheckpoints(number=int(number), unnumbered_s=unnumbered_s, time_s=time_s)


def parse_progress(line: Mapping[str, Any] | None) -> Progress | None:
    """Parse a progress line, ignoring invalid fields because it comes from the user's program."""
    if line is None:
        return None

    def number(name: str) -> float | None:
        """Return a number; None for NaN and infinity, which the store cannot hold, and for hundreds of digits."""
        value = line.get(name)
        is_valid = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= FLOAT_MAX
        return float(value) if is_valid and isinstance(value, int | float) else None

    def whole(name: str) -> int | None:
        """Return a count; None below 0, as -1 often stands for "unknown" or "none yet"."""
        value = number(name)
        return int(value) if value is not None and 0 <= value < 2**63 else None

    return Progress(
        step=whole("step") or 0,
        total=whole("total") or None,
        loss=number("loss"),
        tokens_per_s=number("tokens_per_s"),
        checkpoint_step=whole("checkpoint_step"),
        time_s=number("time_s") or number("time") or 0.0,
        busy_s=number("busy_s"),
        is_diverged=isinstance(line.get("loss"), float) and not math.isfinite(line["loss"]),
    )
