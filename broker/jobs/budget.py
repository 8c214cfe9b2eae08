"""Whether a job may cost more: what its goal allows against what its machines have cost so far."""

from __future__ import annotations

from broker.clock import Clock
from broker.state.store import Store
from broker.types import Job
from broker.wording import explain_budget


class Overspent(Exception):
    """The search for machines has used up what was left of the budget."""


def check_budget(job: Job, store: Store, clock: Clock) -> None:
    """Raises Overspent when the job may not cost more."""
    if failure := find_overspending(job, store, clock):
        raise Overspent(failure)


def find_overspending(job: Job, store: Store, clock: Clock) -> str:
    """Why the job may not cost more; empty while it may."""
    budget_usd = job.task.goal.budget_usd if job.task.goal else None
    if budget_usd is None:
        return ""
    spent_usd = store.bills.spend_usd(job_id=job.id, now_s=clock.now_s())
    if spent_usd < budget_usd:
        return ""
    return explain_budget(budget_usd, spent_usd)
