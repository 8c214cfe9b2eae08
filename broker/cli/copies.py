"""Show the cost of copying a task's buckets to its nodes, before anything is paid."""

from __future__ import annotations

from collections.abc import Sequence

from broker.app.container import Context
from broker.cli.render import print_note
from broker.errors import AuthError, MissingPackageError, TransientError
from broker.formatting import format_usd
from broker.types import Plan


def note_copies(context: Context, plans: Sequence[Plan]) -> None:
    """Print a line for each copied bucket; a bucket that cannot be queried is only noted.

    Raises InvalidRequestError for a missing bucket, and for a mount that no node can have.
    """
    if not any(plan.task.storage_mounts for plan in plans):
        return
    from broker.optimizer.egress import EgressTable
    from broker.storage.mounts import measure_mounts, plan_mounts, price_mounts

    table: EgressTable | None = None
    for plan in plans:
        steps = plan_mounts(plan.task)
        try:
            sizes = measure_mounts(steps)
        except (AuthError, TransientError, MissingPackageError) as error:
            print_note(f"unknown copy cost: {error.message}")
            continue
        table = table or EgressTable.from_prices(context.book.read_egress())
        placement = plan.choice.placement
        for price in price_mounts(sizes, cloud=placement.offer.cloud, node_count=placement.node_count, table=table):
            nodes = f" to {placement.node_count} nodes" if placement.node_count > 1 else ""
            cost = f"{format_usd(price.usd)} USD at every start" if price.usd else "free within a cloud"
            print_note(f"copying `{price.url}`{nodes}: {price.gib:,.2f} GiB each, {cost}")
