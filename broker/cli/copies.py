"""Says what bringing a task's buckets to its nodes costs, before anything is paid for."""

from __future__ import annotations

from collections.abc import Sequence

from broker.cli.context import Context
from broker.cli.render import print_note, show_usd
from broker.errors import AuthError, MissingPackageError, TransientError
from broker.types import Plan


def note_copies(context: Context, plans: Sequence[Plan]) -> None:
    """One line a bucket that is copied. A bucket that is not there stops the launch; one that cannot be asked does not.

    Raises InvalidRequestError for a mount that no node can be given, too.
    """
    if not any(plan.task.storage_mounts for plan in plans):
        return
    from broker.optimizer.dag_egress import EgressTable
    from broker.storage.mounts import measure_mounts, plan_mounts, price_mounts

    table: EgressTable | None = None
    for plan in plans:
        steps = plan_mounts(plan.task)
        try:
            sizes = measure_mounts(steps)
        except (AuthError, TransientError, MissingPackageError) as error:
            print_note(f"what copying costs is not known: {error.message}")
            continue
        table = table or EgressTable.from_prices(context.book.read_egress())
        placement = plan.choice.placement
        for price in price_mounts(sizes, cloud=placement.offer.cloud, node_count=placement.node_count, table=table):
            nodes = f" to {placement.node_count} nodes" if placement.node_count > 1 else ""
            cost = f"{show_usd(price.usd)} USD, at every start" if price.usd else "free within a cloud"
            print_note(f"copying `{price.url}`{nodes}: {price.gib:,.2f} GiB each, {cost}")
