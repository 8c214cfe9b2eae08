"""Map Slurm's states and error messages to broker's. One table each; tests check that both are complete.

Slurm's commands report an error as one of the fixed texts of its library (`slurm_strerror`), without a code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from broker.errors import (
    AuthError,
    CapacityError,
    CloudError,
    InvalidRequestError,
    QuotaError,
    ThrottledError,
    TransientError,
    UnknownOutcomeError,
)
from broker.sites.host_python import NO_PYTHON
from broker.types import NodeEnd, NodeState

REVOKED = "REVOKED"
# State -> ours, and why a node ended there. The names are those of `squeue -t`.
STATES: Mapping[str, tuple[NodeState, str]] = {
    "PENDING": (NodeState.PENDING, ""),
    "CONFIGURING": (NodeState.PENDING, ""),
    "REQUEUED": (NodeState.PENDING, ""),
    "REQUEUE_FED": (NodeState.PENDING, ""),
    "REQUEUE_HOLD": (NodeState.PENDING, ""),
    "SPECIAL_EXIT": (NodeState.PENDING, ""),
    "RESV_DEL_HOLD": (NodeState.PENDING, ""),
    # Waits or runs on another cluster of the federation; also shown after its end there, until Slurm forgets the job.
    REVOKED: (NodeState.PENDING, ""),
    "RUNNING": (NodeState.RUNNING, ""),
    "RESIZING": (NodeState.RUNNING, ""),
    "SIGNALING": (NodeState.RUNNING, ""),
    "SUSPENDED": (NodeState.RUNNING, ""),  # its processes exist and may continue: silent, not gone
    "STOPPED": (NodeState.RUNNING, ""),
    # Its processes may still run until Slurm has confirmed their end on every node.
    "COMPLETING": (NodeState.RUNNING, ""),
    "STAGE_OUT": (NodeState.RUNNING, ""),
    "PREEMPTED": (NodeState.TERMINATED, NodeEnd.PREEMPTED),
    "CANCELLED": (NodeState.TERMINATED, NodeEnd.TERMINATED),
    "COMPLETED": (NodeState.TERMINATED, ""),  # the exit code says why
    "FAILED": (NodeState.TERMINATED, ""),
    "TIMEOUT": (NodeState.TERMINATED, "time limit"),
    "DEADLINE": (NodeState.TERMINATED, "deadline"),
    "NODE_FAIL": (NodeState.TERMINATED, "node failure"),
    "BOOT_FAIL": (NodeState.TERMINATED, "boot failure"),
    "LAUNCH_FAILED": (NodeState.TERMINATED, "launch failure"),
    "OUT_OF_MEMORY": (NodeState.TERMINATED, NodeEnd.OUT_OF_MEMORY),
}
# Reasons of pending jobs that Slurm keeps, but never starts: they exceed a limit that holds for each single job. Limits
# of all jobs together, and of nodes that are down, pass.
HOPELESS = re.compile(
    r"(QOS|Assoc)(Max\w+Per(Job|Node)(Limit)?|Min(GRES|Memory|CpuNotSatisfied))|PartitionTimeLimit|Invalid(Account|QOS)"
)
# Exit codes of the machine (`EXIT_CODES` in local_machine.py), and of the search for its Python.
EXIT_REASONS = {
    71: NodeEnd.LEASE, 72: NodeEnd.DONE, 73: "autostop", 74: "stopped", 75: NodeEnd.TERMINATED,
    NO_PYTHON: "the host has no Python 3.8 or newer",
}  # fmt: skip

# Message of sbatch -> class. A message matches if it contains the key; the longest key wins.
ERRORS: Mapping[str, type[CloudError]] = {
    # the request itself
    "Invalid partition name specified": InvalidRequestError,
    "No partition specified or system default partition": InvalidRequestError,
    "Requested nodes not in this partition": InvalidRequestError,
    "Job size specification needs to be provided": InvalidRequestError,
    "Job script not specified": InvalidRequestError,
    "Invalid user id": InvalidRequestError,
    "Pathname of a file, directory or other parameter too long": InvalidRequestError,
    "Invalid node name specified": InvalidRequestError,
    "Task distribution specification invalid": InvalidRequestError,
    "Task count specification invalid": InvalidRequestError,
    "Invalid feature specification": InvalidRequestError,
    "Requested operation not supported on this system": InvalidRequestError,
    "Requested operation is presently disabled": InvalidRequestError,
    "Job dependency problem": InvalidRequestError,
    "Only batch jobs are accepted or processed": InvalidRequestError,
    "Invalid license specification": InvalidRequestError,
    "Requested time limit is invalid": InvalidRequestError,
    "Requested reservation is invalid": InvalidRequestError,
    "Invalid time specified": InvalidRequestError,
    "Invalid wckey specification": InvalidRequestError,
    "Invalid qos specification": InvalidRequestError,
    "CPU count specification invalid": InvalidRequestError,
    "Invalid generic resource (gres) specification": InvalidRequestError,
    "Invalid job array specification": InvalidRequestError,
    "Burst Buffer request invalid": InvalidRequestError,
    "Invalid mcs_label specified": InvalidRequestError,
    "Invalid group id": InvalidRequestError,
    "Job --batch option is invalid": InvalidRequestError,
    "Invalid Trackable RESource (TRES) specification": InvalidRequestError,
    "Invalid GRES specification": InvalidRequestError,
    "Multiple KNL NUMA and/or MCDRAM constraints": InvalidRequestError,
    "Requested GRES option unsupported by configured SelectType plugin": InvalidRequestError,
    "Invalid --nice value": InvalidRequestError,
    "Invalid time-min specification": InvalidRequestError,
    "Environment is missing in job": InvalidRequestError,
    "Multiple partition job request not supported": InvalidRequestError,
    "Cannot request more threads per core than the job allocation": InvalidRequestError,
    "Invalid preferred feature specification": InvalidRequestError,
    "Time limit specification required, but not provided": InvalidRequestError,
    "Invalid KNL configuration": InvalidRequestError,
    "Invalid cluster name": InvalidRequestError,
    "Invalid cluster feature specification": InvalidRequestError,
    # no capacity, now or ever
    "Node count specification invalid": CapacityError,
    "Requested node configuration is not available": CapacityError,
    "Requested partition configuration not available now": CapacityError,
    "Requested nodes are busy": CapacityError,
    "Immediate execution impossible": CapacityError,
    "Requested more tasks than available processors": CapacityError,
    "Memory required by task is not available": CapacityError,
    "Requested reservation is in use": CapacityError,
    "Requested reservation not usable now": CapacityError,
    "Required node not available": CapacityError,
    "Required partition not available": CapacityError,
    "Partition in DOWN state": CapacityError,
    "Job can not start immediately": CapacityError,
    "Job can not start due to maintenance reservation": CapacityError,
    "Insufficient GRES available in allocation": CapacityError,
    "Switch resources currently not available": CapacityError,
    "Required ports are in use": CapacityError,
    "Requires more ports than can be reserved": CapacityError,
    "No eligible clusters for federated job": CapacityError,
    # limits of the account
    "More processors requested than permitted": QuotaError,
    "Job violates accounting/QOS policy": QuotaError,
    "Requested account has breached requested QOS usage threshold": QuotaError,
    "Burst Buffer resource limit exceeded": QuotaError,
    # permissions
    "Access/permission denied": AuthError,
    # not in this partition: others of the cluster may be open to the user
    "User's group not permitted to use this partition": InvalidRequestError,
    "Invalid account or account/partition combination specified": InvalidRequestError,
    "Access denied to requested reservation": AuthError,
    "Burst Buffer permission denied": AuthError,
    "Protocol authentication error": AuthError,
    "Invalid authentication credential": AuthError,
    "Failed to connect to authentication agent": AuthError,
    "Authentication credential invalid": AuthError,
    "User not found on host": AuthError,
    # temporary
    "Unable to create job record, try again": ThrottledError,
    "System submissions disabled": TransientError,
    "Slurm backup controller in standby mode": TransientError,
    "Controller is in standby mode": TransientError,
    "Slurm internal error": TransientError,
    "I/O error writing script/environment to file": TransientError,
    "Error generating job credential": TransientError,
    "Unable to contact slurm controller (connect failure)": TransientError,
    "Communication connection failure": TransientError,
    "Incompatible versions of client and server code": InvalidRequestError,
    # the controller may have received it
    "Unable to contact slurm controller (send failure)": UnknownOutcomeError,
    "Unable to contact slurm controller (receive failure)": UnknownOutcomeError,
    "Unable to contact slurm controller (shutdown failure)": UnknownOutcomeError,
    "Communication shutdown failure": UnknownOutcomeError,
    "Message send failure": UnknownOutcomeError,
    "Message receive failure": UnknownOutcomeError,
    "Unexpected message received": UnknownOutcomeError,
    "Socket timed out on send/recv operation": UnknownOutcomeError,
    "Zero Bytes were transmitted or received": UnknownOutcomeError,
    "Failed to send entire message": UnknownOutcomeError,
    "Received zero length message": UnknownOutcomeError,
}
# Refusals to cancel a job that mean that it has ended, or never existed.
GONE = (
    "Invalid job id specified",
    "Job/step already completing or completed",
    "Job has already finished",
    "Job is not running",
    "Job is not pending nor running",
)
# The answer of slurmctld, not of its absence, if the site's submission plugin refuses a job; the reason precedes it.
REFUSAL = "Unspecified error"
REFUSAL_HINTS = ("the site's rules refuse the job: add what they require to `options` in `slurm.yaml`",)
ACCESS_HINTS = ("ask your site for access, or name your account: `options: [--account=NAME]` in `slurm.yaml`",)
HINTS: Mapping[type[CloudError] | str, tuple[str, ...]] = {
    "User's group not permitted to use this partition": ACCESS_HINTS,
    "Invalid account or account/partition combination specified": ACCESS_HINTS,
    AuthError: ACCESS_HINTS,
    QuotaError: ("`sacctmgr show assoc user=$USER` and `sacctmgr show qos` show your limits",),
}


def find_error(stderr: str) -> CloudError:
    """Return the error for the output of a Slurm command. An unknown text leaves the outcome unknown."""
    lines = [re.sub(r"^\w+: (error|fatal): ", "", line.strip()) for line in stderr.splitlines() if line.strip()]
    *earlier, last = lines or ["no answer"]
    last = re.sub(r"^(Batch job submission failed|allocation failure): ", "", last)
    is_refusal = last == REFUSAL
    message = f"Slurm: {'; '.join(earlier[-3:]) if is_refusal and earlier else last}"
    found = max((key for key in ERRORS if key in stderr), key=len, default=REFUSAL if is_refusal else None)
    if found == REFUSAL:
        return InvalidRequestError(message, hints=REFUSAL_HINTS)
    if found is None:
        return UnknownOutcomeError(message)
    kind = ERRORS[found]
    if kind is CapacityError:
        return CapacityError(message, scope="zone")
    return kind(message, hints=HINTS.get(found) or HINTS.get(kind, ()))


def is_hopeless(word: str) -> bool:
    """Return whether Slurm never starts a pending job with this reason."""
    return HOPELESS.fullmatch(word) is not None


def find_state(state: str) -> tuple[NodeState, str]:
    """Return a job's state and reason.

    An unknown state (of a newer Slurm) counts as running, as it may not have ended.
    """
    return STATES.get(state.split()[0] if state else "", (NodeState.RUNNING, ""))
