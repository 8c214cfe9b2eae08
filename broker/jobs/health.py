"""Classify the health of a running attempt. Pure: the gang's report and the cloud's list in, a verdict out.

The job's own outcome decides. A failure counts as the user's only if their program exited with a code and no node was
lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from broker.frozen import frozen
from broker.types import Node, NodeEnd, NodeState, RunStatus

MISSES_MIN = 3  # polls without a response, and
UNREACHABLE_S_MIN = 120.0  # seconds of silence: only both together count as a loss (SkyPilot #10155)
# For a whole gang that its cloud lists as RUNNING: our own network is a more likely cause than hanging machines.
GANG_UNREACHABLE_S_MIN = 600.0
NOTICE_S_MAX = 150.0  # AWS gives 120 s of notice; the program may exit on SIGTERM at its start
PEER_LOSS_S_MAX = 5.0  # a gang fails together: the list may show the lost peer this much later
SIGTERM_CODES = (143, -15)


class Verdict(StrEnum):
    """The verdict on a gang from one poll of its nodes."""

    RUNNING = "RUNNING"
    UNCLEAR = "UNCLEAR"  # poll again soon
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    FAILED_SETUP = "FAILED_SETUP"
    CANCELLED = "CANCELLED"
    APART = "APART"  # it ended although no program failed: a rank did not join, or its machine stopped responding
    LOST = "LOST"


@frozen
class HealthSignals:
    """The observations behind a verdict.

    `status` is None if no node responded. `_s`: duration of a signal in seconds.
    """

    status: RunStatus | None
    returncode: int | None
    unreachable: tuple[int, ...]
    nodes: tuple[Node, ...]
    is_spot: bool
    misses: int = 0
    unreachable_s: float = 0.0
    failed_s: float = 0.0
    nodes_min: int | None = None  # an elastic program continues on at least this many nodes, including the first
    is_unflushed: bool = False  # its program succeeded, but files that it wrote were not uploaded
    head_rank: int = 0  # the node that coordinates the gang
    statuses: tuple[RunStatus | None, ...] = ()  # by rank, if the gang reports them
    followers: tuple[int, ...] = ()  # ranks whose program continues when another node becomes the head
    is_noticed: bool = False  # the gang had a preemption notice before its program ended


def classify(signals: HealthSignals) -> Verdict:
    """Return the verdict on an attempt from its signals. The order of the checks matters: a success always counts."""
    if signals.status is RunStatus.SUCCEEDED:
        return Verdict.SUCCEEDED
    if signals.is_unflushed:
        return Verdict.FAILED  # even if nodes are lost: a program that succeeded does not run again
    if list_lost_ranks(signals.nodes) and not can_continue(signals):
        return Verdict.LOST
    if signals.is_noticed and signals.status in (RunStatus.FAILED, RunStatus.FAILED_SETUP):
        return Verdict.LOST  # it has saved its state: acquire new nodes now instead of waiting for the preemption
    if (
        signals.unreachable
        and signals.misses >= MISSES_MIN
        and signals.unreachable_s >= find_unreachable_s_max(signals)
    ):
        return Verdict.LOST
    if signals.status is RunStatus.CANCELLED:
        return Verdict.CANCELLED
    if signals.status in (RunStatus.FAILED, RunStatus.FAILED_SETUP):
        if signals.unreachable or signals.failed_s < measure_doubt_s(signals):
            return Verdict.UNCLEAR
        if signals.returncode is None:
            return Verdict.APART
        return Verdict.FAILED if signals.status is RunStatus.FAILED else Verdict.FAILED_SETUP
    return Verdict.UNCLEAR if signals.unreachable else Verdict.RUNNING


def can_continue(signals: HealthSignals) -> bool:
    """Return whether an elastic program continues without the lost nodes: not if it filled one, as it would again."""
    if any(node.reason == NodeEnd.OUT_OF_MEMORY for node in signals.nodes if node.state is NodeState.TERMINATED):
        return False
    lost = [node.rank for node in signals.nodes if node.state is NodeState.TERMINATED]
    if len(lost) < len(list_lost_ranks(signals.nodes)):
        return False  # a stopped node still occupies its slot and cannot be replaced
    is_enough = signals.nodes_min is not None and len(signals.nodes) - len(lost) >= signals.nodes_min
    if signals.head_rank in lost:
        return is_enough and find_next_head(signals) is not None
    return is_enough and signals.status is RunStatus.RUNNING


def find_next_head(signals: HealthSignals) -> int | None:
    """Return the lowest rank that can become the head of an elastic gang whose head is lost; None to end the attempt.

    The run must continue on every node where it has begun: a program that does not follow the new head ends with the
    old.
    """
    lost = list_lost_ranks(signals.nodes)
    live = [(rank, status) for rank, status in enumerate(signals.statuses) if status and rank not in lost]
    running = [rank for rank, status in live if status is RunStatus.RUNNING]
    if any(status.is_terminal for _, status in live) or not set(running) <= set(signals.followers):
        return None
    return min(running, default=None)


def find_unreachable_s_max(signals: HealthSignals) -> float:
    """Return the seconds for which listed nodes may be silent: a single node is at fault, a whole gang may not be."""
    live_count = sum(1 for node in signals.nodes if node.state is not NodeState.TERMINATED)
    return GANG_UNREACHABLE_S_MIN if len(signals.unreachable) >= live_count else UNREACHABLE_S_MIN


def measure_doubt_s(signals: HealthSignals) -> float:
    """Return the seconds during which a failure may still turn out to be a preemption that is not listed yet."""
    if signals.returncode in SIGTERM_CODES or any(node.reason == NodeEnd.PREEMPTED for node in signals.nodes):
        return NOTICE_S_MAX if signals.is_spot else 2 * PEER_LOSS_S_MAX
    return PEER_LOSS_S_MAX if signals.is_spot and len(signals.nodes) > 1 else 0.0


def list_lost_ranks(nodes: Sequence[Node]) -> Sequence[int]:
    """List the ranks of nodes that the cloud has terminated or stopped."""
    return [node.rank for node in nodes if node.state in (NodeState.TERMINATED, NodeState.STOPPED)]


def list_leaving_ranks(nodes: Sequence[Node], noticed: Sequence[int]) -> Sequence[int]:
    """List the ranks of nodes that are lost, or that the cloud will take according to its notice."""
    return sorted({*list_lost_ranks(nodes), *noticed})
