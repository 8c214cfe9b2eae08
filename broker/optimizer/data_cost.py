"""The cost of a task's data at one place: inputs, outputs and checkpoints."""

from __future__ import annotations

from collections.abc import Iterable

from broker.frozen import frozen
from broker.optimizer.egress import GB_PER_GIB, REGION_GBIT_S, EgressTable
from broker.types import DataSet, Task

# The cloud that sells a bucket, by the scheme of its URL. Cloudflare's R2 does not bill for outgoing data.
BUCKET_CLOUDS = {"s3": "aws", "gs": "gcp", "az": "azure", "oci": "oci", "nebius": "nebius", "r2": "cloudflare"}
FREE_TO_LEAVE = ("cloudflare",)

# Checkpoints that exist at the same time: the newest complete one, and the next while it is written.
CHECKPOINTS_KEPT = 2
# S3 Standard in us-east-1, first 50 TB; Google's and Azure's hot storage cost a little less.
STORAGE_USD_GB_MONTH = 0.023
HOURS_A_MONTH = 730.0


@frozen
class DataCost:
    """USD per start of the gang, at the end, per checkpoint written, per checkpoint read back, and per hour."""

    start_usd: float = 0.0
    finish_usd: float = 0.0
    checkpoint_usd: float = 0.0
    restore_usd: float = 0.0
    storage_usd_hour: float = 0.0


NO_DATA = DataCost()


def has_data(task: Task) -> bool:
    """Return whether the task states data that a placement may have to transfer."""
    return bool(task.inputs or task.outputs or task.checkpoint.size_gib)


def price_data(task: Task, cloud: str, region: str, table: EgressTable) -> DataCost:
    """Price the task's data if it runs at `cloud` and `region`.

    New machines are empty, so inputs are transferred at every start. A bucket of the same cloud is assumed to be in the
    same region, where transfers are free: its URL does not name a region. Checkpoints are stored in the gang's region
    unless `checkpoint: {to: ...}`, or without it the task's BROKER_CHECKPOINT_DIR, names a bucket. Other URLs are read
    free of charge, and written to over the internet.
    """
    leaving = table.find(cloud, region).internet * GB_PER_GIB
    place = task.checkpoint.to or task.envs.get("BROKER_CHECKPOINT_DIR", "")
    bucket = find_bucket_cloud(place) or cloud
    is_far = bucket != cloud
    size = task.checkpoint.size_gib
    return DataCost(
        start_usd=sum(_price_input(each, cloud, table) for each in task.inputs),
        finish_usd=sum(output.size_gib * leaving for output in task.outputs if find_bucket_cloud(output.url) != cloud),
        checkpoint_usd=size * leaving if is_far else 0.0,
        restore_usd=size * _price_leaving(bucket, table) if is_far else 0.0,
        storage_usd_hour=size * GB_PER_GIB * CHECKPOINTS_KEPT * STORAGE_USD_GB_MONTH / HOURS_A_MONTH,
    )


def find_bucket_cloud(url: str) -> str | None:
    """Return the cloud that sells the bucket of a URL; None if the URL is not a bucket."""
    scheme, separator, _ = url.partition("://")
    return BUCKET_CLOUDS.get(scheme) if separator else None


def measure_restore_s(size_gib: float) -> float:
    """Return the seconds to read a checkpoint back over one machine's network."""
    return size_gib * GB_PER_GIB * 8 / REGION_GBIT_S


def list_assumptions(task: Task, cloud: str) -> Iterable[str]:
    """List the assumptions of `price_data` for one cloud, in words."""
    buckets = {find_bucket_cloud(each.url) for each in (*task.inputs, *task.outputs)}
    if cloud in buckets:
        yield f"{cloud} buckets are in the region of the gang, where transfers are free"
    if task.inputs:
        yield "inputs are transferred again after every preemption: new nodes start empty"
    if task.checkpoint.size_gib:
        yield f"{CHECKPOINTS_KEPT} checkpoints are kept, at {STORAGE_USD_GB_MONTH} USD per GB per month"


def _price_input(data: DataSet, cloud: str, table: EgressTable) -> float:
    source = find_bucket_cloud(data.url)
    return 0.0 if source in (None, cloud) else data.size_gib * _price_leaving(source, table)


def _price_leaving(cloud: str | None, table: EgressTable) -> float:
    """Return USD per GiB that leaves a bucket whose region is unknown."""
    if cloud is None or cloud in FREE_TO_LEAVE:
        return 0.0
    return table.find(cloud, "*").internet * GB_PER_GIB
