"""Outcomes and events of attempts and jobs, as kinds with data.

Code compares kinds. Only `broker/wording` turns them into sentences, and no code parses a sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from broker.frozen import frozen


class OutcomeKind(StrEnum):
    """The ways in which an attempt or a job ends. The values are stored, and shown by `--json`."""

    SUCCEEDED = "succeeded"
    PROGRAM_FAILED = "program_failed"  # the program exited on its own with an error code
    SETUP_FAILED = "setup_failed"
    STALLED = "stalled"  # no new step within the task's stall timeout
    GANG_BROKEN = "gang_broken"  # a rank was lost, and no program failed on its own
    PREEMPTED = "preempted"  # a spot market took nodes, or gave notice
    NODE_LOST = "node_lost"  # on-demand nodes were lost
    UNHEALTHY = "unhealthy"  # the check of a node's GPUs found a fault before the program started
    TAKEN_DOWN = "taken_down"  # a user terminated the cluster
    LEASE_EXPIRED = "lease_expired"  # no broker renewed the nodes' lease
    DISPLACED = "displaced"  # a waiting job of higher priority took its slot
    MOVED = "moved"  # the spot policy chose another place
    LAUNCH_FAILED = "launch_failed"  # the program could not be started on its nodes
    REFUSED = "refused"  # the task or the account is at fault, so another cluster would not help
    FILES_LOST = "files_lost"  # the program succeeded, but files that it wrote did not reach their bucket
    BUDGET_EXCEEDED = "budget_exceeded"
    MAX_DURATION_EXCEEDED = "max_duration_exceeded"
    CANCELLED = "cancelled"
    SUPERSEDED = "superseded"  # after a restore, a newer attempt was found running
    GANG_INCOMPLETE = "gang_incomplete"  # after a restore, some of its nodes were missing
    GROUP_RESTARTED = "group_restarted"  # its job group restarted because another task was lost
    GROUP_MOVED = "group_moved"  # its job group continues in another region
    GROUP_ENDED = "group_ended"  # the primary tasks of its job group have succeeded
    NO_OFFER = "no_offer"  # of jobs only
    DEPENDENCY_FAILED = "dependency_failed"  # of jobs only
    OTHER = "other"  # recorded before kinds existed, as a sentence that does not match any kind


@frozen
class Outcome:
    """The end of an attempt: `detail` for people, the newest `step` at that time, and the program's `exit_code`."""

    kind: OutcomeKind
    detail: str = ""
    step: int | None = None
    exit_code: int | None = None


class IntentEnd(StrEnum):
    """The outcomes of an intent to create nodes."""

    UP = "up"
    ADOPTED = "adopted"  # after a restore
    TERMINATED = "terminated"  # any nodes that were created are confirmed gone
    NEVER_ASKED = "never_asked"
    REFUSED = "refused"
    QUOTA_EXCEEDED = "quota_exceeded"
    UNCLEAR = "unclear"  # no clear answer, and no nodes remain


class EventKind(StrEnum):
    """The kinds of events of a job or a cluster. The values are stored, and shown by `--json`."""

    # A job's attempts
    ATTEMPT = "attempt"
    ATTEMPT_IN_PLACE = "attempt_in_place"
    STARTED = "started"
    RECOVERED = "recovered"
    ATTEMPT_LOST = "attempt_lost"
    LEASE_EXPIRED = "lease_expired"
    PROGRAM_RESTARTED = "program_restarted"
    STALL_RESTARTED = "stall_restarted"
    GANG_RESTARTED = "gang_restarted"
    SETUP_RETRIED = "setup_retried"
    SETUP_RESTORED = "setup_restored"  # from an archive, so that `setup` did not run
    SETUP_KEPT = "setup_kept"
    SETUP_NOT_KEPT = "setup_not_kept"
    LAUNCH_RETRIED = "launch_retried"
    NODES_GIVEN_BACK = "nodes_given_back"
    GROUP_PLACED = "group_placed"
    GROUP_READY = "group_ready"
    GROUP_STARTED = "group_started"
    GROUP_RESTARTED = "group_restarted"
    GROUP_MOVE = "group_move"
    LAST_LINES = "last_lines"
    ENDED = "ended"
    SCHEDULED = "scheduled"
    # While it runs or waits
    DECISION = "decision"
    LATE = "late"
    WAITING = "waiting"
    QUEUED = "queued"
    DISPLACING = "displacing"  # the job takes the slot of another job
    DISPLACED = "displaced"  # the job must return its slot to another job
    SLOT_RETURNED = "slot_returned"
    ADVISED = "advised"
    NOTICED = "noticed"  # the cloud announced the preemption of a node
    UNSEEN = "unseen"
    LOGIN_NEEDED = "login_needed"
    FLUSHING = "flushing"
    NODE_UNHEALTHY = "node_unhealthy"
    NODE_SLOW = "node_slow"
    NETWORK_SLOW = "network_slow"
    SHRUNK = "shrunk"
    HEAD_MOVED = "head_moved"
    UNFIT = "unfit"
    REPLACEMENT_FAILED = "replacement_failed"
    ACCESS_NOT_RENEWED = "access_not_renewed"
    # The search for nodes
    PLACE_ASKED = "place_asked"
    PLACE_HEDGED = "place_hedged"
    PLACE_WHOLE = "place_whole"
    PLACE_REFUSED = "place_refused"
    PLACE_SKIPPED = "place_skipped"
    REGION_SKIPPED = "region_skipped"
    CLOUD_SKIPPED = "cloud_skipped"
    CALL_FAILED = "call_failed"
    CALL_UNCLEAR = "call_unclear"
    PLACE_GIVEN_UP = "place_given_up"
    PLACE_UNNEEDED = "place_unneeded"
    PLACE_RETURNED = "place_returned"
    LAST_PLACES = "last_places"
    # Clusters and nodes
    UP = "up"
    DOWN = "down"
    REPLACED = "replaced"
    COLLECTED = "collected"
    CLUSTER_ADOPTED = "cluster_adopted"
    ATTEMPT_ADOPTED = "attempt_adopted"
    RESTORED = "restored"
    NOTE = "note"  # a sentence recorded before kinds existed, or a row that cannot be read


EventData = Mapping[str, object]  # JSON values


@frozen
class Event:
    """An event of a job or a cluster; `data` are the values that `broker/wording` needs to describe its kind."""

    kind: EventKind
    data: EventData


def make_event(kind: EventKind, **data: object) -> Event:
    """Return an event; `data` are the parameters of the function in `broker.wording` that renders it."""
    return Event(kind=kind, data=data)
