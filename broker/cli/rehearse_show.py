"""Print the summary of a rehearsal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from broker.cli.render import print_line, print_wrapped
from broker.formatting import format_count, format_duration, format_hours, format_usd
from broker.rehearsal.result import Rehearsal, list_places
from broker.rehearsal.service_verdict import format_percent
from broker.rehearsal.verdict import Finding

if TYPE_CHECKING:
    from broker.rehearsal.service_result import ServiceRehearsal
    from broker.rehearsal.uptime import Uptime

SHARES_MAX = 3  # numbers of replicas whose share of time is shown
MARKS = {"good": "ok ", "note": "!  ", "bad": "BAD"}


def show_rehearsal(result: Rehearsal) -> None:
    """Print the summary, the findings and the forecast of a rehearsal."""
    show_verdict(list_figures(result), list_findings(result))


def show_verdict(figures: Sequence[tuple[str, str]], findings: Iterable[Finding]) -> None:
    """Print a summary of (name, text), and findings."""
    print_line()
    for name, text in figures:
        print_wrapped(f"{name:>16}  {text}", indent=18)
    print_line()
    for finding in findings:
        print_wrapped(f"{MARKS[finding.level]} {finding.about}: {finding.text}", indent=4)
        if finding.hint:
            print_wrapped(f"    -> {finding.hint}", indent=7)


def list_figures(result: Rehearsal) -> Sequence[tuple[str, str]]:
    """List the summary as (name, text)."""
    summary = result.summary
    share = 1 - summary.paid_usd / summary.ondemand_usd if summary.ondemand_usd else 0
    total = f" of {summary.steps_total}" if summary.steps_total else ""
    return [
        ("status", result.status.value),
        ("steps", f"{summary.steps}{total}"),
        ("steps lost", str(sum(each.steps_lost for each in result.resumes))),
        ("preemptions", f"{result.preemptions}; {format_count(result.refusals, 'refused request')}"),
        ("recoveries", str(summary.recoveries)),
        ("ran in", ", then ".join(list_places(result.places)) or "-"),
        (
            "simulated time",
            f"{format_duration(summary.total_s)}, {format_duration(summary.useful_s)} useful; "
            f"{format_duration(summary.recovery_s)} in recovery",
        ),
        (
            "simulated bill",
            f"{format_usd(summary.paid_usd)} USD; on-demand {format_usd(summary.ondemand_usd)}, saved {share:.0%}",
        ),
        ("measured here", _describe_measures(result) or "-"),
        ("real time", format_duration(result.real_s)),
    ]


def list_findings(result: Rehearsal) -> Iterator[Finding]:
    """Yield the findings, the forecast for the real run, and a finding if checkpoints stall longer than specified."""
    yield from result.findings
    yield _describe_forecast(result)
    stall_s = result.measures.stall_s
    if stall_s is not None and stall_s > result.checkpoint.stall_s:
        text = (
            f"a checkpoint delayed steps by {stall_s:.1f} s here; the task specifies "
            f"{result.checkpoint.stall_s:g} s (`checkpoint: stall`)"
        )
        yield Finding(level="note", about="stall", text=text)


def _describe_measures(result: Rehearsal) -> str:
    measures = result.measures
    words = []
    if measures.step_s is not None:
        words.append(f"{measures.step_s * 1000:,.0f} ms per step")
    if measures.stall_s is not None:
        words.append(f"{measures.stall_s * 1000:,.0f} ms per checkpoint")
    if measures.start_s is not None:
        words.append(f"{measures.start_s:.1f} s from start to first step")
    return ", ".join(words)


def _describe_forecast(result: Rehearsal) -> Finding:
    if result.forecast_failure:
        return Finding(level="bad", about="forecast", text=result.forecast_failure.splitlines()[0])
    estimate = result.forecast
    if estimate is None or estimate.expected_hours is None:
        text = "not available; describe the real run with `goal: {work: ...}` in the task"
        return Finding(level="note", about="forecast", text=text)
    text = (
        f"{format_usd(estimate.expected_usd)} USD and {format_hours(estimate.expected_hours)} for the real run, "
        f"{estimate.expected_preemptions or 0:.1f} preemptions expected"
    )
    if estimate.deadline_chance is not None:
        text += f"; {estimate.deadline_chance:.0%} chance to meet the deadline of {format_hours(result.deadline_hours)}"
    return Finding(level="good", about="forecast", text=text)


def list_service_figures(result: ServiceRehearsal) -> Sequence[tuple[str, str]]:
    """List the summary as (name, text)."""
    uptime, requests = result.uptime, result.requests
    return [
        ("status", "READY" if uptime.start_s is not None else "FAILED"),
        ("replicas", f"{uptime.wanted} wanted"),
        ("preemptions", f"{result.preemptions}; {format_count(result.refusals, 'refused request')} for machines"),
        ("lost replicas", _describe_losses(uptime)),
        ("ready", _describe_shares(uptime)),
        ("requests", f"{requests.sent:,} sent, {requests.answered:,} answered, {requests.failed:,} failed"),
        ("ran in", ", then ".join(list_places(result.places)) or "-"),
        ("simulated time", _describe_times(result)),
        ("simulated bill", _describe_bill(result)),
        ("measured here", _describe_service_measures(result) or "-"),
        ("real time", format_duration(result.real_s)),
    ]


def _describe_losses(uptime: Uptime) -> str:
    lost = sum(len(each.loss.replicas) for each in uptime.recoveries)
    times = [each.recovery_s for each in uptime.recoveries if each.recovery_s]
    longest = f"; ready again after at most {format_duration(max(times))}" if times else ""
    return f"{lost}{longest}"


def _describe_shares(uptime: Uptime) -> str:
    """Return the share of time for each number of replicas: `2 or more 99.85%, 1 or more 100%`."""
    counts = sorted(uptime.shares, reverse=True)[:SHARES_MAX]
    words = [f"{count} or more {format_percent(uptime.shares[count])}" for count in counts]
    return f"{', '.join(words)} of {format_duration(uptime.served_s)}" if words else "-"


def _describe_times(result: ServiceRehearsal) -> str:
    start_s = result.uptime.start_s
    start = "never ready" if start_s is None else f"{format_duration(start_s)} until all replicas were ready"
    return f"{format_duration(result.total_s)}; {start}"


def _describe_bill(result: ServiceRehearsal) -> str:
    text = f"{format_usd(result.paid_usd)} USD"
    if not result.ondemand_usd:
        return text
    return f"{text}; on-demand {format_usd(result.ondemand_usd)}, saved {1 - result.paid_usd / result.ondemand_usd:.0%}"


def _describe_service_measures(result: ServiceRehearsal) -> str:
    words = []
    if result.start_s is not None:
        words.append(f"{result.start_s:.1f} s from start to ready")
    if result.requests.median_s is not None:
        words.append(f"{result.requests.median_s * 1000:,.0f} ms per request")
    return ", ".join(words)
