"""Before a cluster is terminated, wait until the files that its programs wrote to mounted buckets are uploaded."""

from __future__ import annotations

from broker.app.container import Context
from broker.errors import BrokerError, CloudError, StateError
from broker.formatting import format_count, format_duration, format_usd
from broker.runtime.gang import sort_nodes
from broker.runtime.reports import Uploads
from broker.types import Cluster, ClusterStatus

ANSWER_S = 10.0  # timeout of a request: nodes that are gone must not delay `down` for long
AGAIN_S = 20.0  # of another one if no node answered: a busy machine takes seconds to log in, and files could be lost
SILENCE_S = 60.0  # without a response for this long, a node counts as lost
HOLD_S = 1800.0  # without progress; as long as a node itself waits at the end of a run
POLL_S = 1.0


async def wait_for_uploads(context: Context, cluster: Cluster) -> None:
    """End the runs of a cluster with cached mounts, then wait until its nodes have uploaded the written files.

    Returns at once for a cluster without such mounts. Waits up to SILENCE_S for a node that does not respond, and then
    names it in a note; if no node responds, returns at once. Raises BrokerError if nothing is uploaded for HOLD_S, or
    if this machine cannot query the nodes; the cluster stays up.
    """
    if cluster.status is not ClusterStatus.UP:
        return
    try:
        uploads = await context.gang.read_uploads(cluster, timeout_s=ANSWER_S)
        if are_silent(uploads, cluster):
            uploads = await context.gang.read_uploads(cluster, timeout_s=AGAIN_S)
    except StateError as error:
        raise _explain_unqueried(cluster, error) from error
    if uploads.has_mounts:
        await _Wait(context, cluster).run(uploads)
    elif are_silent(uploads, cluster):
        context.note(f"no node of `{cluster.name}` responds: files that are not yet in their mounted bucket are lost")


def are_silent(uploads: Uploads, cluster: Cluster) -> bool:
    """Return whether no node of a cluster has answered."""
    return bool(uploads.silent) and len(uploads.silent) == len(cluster.nodes)


class _Wait:
    """The wait for one cluster whose nodes have cached mounts."""

    def __init__(self, context: Context, cluster: Cluster) -> None:
        self._context, self._cluster = context, cluster
        self._moved_s = context.clock.now_s()
        self._heard_s = dict.fromkeys((node.id for node in cluster.nodes), self._moved_s)
        self._last: Uploads | None = None  # of all nodes that are not lost

    async def run(self, uploads: Uploads) -> None:
        is_announced = False
        while not await self._is_over(uploads):
            if uploads.file_count and not is_announced:
                verb = "is" if uploads.file_count == 1 else "are"
                self._context.note(f"`{self._cluster.name}` is terminated once {describe(uploads)} {verb} uploaded")
                is_announced = True
            if self._context.clock.now_s() - self._moved_s >= HOLD_S:
                raise _explain(self._cluster, uploads)
            await self._context.clock.sleep(POLL_S)
            uploads = await self._context.gang.read_uploads(self._cluster, timeout_s=ANSWER_S)
        if uploads.silent:
            names = ", ".join(f"`{node_id}`" for node_id in uploads.silent)
            self._context.note(f"no answer from {names}: files that are not yet in their mounted bucket are lost")

    async def _is_over(self, uploads: Uploads) -> bool:
        """Return whether all runs have ended and every node has uploaded all files, or is lost."""
        now_s = self._context.clock.now_s()
        for node_id in self._heard_s.keys() - set(uploads.silent):
            self._heard_s[node_id] = now_s
        is_complete = all(now_s - self._heard_s[node_id] >= SILENCE_S for node_id in uploads.silent)
        if is_complete and uploads != self._last:  # otherwise files of a silent node would come and go
            self._last, self._moved_s = uploads, now_s
        is_live = await self._cancel_live(uploads)
        return is_complete and not uploads.file_count and not is_live

    async def _cancel_live(self, uploads: Uploads) -> bool:
        """Request the end of every live run; return whether there may be one."""
        gang = self._context.gang
        try:
            live = [run.id for run in await gang.list_runs(self._cluster) if not run.status.is_terminal]
            for run_id in live:
                await gang.cancel(self._cluster, run_id)
        except CloudError:
            return sort_nodes(self._cluster)[0].id not in uploads.silent  # a lost head keeps no run alive
        return bool(live)


def describe(uploads: Uploads) -> str:
    """Describe the pending files: "3 files (1.200 GB) for `s3://bucket/out`"."""
    urls = ", ".join(f"`{url}`" for url in uploads.urls)
    return f"{format_count(uploads.file_count, 'file')} ({uploads.size_bytes / 1e9:.3f} GB) for {urls}"


def _explain_unqueried(cluster: Cluster, error: StateError) -> BrokerError:
    now = f"or terminate it without waiting for files in mounted buckets: `broker down --now {cluster.name}`"
    others = [hint for hint in error.hints if "broker down" not in hint]
    return BrokerError(
        f"cluster `{cluster.name}` is still up, at {format_usd(cluster.placement.usd_hour)} USD/h: {error.message}",
        details=["broker cannot query its nodes for files that still have to be uploaded to mounted buckets"],
        hints=[*others, now.removeprefix("" if others else "or ")],
    )


def _explain(cluster: Cluster, uploads: Uploads) -> BrokerError:
    return BrokerError(
        f"cluster `{cluster.name}` is still up: nothing was uploaded for {format_duration(HOLD_S)}",
        details=[f"not uploaded: {describe(uploads)}"] if uploads.file_count else ["its runs are still active"],
        hints=[
            f"inspect it with `broker ssh {cluster.name}`",
            f"or terminate it without the files: `broker down --now {cluster.name}`",
        ],
    )
