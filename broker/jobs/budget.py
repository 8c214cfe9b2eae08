"""Check a job's spending so far against the budget of its goal."""

from __future__ import annotations

from broker.clock import Clock
from broker.state.store import Store
from broker.types import Job
from broker.wording import explain_budget


class BudgetExceeded(Exception):
    """Raised when the search for machines has used up the rest of the budget."""


def check_budget(job: Job, store: Store, clock: Clock) -> None:
    """Raise BudgetExceeded if the budget is used up."""
    if failure := find_overspending(job, store, clock):
        raise BudgetExceeded(failure)


def find_overspending(job: Job, store: Store, clock: Clock) -> str:
    """Return why the job may not spend more; empty while it may."""
    budget_usd = job.task.goal.budget_usd if job.task.goal else None
    if budget_usd is None:
        return ""
    spent_usd = store.bills.spend_usd(job_id=job.id, now_s=clock.now_s())
    if spent_usd < budget_usd:
        return ""
    return explain_budget(budget_usd, spent_usd)
