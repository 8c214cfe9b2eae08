"""Limits of users and projects on a server: their usage, and whether a request may start more.

Spending counts by calendar month in local time: the cost since the month began, plus the expected cost of remaining
live work. If the amount of work is unknown, that is a day at the plan's price; for a service, the rest of the month.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from broker.app.payers import BillIndex
from broker.app.reporting import Period, read_month
from broker.errors import LimitError
from broker.formatting import format_count, format_usd
from broker.frozen import frozen
from broker.state.clusters import Bill
from broker.state.limits import EVERYONE, Commitment, Limit, LimitScope
from broker.state.people import Owned
from broker.state.store import Store
from broker.types import ClusterStatus, Estimate

UNKNOWN_HOURS = 24.0
PENDING_S_MAX = 86400.0  # for a request whose server was killed before it recorded the outcome


@frozen
class LaunchSize:
    """The size of a launch: `total` gangs of each placement, at most `parallel` of them at a time."""

    kind: Owned = Owned.JOB
    names: tuple[str, ...] = ()
    parallel: int = 1
    total: int = 1


@frozen
class Amounts:
    """USD in the current month, and accelerators in use at a time."""

    usd: float
    gpus: float


def admit(store: Store, choices: Sequence[Estimate], demand: LaunchSize, *, user: str, project: str) -> int:
    """Reserve what a request may use, in one transaction; return the ID of its commitment. Raises LimitError."""
    usd, usd_hour, gpus = _measure(choices, demand)
    with store.transaction():
        now_s = store.clock.now_s()
        month = read_month(None, now_s=now_s)
        requested = Amounts(usd=_expect_rest(demand.kind, usd, usd_hour, 0.0, month, now_s), gpus=gpus)
        others = [each for each in store.commitments.list() if not _is_replaced(each, demand)]
        limits = find_limits(store.limits.list(), user=user, project=project)
        work = read_work(store) if limits else None
        for limit in limits:
            _check(limit, measure_use(store, limit, others, month, work), requested)
        for each in store.commitments.list():
            if _is_replaced(each, demand):
                store.commitments.end(each.id)
        return store.commitments.add(
            user=user, project=project, kind=demand.kind, names=demand.names, usd=usd, usd_hour=usd_hour, gpus=gpus
        )


def find_limits(limits: Sequence[Limit], *, user: str, project: str) -> Sequence[Limit]:
    """Return the limits of a user and a project. The limits of `*` apply to those without limits of their own."""
    found: list[Limit] = []
    for scope, name in ((LimitScope.USER, user), (LimitScope.PROJECT, project)):
        of_scope = [each for each in limits if each.scope is scope]
        own = [each for each in of_scope if _applies(each, user=user, project=project)]
        found += own or [replace(each, name=name) for each in of_scope if each.name == EVERYONE and name]
    return found


def _applies(limit: Limit, *, user: str, project: str) -> bool:
    """Return whether a limit is for this user or project.

    An issuer may change the case of an address between logins, which must not end a limit.
    """
    name = user if limit.scope is LimitScope.USER else project
    return limit.name.casefold() == name.casefold()


def _measure(choices: Sequence[Estimate], demand: LaunchSize) -> tuple[float | None, float, float]:
    """Return the expected USD (None without a known amount of work), the USD/h and the accelerators of the choices."""
    expected = [each.expected_usd for each in choices]
    known = [each for each in expected if each is not None]
    usd = sum(known) * demand.total if len(known) == len(expected) and demand.kind is Owned.JOB else None
    usd_hour = sum(each.placement.usd_hour for each in choices) * demand.parallel
    gpus = sum(each.placement.node_count * each.placement.offer.accelerator_count for each in choices)
    return usd, usd_hour, gpus * demand.parallel


def _is_replaced(commitment: Commitment, demand: LaunchSize) -> bool:
    """Return whether the demand is for the cluster or service of this commitment."""
    return (
        commitment.ended_s is None and not commitment.is_pending and demand.kind is not Owned.JOB
        and commitment.kind is demand.kind and commitment.names[:1] == demand.names[:1]
    )  # fmt: skip


NOTHING = Amounts(usd=0.0, gpus=0.0)


@frozen
class LimitUse:
    """A limit, and the usage that counts towards it now; for `*`, none: it applies to each user or project alone."""

    limit: Limit
    used: Amounts

    def format(self) -> tuple[str, str, str, str]:
        """Return the used and the allowed USD, and the used and the allowed GPUs, as cells of a table."""
        usd, gpus = self.limit.usd_month, self.limit.gpus
        used = ("-", "-") if self.limit.name == EVERYONE else (format_usd(self.used.usd), f"{self.used.gpus:g}")
        return used[0], "-" if usd is None else format_usd(usd), used[1], "-" if gpus is None else f"{gpus:g}"


def list_uses(store: Store) -> Sequence[LimitUse]:
    """List every limit with this month's use, and those of `*` also for each user or project that has used some."""
    limits = store.limits.list()
    if not limits:
        return ()
    month, commitments = read_month(None, now_s=store.clock.now_s()), store.commitments.list()
    payers = {(each.user.casefold(), each.project.casefold()): each for each in commitments}
    applied = [limit for each in payers.values() for limit in find_limits(limits, user=each.user, project=each.project)]
    wanted = {(each.scope, each.name.casefold()): each for each in [*applied, *limits]}
    work = read_work(store)
    uses = [LimitUse(limit=each, used=measure_use(store, each, commitments, month, work)) for each in wanted.values()]
    shown = [each for each in uses if each.limit in limits or each.used != NOTHING]
    return sorted(shown, key=lambda each: (each.limit.scope, each.limit.name))


