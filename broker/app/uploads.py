"""Before a cluster is terminated, wait until what its programs wrote to mounted buckets is there."""

from __future__ import annotations

import asyncio

from broker.app.container import Context
from broker.errors import BrokerError, CloudError
from broker.formatting import format_count, format_duration
from broker.runtime.gang import Uploads
from broker.types import Cluster, ClusterStatus

ANSWER_S = 10.0  # for the first answer: nodes that are gone must not delay `down` for long
HOLD_S = 1800.0  # without progress, as long as a node itself waits at the end of a run
LOOK_S = 1.0


async def wait_for_uploads(context: Context, cluster: Cluster) -> None:
    """End the runs of a cluster with cached mounts, then wait until its nodes have uploaded what was written.

    Returns at once for a cluster without such mounts, and, after a note, for one whose nodes do not answer. Raises
    BrokerError if nothing arrives for HOLD_S; the cluster stays up.
    """
    if cluster.status is not ClusterStatus.UP:
        return
    try:
        uploads = await asyncio.wait_for(context.gang.read_uploads(cluster), ANSWER_S)
    except TimeoutError:
        uploads = Uploads(silent=tuple(node.id for node in cluster.nodes))
    if uploads.has_mounts:
        await _wait(context, cluster, uploads)
    elif uploads.silent and len(uploads.silent) == len(cluster.nodes):
        context.note(f"no node of `{cluster.name}` responds: files that are not in their mounted bucket yet are lost")


async def _wait(context: Context, cluster: Cluster, uploads: Uploads) -> None:
    await _cancel_live(context, cluster)
    moved_s, is_announced = context.clock.now_s(), False
    while uploads.file_count or await _cancel_live(context, cluster):
        if uploads.file_count and not is_announced:
            verb = "is" if uploads.file_count == 1 else "are"
            context.note(f"`{cluster.name}` is terminated once {describe(uploads)} {verb} uploaded")
            is_announced = True
        if context.clock.now_s() - moved_s >= HOLD_S:
            raise _explain(cluster, uploads)
        await context.clock.sleep(LOOK_S)
        newer = await context.gang.read_uploads(cluster)
        if not newer.has_mounts:  # the nodes are gone, or stopped answering
            context.note(f"the nodes of `{cluster.name}` no longer respond; not uploaded: {describe(uploads)}")
            return
        if newer != uploads:
            uploads, moved_s = newer, context.clock.now_s()


async def _cancel_live(context: Context, cluster: Cluster) -> bool:
    """Request the end of every live run; return whether there was one, or whether that is unknown."""
    try:
        live = [run.id for run in await context.gang.list_runs(cluster) if not run.status.is_terminal]
        for run_id in live:
            await context.gang.cancel(cluster, run_id)
    except CloudError:
        return True
    return bool(live)


def describe(uploads: Uploads) -> str:
    """Describe the pending files: "3 files (1.200 GB) for `s3://bucket/out`"."""
    urls = ", ".join(f"`{url}`" for url in uploads.urls)
    return f"{format_count(uploads.file_count, 'file')} ({uploads.size_bytes / 1e9:.3f} GB) for {urls}"


def _explain(cluster: Cluster, uploads: Uploads) -> BrokerError:
    return BrokerError(
        f"cluster `{cluster.name}` is still up: nothing was uploaded for {format_duration(HOLD_S)}",
        details=[f"not uploaded: {describe(uploads)}"] if uploads.file_count else ["its runs do not end"],
        hints=[
            f"look into it with `broker ssh {cluster.name}`",
            f"or lose the files: `broker down --now {cluster.name}`",
        ],
    )
