"""Clusters as their clouds list them now; one cloud that gives no answer keeps nobody from the others' news."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from broker.cli.context import Context
from broker.errors import CloudError
from broker.types import Cluster


async def refresh_clusters(
    context: Context, clusters: Sequence[Cluster]
) -> tuple[Sequence[Cluster], Mapping[str, CloudError]]:
    """In the same order, as last known where the cloud could not be asked; why not, by cloud."""
    failures: dict[str, CloudError] = {}

    async def refresh(cluster: Cluster) -> Cluster:
        try:
            return await context.provisioner.refresh(cluster) if cluster.nodes else cluster
        except CloudError as error:
            failures.setdefault(cluster.placement.offer.cloud, error)
            return cluster

    return await asyncio.gather(*(refresh(each) for each in clusters)), failures


def raise_unasked(failures: Mapping[str, CloudError]) -> None:
    """Said when all that is known has been shown: a script hears by the exit code that some of it is old."""
    if failures:
        raise CloudError(
            f"{' and '.join(failures)} could not be asked: clusters there are shown as they were last known",
            details=[f"{name}: {error.message}" for name, error in failures.items()],
            hints=list(dict.fromkeys(hint for error in failures.values() for hint in error.hints)),
        )