@frozen
class BilledWork:
    """All bills and the IDs of all live jobs, which are read once for any number of limits."""

    bills: BillIndex
    live_jobs: frozenset[str]


def read_work(store: Store) -> BilledWork:
    """Read the bills and the live jobs."""
    live_jobs = frozenset(str(each) for each in store.jobs.list_live_ids())
    return BilledWork(bills=BillIndex(store.bills.list()), live_jobs=live_jobs)


def measure_use(
    store: Store, limit: Limit, commitments: Sequence[Commitment], month: Period, work: BilledWork | None = None
) -> Amounts:
    """Sum the cost of a user or project this month, and the expected cost of its live work."""
    now_s = store.clock.now_s()
    work = work or read_work(store)
    usd = gpus = 0.0
    for each in commitments:
        if not _applies(limit, user=each.user, project=each.project):
            continue
        own = work.bills.list(store, each)
        usd += sum(_pay(bill, max(bill.created_s, month.begin_s), now_s) for bill in own)
        if _is_live(store, each, work.live_jobs, now_s):
            paid_usd = sum(_pay(bill, bill.created_s, now_s) for bill in own)
            usd += _expect_rest(each.kind, each.usd, each.usd_hour, paid_usd, month, now_s)
            gpus += each.gpus
    return Amounts(usd=usd, gpus=gpus)


def _pay(bill: Bill, begin_s: float, now_s: float) -> float:
    end_s = now_s if bill.ended_s is None else bill.ended_s
    return max(0.0, end_s - begin_s) / 3600 * bill.usd_hour


def _expect_rest(
    kind: Owned, usd: float | None, usd_hour: float, paid_usd: float, month: Period, now_s: float
) -> float:
    if kind is Owned.SERVICE:
        return usd_hour * (month.end_s - now_s) / 3600
    return usd_hour * UNKNOWN_HOURS if usd is None else max(0.0, usd - paid_usd)


def _is_live(store: Store, commitment: Commitment, live_jobs: frozenset[str], now_s: float) -> bool:
    if commitment.ended_s is not None:
        return False
    if commitment.is_pending and now_s < commitment.time_s + PENDING_S_MAX:
        return True
    if commitment.kind is Owned.JOB:
        return not live_jobs.isdisjoint(commitment.names)
    name = commitment.names[0] if commitment.names else ""
    if commitment.kind is Owned.SERVICE:
        service = store.services.get(name)
        return service is not None and service.uid in commitment.names
    cluster = store.clusters.get(name)
    is_up = cluster is not None and cluster.status is not ClusterStatus.STOPPED
    return is_up or bool(store.intents.list_open(name))


def _check(limit: Limit, used: Amounts, requested: Amounts) -> None:
    """Raise LimitError for a request that exceeds a limit.

    A request that adds nothing passes, even if the limit was lowered below the current usage.
    """
    whose = f"{limit.scope.value} {limit.name}"
    hints = [
        "cancel work that is no longer needed: see `broker status` and `broker jobs queue`",
        "or ask an administrator of the server, who can change the limit with `broker server limits set`",
    ]
    if limit.usd_month is not None and requested.usd > 0 and used.usd + requested.usd > limit.usd_month:
        raise LimitError(
            f"over the monthly budget of {whose}: {format_usd(limit.usd_month)} USD, of which "
            f"{format_usd(used.usd)} USD are spent or expected; this would add {format_usd(requested.usd)} USD",
            hints=hints,
        )
    if limit.gpus is not None and requested.gpus > 0 and used.gpus + requested.gpus > limit.gpus:
        raise LimitError(
            f"over the limit of {whose}: {format_count(int(limit.gpus), 'GPU')}, of which {used.gpus:g} are in use; "
            f"this would add {requested.gpus:g}",
            hints=hints,
        )
