"""Coverage of faults by job state: an empty cell that can occur is a history that was never examined."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from tests.simulation.disk import SQLITE_FAULTS
from tests.simulation.events import TERMINAL
from tests.simulation.mixes import CLOUD_RATES_MAX

STATES = ("PENDING", "STARTING", "RUNNING", "RECOVERING", "CANCELLING", "ENDED")
ASKING = ("STARTING", "RECOVERING")  # nodes are only requested then
ENDING = ("ENDED", "RECOVERING")  # nodes are normally ended only then
AT_WORK = ("STARTING", "RUNNING")
BUSY = ("STARTING", "RUNNING", "RECOVERING", "ENDED")
ALWAYS = (*BUSY, "CANCELLING")
CALLS = ("create", "list", "terminate")
OF_EACH_CALL = ("transient", "throttled", "auth")
OF_CHANGES = ("unknown_before", "unknown_after")  # a list has no effect that could be lost
OF_CREATE = ("late", "full", "quota", "partial", "stuck", "mute")
OF_LIST = ("forgotten", "blank", "blackout", "stale", "behind", "repeated", "silent")
OF_TERMINATE = ("ignored", "refused")
OF_THE_HOST = ("power:cut", "disk:full", "suspend", "owner:lost", "account:other")
COMMANDS = ("cancel", "down", "gc", "retry", "launch", "submit again")
RARE = {"auth", "quota", "blackout"}  # too rare, or too often fatal, to be seen in every state


def list_cells() -> Iterator[tuple[str, str]]:
    """List every cell that must be hit."""
    states = {"create": ASKING, "list": ALWAYS, "terminate": ENDING}
    of_call = {"create": (*OF_CHANGES, *OF_CREATE), "list": OF_LIST, "terminate": (*OF_CHANGES, *OF_TERMINATE)}
    for call in CALLS:
        for fault in (*OF_EACH_CALL, *of_call[call]):
            wanted = states[call][:1] if fault in RARE else states[call]
            yield from ((f"{call}:{fault}", state) for state in wanted)
    yield from (("boot:never", state) for state in ASKING)
    yield from (("preempt", state) for state in AT_WORK)
    yield from (("partition", state) for state in AT_WORK)
    yield from (("partition:gang", state) for state in AT_WORK)
    for fault in (*SQLITE_FAULTS, "kill:point", "kill:anytime", "stop", *OF_THE_HOST):
        yield from ((fault, state) for state in ALWAYS)
    yield from (("clock:jump", state) for state in BUSY)
    yield "move", "RECOVERING"  # a spot policy requests it for a job with a deadline
    yield "bucket:silent", "RUNNING"  # looked into when a running attempt seems lost
    for command in COMMANDS:
        yield from ((f"command:{command}", state) for state in BUSY)


def fold(cells: Mapping[tuple[str, str], int]) -> Counter[tuple[str, str]]:
    """Merge all ends of a job into one state."""
    folded: Counter[tuple[str, str]] = Counter()
    for (fault, status), count in cells.items():
        folded[fault, "ENDED" if status in TERMINAL else status] += count
    return folded


def find_empty(cells: Mapping[tuple[str, str], int]) -> list[tuple[str, str]]:
    return [cell for cell in list_cells() if not cells.get(cell)]


def render(cells: Mapping[tuple[str, str], int]) -> Iterator[str]:
    wanted = set(list_cells())
    yield f"{'fault':24}" + "".join(f"{state:>11}" for state in STATES)
    for fault in sorted({fault for fault, _ in wanted} | {fault for fault, _ in cells}):
        row = [(cells.get((fault, state), 0), (fault, state) in wanted) for state in STATES]
        yield f"{fault:24}" + "".join(f"{count or ('EMPTY' if is_wanted else '.'):>11}" for count, is_wanted in row)


def list_fault_names() -> set[str]:
    """List the cloud faults in this table by their names in `FaultRates`."""
    return {*OF_EACH_CALL, *OF_CHANGES, *OF_CREATE, *OF_LIST, *OF_TERMINATE, "never_boots"}


assert list_fault_names() == set(CLOUD_RATES_MAX), "every fault of the cloud has its row"
