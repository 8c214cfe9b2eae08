"""Print the summary of a rehearsal."""

from __future__ import annotations

from broker.cli.render import print_line, print_wrapped
from broker.formatting import format_count, format_duration, format_hours, format_usd
from broker.rehearsal.result import Rehearsal, list_places

MARKS = {"good": "ok ", "note": "!  ", "bad": "BAD"}


def show_rehearsal(result: Rehearsal) -> None:
    """Print the summary, the findings and the forecast of a rehearsal."""
    summary, measures = result.summary, result.measures
    share = 1 - summary.paid_usd / summary.ondemand_usd if summary.ondemand_usd else 0
    total = f" of {summary.steps_total}" if summary.steps_total else ""
    lost = sum(each.steps_lost for each in result.resumes)
    print_line()
    for name, text in [
        ("status", result.status.value),
        ("steps", f"{summary.steps}{total}"),
        ("steps lost", str(lost)),
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
        ("measured here", _say_measures(result) or "-"),
        ("real time", format_duration(result.real_s)),
    ]:
        print_wrapped(f"{name:>16}  {text}", indent=18)
    print_line()
    for finding in result.findings:
        print_wrapped(f"{MARKS[finding.level]} {finding.about}: {finding.text}", indent=4)
        if finding.hint:
            print_wrapped(f"    -> {finding.hint}", indent=7)
    _show_forecast(result)
    if measures.stall_s is not None and measures.stall_s > result.checkpoint.stall_s:
        print_wrapped(
            f"!   stall: a checkpoint delayed steps by {measures.stall_s:.1f} s here; the task specifies "
            f"{result.checkpoint.stall_s:g} s (`checkpoint: stall`)",
            indent=4,
        )


def _say_measures(result: Rehearsal) -> str:
    measures = result.measures
    words = []
    if measures.step_s is not None:
        words.append(f"{measures.step_s * 1000:,.0f} ms per step")
    if measures.stall_s is not None:
        words.append(f"{measures.stall_s * 1000:,.0f} ms per checkpoint")
    if measures.start_s is not None:
        words.append(f"{measures.start_s:.1f} s from start to first step")
    return ", ".join(words)


def _show_forecast(result: Rehearsal) -> None:
    if result.forecast_failure:
        print_wrapped(f"{MARKS['bad']} forecast: {result.forecast_failure.splitlines()[0]}", indent=4)
        return
    estimate = result.forecast
    if estimate is None or estimate.expected_hours is None:
        print_wrapped(
            "!   forecast: not available; describe the real run with `goal: {work: ...}` in the task", indent=4
        )
        return
    text = (
        f"forecast: {format_usd(estimate.expected_usd)} USD and {format_hours(estimate.expected_hours)} "
        "for the real run, "
        f"{estimate.expected_preemptions or 0:.1f} preemptions expected"
    )
    mark = MARKS["good"]
    if estimate.deadline_chance is not None:
        text += f"; {estimate.deadline_chance:.0%} chance to meet the deadline of {format_hours(result.deadline_hours)}"
    print_wrapped(f"{mark} {text}", indent=4)
