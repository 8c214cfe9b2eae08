"""Render how attempts and jobs ended: a short phrase for each kind of outcome, and the reason for a failure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from broker.formatting import format_duration, format_usd
from broker.types.outcomes import Outcome, OutcomeKind

_OUTCOMES: dict[OutcomeKind, Callable[[Outcome], str]] = {
    OutcomeKind.SUCCEEDED: lambda _: "succeeded",
    OutcomeKind.PROGRAM_FAILED: lambda outcome: f"failed with exit code {outcome.exit_code}",
    OutcomeKind.SETUP_FAILED: lambda _: "failed in setup",
    OutcomeKind.STALLED: lambda outcome: f"stalled at step {outcome.step}",
    OutcomeKind.GANG_BROKEN: lambda outcome: f"gang failed at step {outcome.step}",
    OutcomeKind.PREEMPTED: lambda outcome: f"{_explain('preempted', outcome.detail)}{_after(outcome.step)}",
    OutcomeKind.NODE_LOST: lambda outcome: f"{outcome.detail or 'node lost'}{_after(outcome.step)}",
    OutcomeKind.UNHEALTHY: lambda outcome: _explain("unhealthy", outcome.detail),
    OutcomeKind.TAKEN_DOWN: lambda _: "the cluster was taken down",
    OutcomeKind.LEASE_EXPIRED: lambda outcome: (
        f"the unattended allowance of {outcome.detail} expired{_after(outcome.step)}"
    ),
    OutcomeKind.DISPLACED: lambda outcome: _explain("displaced", outcome.detail),
    OutcomeKind.MOVED: lambda outcome: _explain("moved", outcome.detail),
    OutcomeKind.LAUNCH_FAILED: lambda outcome: _explain("not started", outcome.detail),
    OutcomeKind.REFUSED: lambda outcome: _explain("refused", outcome.detail),
    OutcomeKind.FILES_LOST: lambda _: "files were not uploaded",
    OutcomeKind.BUDGET_EXCEEDED: lambda _: "budget exceeded",
    OutcomeKind.MAX_DURATION_EXCEEDED: lambda _: "max_duration reached",
    OutcomeKind.CANCELLED: lambda _: "cancelled",
    OutcomeKind.SUPERSEDED: lambda _: "the state was restored",
    OutcomeKind.GANG_INCOMPLETE: lambda _: "the state was restored, but nodes of the gang were missing",
    OutcomeKind.GROUP_RESTARTED: lambda outcome: _explain("restarted with its group", outcome.detail),
    OutcomeKind.GROUP_MOVED: lambda outcome: _explain("moved with its group", outcome.detail),
    OutcomeKind.GROUP_ENDED: lambda _: "ended with its group",
    OutcomeKind.NO_OFFER: lambda outcome: outcome.detail,
    OutcomeKind.DEPENDENCY_FAILED: lambda outcome: outcome.detail,
    OutcomeKind.OTHER: lambda outcome: outcome.detail,
}


def describe_outcome(outcome: Outcome | None) -> str:
    """Return a short description of how an attempt ended; empty while it has not."""
    return "" if outcome is None else _OUTCOMES[outcome.kind](outcome)


# -- details of outcomes and errors


def describe_lost_nodes(ranks: Sequence[int]) -> str:
    return f"node {' and '.join(map(str, ranks))} gone"


def describe_notice() -> str:
    return "the cloud gave notice"


def describe_slow_node(*, own_s: float, usual_s: float, saved_s: float) -> str:
    """Return the reason for replacing a slow node, which shortens the rest of the job by `saved_s`."""
    times = f"{own_s:.3g} s for its own part of a step, {usual_s:.3g} s on the others"
    return f"{times}; without it, the rest of the job takes about {format_duration(saved_s)} less"


def describe_lost_start(error: str) -> str:
    return f"lost while starting: {error}"


def explain_exit(
    exit_code: int | None, *, cause: str = "", times: int = 1, step: int | None = None, checkpoint: int = 0
) -> str:
    """Return the reason for the failure of a job whose program exited with an error.

    `step`: the step that it reported; without one, `checkpoint`: the number of its newest checkpoint, if it has one.
    """
    at = f" after checkpoint {checkpoint}" if checkpoint else " without a reported step"
    count = f", {times} times{at}" if times > 1 and not step else _count(times, step)
    return f"`run` exited with {name_exit_code(exit_code, cause)}{count}"


def explain_setup_exit(exit_code: int | None) -> str:
    return f"`setup` exited with code {exit_code}"


def explain_stall(timeout_s: float, *, times: int = 1, step: int | None = None) -> str:
    return f"no new step for {timeout_s:g} s{_count(times, step)}"


def explain_broken_gang(reason: str, *, times: int = 1, step: int | None = None) -> str:
    return f"the gang failed ({reason}){_count(times, step)}"


def explain_unhealthy(reason: str, *, times: int) -> str:
    return (
        f"{times} nodes failed the check of their GPUs, the last one: {reason}; "
        "`job_recovery: {health_check: false}` disables the check"
    )


def explain_lost_files(unflushed: str) -> str:
    return f"the program succeeded, but {unflushed}; they are lost with the nodes, which are terminated"


def explain_cancelled_run() -> str:
    return "the run was cancelled on its cluster"


def explain_budget(budget_usd: float, spent_usd: float) -> str:
    spent = f"the budget of {format_usd(budget_usd)} USD is used up ({format_usd(spent_usd)} USD spent)"
    return f"{spent}; its checkpoints are kept"


def describe_displacement(job_id: int) -> str:
    return f"job {job_id} has a higher priority"


def explain_max_duration(limit_s: float) -> str:
    return f"its `max_duration` of {format_duration(limit_s)} has passed; its checkpoints are kept"


def explain_dependency(job_id: int | None, name: str, status: str) -> str:
    """Return the reason for a failed dependency; `job_id` is None if that job no longer exists."""
    job = "another job" if job_id is None else f"job {job_id} ({name})"
    return f"it depends on {job}, which is {status}"


def explain_group_failure(job_id: int, name: str, status: str) -> str:
    """Return the reason why a job of a group was ended by the failure of another one."""
    return f"its group failed: job {job_id} ({name}) is {status}"


def explain_failed_launches(tries: int, error: str) -> str:
    return f"the program could not be started on {tries} clusters: {error}"


# -- parts of sentences


def _explain(what: str, detail: str) -> str:
    return f"{what}: {detail}" if detail else what


def _after(step: int | None) -> str:
    return "" if step is None else f" after step {step}"


def _count(times: int, step: int | None) -> str:
    return f", {times} times at step {step}" if times > 1 else ""


def name_exit_code(exit_code: int | None, cause: str) -> str:
    return f"code {exit_code} ({cause})" if cause else f"code {exit_code}"
