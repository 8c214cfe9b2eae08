"""The billed part of a recovery: clouds start billing at different moments."""

from __future__ import annotations

# Seconds from the request for a machine to the start of its bill, by each cloud's stated start of billing. The starts
# are documented by the clouds; the time until then is our assumption.
UNBILLED_START_S = {
    "aws": 20.0,  # in state `running`; `pending` is free (EC2 user guide, "instance lifecycle")
    "gcp": 30.0,  # RUNNING; PROVISIONING and STAGING are free ("Compute Engine instance lifecycle")
    "azure": 10.0,  # `Starting` is billed, `Creating` is not ("States and billing status of Azure Virtual Machines")
    "lambda": 180.0,  # after launch and health checks, i.e. after it has booted ("Billing", Lambda docs)
}
# Clouds that do not document it are assumed to bill from the request.

DETECT_S = 30.0  # time from a machine's end to the decision to replace the gang: only the other machines are billed


def bill_recovery_s(cloud: str, node_count: int, restart_s: float, restore_s: float) -> float:
    """Return the billed seconds, averaged over the gang's nodes, of a recovery of `restart_s` + `restore_s`."""
    detect_s = min(DETECT_S, restart_s)
    unbilled_s = detect_s / node_count + min(UNBILLED_START_S.get(cloud, 0.0), restart_s - detect_s)
    return restart_s - unbilled_s + restore_s
