"""Which part of a recovery is billed: clouds start the clock at different moments."""

from __future__ import annotations

# Seconds between asking for a machine and the start of its bill, by when each cloud says that its bill starts. The
# moments are the clouds' own words; how long it takes to reach them is assumed.
UNBILLED_START_S = {
    "aws": 20.0,  # the instance enters `running`; `pending` is free (EC2 user guide, "instance lifecycle")
    "gcp": 30.0,  # RUNNING; PROVISIONING and STAGING are free ("Compute Engine instance lifecycle")
    "azure": 10.0,  # `Starting` is billed, `Creating` is not ("States and billing status of Azure Virtual Machines")
    "lambda": 180.0,  # launched and its health checks passed, which is after it has booted ("Billing", Lambda docs)
}
# Clouds that don't say are taken to bill from the request.

DETECT_S = 30.0  # from a machine's end to the decision to replace the gang: the lost one costs nothing, the others do


def bill_recovery_s(cloud: str, node_count: int, restart_s: float, restore_s: float) -> float:
    """Billed seconds, on average over the gang's nodes, of a recovery of `restart_s` + `restore_s`."""
    detect_s = min(DETECT_S, restart_s)
    unbilled_s = detect_s / node_count + min(UNBILLED_START_S.get(cloud, 0.0), restart_s - detect_s)
    return restart_s - unbilled_s + restore_s
