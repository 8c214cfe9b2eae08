"""Refresh clusters from their clouds; a cloud that fails does not affect the others."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from broker.app.container import Context
from broker.errors import CloudError
from broker.types import Cluster


async def refresh_clusters(
    context: Context, clusters: Sequence[Cluster]
) -> tuple[Sequence[Cluster], Mapping[str, CloudError]]:
    """Refresh in the same order, keeping the last known state on failure; return failures by cloud."""
    failures: dict[str, CloudError] = {}

    async def refresh(cluster: Cluster) -> Cluster:
        try:
            return await context.provisioner.refresh(cluster) if cluster.nodes else cluster
        except CloudError as error:
            failures.setdefault(cluster.placement.offer.cloud, error)
            return cluster

    return await asyncio.gather(*(refresh(each) for each in clusters)), failures


def raise_failures(failures: Mapping[str, CloudError]) -> None:
    """Raise CloudError, after everything known is shown: its exit code tells scripts that some of it is outdated."""
    if failures:
        raise CloudError(
            f"could not query {' and '.join(failures)}: clusters there show their last known state",
            details=[f"{name}: {error.message}" for name, error in failures.items()],
            hints=list(dict.fromkeys(hint for error in failures.values() for hint in error.hints)),
        )
