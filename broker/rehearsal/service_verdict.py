"""Judge the rehearsal of a service: whether it starts, replaces lost replicas, and answers meanwhile. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from broker.formatting import format_count, format_duration
from broker.rehearsal.request_load import RequestTally
from broker.rehearsal.uptime import Uptime
from broker.rehearsal.verdict import Finding, explain_import, judge_notices

EXIT_HINT = "fix the cause that the replica's log names"
PORT_HINT = (
    "let the program listen on $BROKER_REPLICA_HOST, port $BROKER_REPLICA_PORT: in a rehearsal, all replicas share "
    "this machine"
)


@dataclass(frozen=True, kw_only=True)
class Orphans:
    """Resources that still ran after the service was terminated."""

    machines: int = 0
    processes: int = 0
    has_balancer: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing was left."""
        return not (self.machines or self.processes or self.has_balancer)


def judge_start(
    uptime: Uptime, *, failure: str, has_exited: bool, last_words: str, missing_module: str
) -> list[Finding]:
    """Judge whether all wanted replicas were ready at least once.

    `failure`: why not, according to the service or its newest replica. `has_exited`: the program of that replica ended.
    `last_words`: the last line of its log. `missing_module`: the module that Python could not import, from the log.
    """
    if uptime.start_s is not None:
        return []
    if missing_module:
        return [explain_import(missing_module)]
    text = "not all replicas became ready" + (f": {failure}" if failure else "")
    findings = [Finding(level="bad", about="start", text=text, hint=EXIT_HINT if has_exited else PORT_HINT)]
    if last_words:
        findings.append(Finding(level="note", about="log", text=f"the last line of a replica's log is `{last_words}`"))
    return findings


def judge_recoveries(uptime: Uptime, *, has_spot: bool) -> list[Finding]:
    """Judge whether all lost replicas were replaced."""
    if uptime.start_s is None:
        return []
    recoveries = uptime.recoveries
    if not recoveries:
        why = "there was no preemption" if has_spot else "all replicas were on-demand, which are not preempted"
        return [Finding(level="note", about="recovery", text=f"not tested: {why}")]
    lost = format_count(sum(len(each.loss.replicas) for each in recoveries), "replica")
    took = f"{format_count(len(recoveries), 'preemption')} took {lost}"
    open_ones = [each for each in recoveries if each.recovery_s is None]
    if open_ones:
        numbers = [str(number) for each in open_ones for number in each.loss.replicas]
        missing = f"replica {numbers[0]} was" if len(numbers) == 1 else f"replicas {', '.join(numbers)} were"
        return [
            Finding(
                level="bad",
                about="recovery",
                text=f"{took}; {missing} not replaced before the end",
                hint="rehearse for longer with `--for`, or allow more regions and instance types",
            )
        ]
    times = [each.recovery_s for each in recoveries if each.recovery_s]
    if not times:
        return [Finding(level="good", about="recovery", text=f"{took}; the other replicas were enough each time")]
    words = ", ".join(format_duration(each) for each in times)
    text = f"{took}; as many as before were ready again after {words}"
    covered = len(recoveries) - len(times)
    if covered:
        text += f"; {covered} of the preemptions left enough others"
    return [Finding(level="good", about="recovery", text=text)]


def judge_availability(uptime: Uptime, *, availability: float | None, hazard: float) -> list[Finding]:
    """Compare the share of time in which enough replicas were ready with the `availability` of the task.

    `hazard`: preemptions per hour of one replica that the market model expects where the first one ran.
    """
    share = uptime.kept_share
    if share is None:
        return []
    enough = f"{uptime.wanted} or more replicas were" if uptime.wanted > 1 else "a replica was"
    text = f"{enough} ready {format_percent(share)} of {format_duration(uptime.served_s)}"
    if availability is None:
        hint = "add `availability: 0.99` below `service` for spare or on-demand replicas" if share < 1 else ""
        return [Finding(level="good" if share == 1 else "note", about="availability", text=text, hint=hint)]
    target = format_percent(availability)
    if share >= availability:
        return [Finding(level="good", about="availability", text=f"{text}; the task requires {target}")]
    text += f", less than the {target} that the task requires"
    if uptime.recoveries and hazard > 0:
        here_s = uptime.served_s / len(uptime.recoveries)
        text += f"; here, preemptions were {format_duration(here_s)} apart, and the market model expects one per "
        text += f"replica every {format_duration(3600 / hazard)}"
    return [Finding(level="note", about="availability", text=text)]


def judge_requests(tally: RequestTally, uptime: Uptime, *, availability: float | None) -> list[Finding]:
    """Judge whether the requests were answered."""
    if not tally.sent:
        return []
    if not tally.failed:
        text = f"{format_count(tally.sent, 'request')}, all answered"
        if tally.wait_s_max >= 1:
            text += f"; the slowest waited {format_duration(tally.wait_s_max)}"
        return [Finding(level="good", about="requests", text=text)]
    reasons = [f"{count} x {reason}" for reason, count in sorted(tally.failures.items(), key=lambda each: -each[1])]
    if tally.late:
        reasons.append(f"{tally.late} would have waited longer than the balancer's minute")
    text = f"{tally.failed} of {format_count(tally.sent, 'request')} failed: {'; '.join(reasons)}"
    if not tally.answered:
        return [Finding(level="bad", about="requests", text=text, hint="see what the program answers to its probe")]
    hint = ""
    if uptime.shares.get(1, 1.0) < 1.0:
        other = "add `availability`, which places them apart" if availability is None else "a higher `availability`"
        hint = f"no replica was ready at times: use more replicas, or {other}"
    return [Finding(level="note", about="requests", text=text, hint=hint)]


def judge_warned(*, given: int, ignored: int, grace_s: float) -> list[Finding]:
    """Judge how the programs reacted to warnings: for a service, ignoring one costs only the requests in flight."""
    return [
        replace(each, level="note", hint="on SIGTERM, finish the requests in flight and exit")
        if each.level == "bad"
        else each
        for each in judge_notices(given=given, ignored=ignored, grace_s=grace_s)
    ]


def judge_teardown(left: Orphans) -> list[Finding]:
    """Judge whether the service was removed completely."""
    if left.is_empty:
        return [Finding(level="good", about="teardown", text="no machine, process or balancer was left")]
    parts = [format_count(left.machines, "machine")] if left.machines else []
    parts += [f"{left.processes} process{'' if left.processes == 1 else 'es'}"] if left.processes else []
    parts += ["the balancer"] if left.has_balancer else []
    return [Finding(level="bad", about="teardown", text=f"still running after the end: {', '.join(parts)}")]


def format_percent(share: float) -> str:
    """Format a share of time with up to two decimals: `99.85%`; `100%` only if it is."""
    if share in (0.0, 1.0):
        return f"{share:.0%}"
    return f"{min(share, 0.9999) * 100:.2f}".rstrip("0").rstrip(".") + "%"
