"""The events that checkers receive, and the violation they raise when an invariant does not hold."""

from __future__ import annotations

from dataclasses import dataclass

from broker.types import IntentEnd, JobStatus, Node, NodeRequest, OutcomeKind
from tests.simulation.machines import MachineRun
from tests.simulation.processes import Process

TERMINAL = tuple(status.value for status in JobStatus if status.is_terminal)
LOST = (OutcomeKind.PREEMPTED, OutcomeKind.NODE_LOST, OutcomeKind.TAKEN_DOWN)  # its nodes were
LIMITED = (OutcomeKind.BUDGET_EXCEEDED, OutcomeKind.MAX_DURATION_EXCEEDED)  # it was not heard to succeed
REFUSED = (IntentEnd.REFUSED.value, IntentEnd.QUOTA_EXCEEDED.value, IntentEnd.UNCLEAR.value)  # intents
OTHER_FAILURES = (  # than an exit code
    OutcomeKind.BUDGET_EXCEEDED,
    OutcomeKind.MAX_DURATION_EXCEEDED,
    OutcomeKind.STALLED,
    OutcomeKind.GANG_BROKEN,
    OutcomeKind.UNHEALTHY,
)
IS_TERMINAL = f"status IN {TERMINAL}"


class Violation(Exception):
    def __init__(self, letter: str, text: str) -> None:
        super().__init__(f"{letter}: {text}")
        self.letter = letter


@dataclass(frozen=True, kw_only=True)
class Event:
    kind: str
    time_s: float
    process: Process | None = None
    request: NodeRequest | None = None
    node: Node | None = None
    run: MachineRun | None = None
    step: int = 0
    name: str = ""  # of a cluster that is searched for, or of a node
    lease_s: float = 0.0
    reason: str = ""
    late_s: float = 0.0  # how long before the request a list was started
    written: tuple[str, ...] = ()

    def __str__(self) -> str:
        what = {
            "ask": lambda: f"{self.request.cluster} {self.request.token[:6]}" if self.request else "",
            "create": lambda: f"{self.request.cluster} {self.request.token[:6]}" if self.request else "",
            "terminate": lambda: f"{self.node.id} of {self.node.cluster}" if self.node else "",
            "start": lambda: f"{self.run.cluster} from step {self.run.first_step}" if self.run else "",
            "release": lambda: f"{self.run.cluster} attempt {self.run.attempt}" if self.run else "",
            "save": lambda: f"{self.run.cluster} step {self.step}" if self.run else "",
            "commit": lambda: " ".join(self.written),
            "search": lambda: self.name,
            "lease": lambda: f"{self.name} {self.lease_s:.0f} s",
            "self-end": lambda: f"{self.name} {self.reason}",
        }.get(self.kind, lambda: "")()
        return f"{self.process.name if self.process else 'world'} {self.kind} {what}"
