"""Define the read model of a server's users: their roles, resources, costs, and changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from broker.app.container import Context
from broker.app.payers import UNOWNED, find_payers
from broker.dashboard.model import find_starts
from broker.frozen import frozen
from broker.state.people import AuditEvent, Owned, Role, Token

AUDIT_MAX = 200  # the newest events that match
ORDER = (Role.VIEWER, Role.USER, Role.ADMIN)


@frozen
class PersonRow:
    """One user, with all of its tokens. `user` is None for jobs and clusters that were started on the server itself.

    `role` is the highest of the valid tokens, None without any; `changed_s` is the time of the user's last change:
    reading is not recorded.
    """

    user: str | None
    role: Role | None
    token_count: int  # valid ones
    changed_s: float | None
    live_jobs: int
    jobs: int
    clusters: int
    month_usd: float


def read_people(context: Context) -> Sequence[PersonRow]:
    """List everyone who has a token, owns something or changed something, the largest spending of the month first."""
    store, now_s = context.store, context.clock.now_s()
    owners, changed = store.owners.list(), store.audit.list_newest_s()
    tokens: dict[str | None, list[Token]] = defaultdict(list)
    for token in store.tokens.list():
        tokens[token.user].append(token)
    jobs: dict[str | None, list[bool]] = defaultdict(list)
    for line in store.jobs.list_lines(on_damage=context.warn):
        jobs[owners.get((Owned.JOB, str(line.id)))].append(not line.status.is_terminal)
    clusters: dict[str | None, int] = defaultdict(int)
    for cluster in store.clusters.list(on_damage=context.warn):
        if cluster.job_id is None:
            clusters[owners.get((Owned.CLUSTER, cluster.name))] += 1
    spent = _sum_month_usd(context, now_s)
    rows = [
        PersonRow(
            user=user,
            role=max((each.role for each in valid), key=ORDER.index, default=None),
            token_count=len(valid),
            changed_s=changed.get(user) if user is not None else None,
            live_jobs=sum(jobs[user]),
            jobs=len(jobs[user]),
            clusters=clusters[user],
            month_usd=spent.get(user, 0.0),
        )
        for user in {*tokens, *jobs, *clusters, *spent, *changed}
        for valid in [[each for each in tokens[user] if _is_valid(each, now_s)]]
    ]
    return sorted(rows, key=lambda row: (-row.month_usd, row.user or ""))


def list_audit(context: Context, *, user: str, verb: str, outcome: str) -> Sequence[AuditEvent]:
    """List the newest changes, newest first; an empty filter admits all."""
    found = context.store.audit.list(newest=AUDIT_MAX, user=user or None, verb=verb or None, outcome=outcome or None)
    return found[::-1]


def _is_valid(token: Token, now_s: float) -> bool:
    return token.revoked_s is None and (token.expires_s is None or token.expires_s > now_s)


def _sum_month_usd(context: Context, now_s: float) -> Mapping[str | None, float]:
    """Sum the bills of this month, local time, by their payer, as `broker cost --by user` does."""
    _, month_s = find_starts(now_s)
    found: dict[str | None, float] = defaultdict(float)
    bills = context.store.bills.list(on_damage=context.warn)
    payers = find_payers(context.store, bills)
    for bill in bills:
        hours = ((now_s if bill.ended_s is None else bill.ended_s) - max(bill.created_s, month_s)) / 3600
        if hours > 0:
            user = payers[bill.cloud, bill.node].user
            found[None if user == UNOWNED else user] += hours * bill.usd_hour
    return found
