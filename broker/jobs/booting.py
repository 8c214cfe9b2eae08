"""Decide whether to keep waiting for nodes on which a start has failed: the one rule for clusters and managed jobs."""

from __future__ import annotations

from enum import Enum

from broker.errors import CloudError, UnreachedError
from broker.jobs.health import UNREACHABLE_S_MIN, list_lost_ranks
from broker.jobs.monitor import AttemptMonitor
from broker.types import Cluster

BOOT_S_MAX = 420.0  # large GPU machines and images take minutes to respond


class StartVerdict(Enum):
    """The verdict on a failed start of a program."""

    WAIT = "wait"
    LOST = "lost"  # nodes are gone: waiting does not bring them back
    FAILED = "failed"


def judge_start(error: CloudError, cluster: Cluster, monitor: AttemptMonitor, now_s: float) -> StartVerdict:
    """Judge a failed start by the cluster's refreshed record.

    A node that has never responded may boot for `BOOT_S_MAX`. Any other failure must last as long as a silence that
    counts as a loss.
    """
    if list_lost_ranks(cluster.nodes):
        return StartVerdict.LOST
    is_silent = monitor.record_silence(now_s)
    # Not measured from the start of the attempt, which includes the search: a long search must not use up the boot
    # time.
    is_booting = isinstance(error, UnreachedError) and monitor.measure_boot_s(error.node_id, now_s) < BOOT_S_MAX
    return StartVerdict.WAIT if is_booting or not is_silent else StartVerdict.FAILED


def get_wait_s(error: CloudError) -> float:
    """Return the seconds to wait for an error of this kind to pass."""
    return BOOT_S_MAX if isinstance(error, UnreachedError) else UNREACHABLE_S_MIN
