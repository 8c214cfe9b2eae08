"""Set up the rehearsal of a service on this machine, and raise an error if it fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from broker.app.service_checks import check_library, check_service
from broker.app.services import drop_job_limits, drop_notice
from broker.errors import BrokerError
from broker.rehearsal.service_result import ServiceRehearsal
from broker.rehearsal.verdict import SHOWN, list_bad
from broker.types import ServiceProtocol, Task

PORT_VARIABLE = "BROKER_REPLICA_PORT"


def choose_service(task: Task, *, note: Callable[[str], None]) -> Task:
    """Return the service as it runs on this machine: one balancer on the loopback interface, without TLS.

    Raises UsageError if the task is not a service that can be rehearsed.
    """
    spec = check_service(task)
    check_library(spec)
    assert task.run is not None, "checked with the service"
    if spec.gateway is not None:
        note("note: gateways are not rehearsed; the balancer runs on this machine")
    if spec.tls is not None:
        note("note: TLS between clients and balancer is not rehearsed")
    if spec.protocol is ServiceProtocol.TCP:
        note(f"note: no requests are sent to a service with `protocol: {spec.protocol}`")
    elif spec.is_tls_passed:
        note("note: no requests are sent to a service with `tls: passthrough`")
    if PORT_VARIABLE not in task.run and spec.policy.replicas_min + spec.policy.spare_count > 1:
        note(f"note: all replicas share this machine: their program must listen on ${PORT_VARIABLE}")
    spec = replace(spec, gateway=None, tls=None)
    return replace(drop_notice(drop_job_limits(task)), service=spec)


def raise_service_failure(result: ServiceRehearsal, preemptions: int, *, is_shown: bool) -> None:
    """Raise BrokerError if the service did not start or recover, or was not preempted as requested.

    `is_shown`: the findings are on the screen already, with their hints.
    """
    bad = list_bad(result.findings)
    if bad:
        hints = [each.hint for each in bad if each.hint and not is_shown]
        raise BrokerError(SHOWN if is_shown else bad[0].text, hints=hints)
    if result.has_spot and result.forced_preemptions < preemptions:
        raise BrokerError(
            f"the rehearsal ended after {result.forced_preemptions} of {preemptions} preemptions",
            hints=["rehearse for longer with `--for`"],
        )
