"""Limit how long this node runs without the broker. Standard library only.

The broker renews the lease every minute. While it is unavailable, the node works until the lease expires: "lease". It
shuts down earlier, "done", once all its runs have ended and their results are in the bucket.
"""

from __future__ import annotations

import json
import time

TYPE_CHECKING = False  # `typing` would take a tenth of the time of a request
if TYPE_CHECKING:
    from typing import Any

    from broker.agent import agent_delivery as delivery
    from broker.agent import agent_files as files
    from broker.agent import agent_head
else:
    import agent_delivery as delivery
    import agent_files as files
    import agent_head

LEASE = "lease.json"
RESTARTED_S = 1800.0  # after a restart of the node, which the user may have started to work on it
DAMAGE = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError)  # a file with another format


def renew(lease_s: float) -> None:
    """Record that the lease ends in `lease_s` seconds, by the node's uptime, which no clock change affects."""
    now_s = files.read_uptime_s()
    lease = {
        "until_s": now_s + lease_s,
        "renewed_s": now_s,
        "lease_s": lease_s,
        "expires_s": time.time() + lease_s,  # read by an older agent's watcher, which may still run here
        "boot": files.read_boot(),
    }
    files.write_or_overwrite(files.STATE / LEASE, json.dumps(lease))  # a full disk must not end the node


def measure_left_s() -> float | None:
    """Return the seconds until the lease expires; None without one."""
    lease = files.read_of_this_boot(files.STATE / LEASE)
    if lease is None:
        return None
    try:
        if "until_s" in lease:
            return float(lease["until_s"]) - files.read_uptime_s()
        return float(lease["expires_s"]) - time.time()  # written by an older agent
    except DAMAGE:
        return None  # like an unreadable lease: the broker renews it within a minute


def measure_rule_s(rule: dict[str, Any]) -> float:
    """Return the seconds for which an autostop rule has applied: since it was set, or since a while after a restart.

    Without the latter, a cluster that its cloud has restarted (host failure, maintenance) would run, and cost money,
    until a user looks at it. `broker start` sets the rule again.
    """
    if rule.get("boot") == files.read_boot():
        return time.time() - float(rule["set_s"])
    return files.read_uptime_s() - RESTARTED_S


def find_end() -> str:
    """Return "" to stay, "lease" or "done" to shut down. Clusters have an autostop instead of a lease."""
    left_s = measure_left_s()
    if left_s is None:
        return ""
    if left_s <= 0:
        return "lease"
    ids = files.list_run_ids()
    try:
        is_quiet = bool(ids) and files.measure_quiet_s() >= files.QUIET_S
        return "done" if is_quiet and all(is_safe_to_shut_down(run_id) for run_id in ids) else ""
    except DAMAGE:
        return ""  # the watcher must survive it: the lease still ends this node


def is_safe_to_shut_down(run_id: int) -> bool:
    """Return whether the run has ended and none of its results exists on this node alone.

    Checkpoints need no check: a program writes them to the bucket itself, and waits for the last one before it exits.
    Without a bucket, outcome and logs exist only here, so the node stays until its lease expires.
    """
    spec: dict[str, Any] = files.read_json(files.run_folder(run_id) / "spec.json") or {}
    if files.describe_run(run_id)["status"] not in files.TERMINAL or not delivery.has_bucket(spec):
        return False
    if agent_head.is_head(files.run_folder(run_id), spec):
        return delivery.is_delivered(run_id)
    # Otherwise the head, which may still be uploading, would be lost with this node.
    return not spec.get("ends_together")
