"""What a task's data costs at one place: what it reads, what it writes, and its checkpoints."""

from __future__ import annotations

from collections.abc import Iterable

from broker.nouns import noun
from broker.optimizer.egress import GB_PER_GIB, REGION_GBIT_S, EgressTable
from broker.types import DataSet, Task

# Who sells a bucket, by the scheme of its URL. Cloudflare's R2 doesn't bill for what leaves it.
BUCKET_CLOUDS = {"s3": "aws", "gs": "gcp", "az": "azure", "oci": "oci", "nebius": "nebius", "r2": "cloudflare"}
FREE_TO_LEAVE = ("cloudflare",)

# Checkpoints that exist at once: the newest complete one, and the next while it is written.
CHECKPOINTS_KEPT = 2
# S3 Standard in us-east-1, first 50 TB; Google's and Azure's hot storage lie a little below.
STORAGE_USD_GB_MONTH = 0.023
HOURS_A_MONTH = 730.0


@noun
class DataCost:
    """USD: once a start of the gang, once at the end, for a checkpoint written, for one read back, and by the hour."""

    start_usd: float = 0.0
    finish_usd: float = 0.0
    checkpoint_usd: float = 0.0
    restore_usd: float = 0.0
    storage_usd_hour: float = 0.0


NO_DATA = DataCost()


def has_data(task: Task) -> bool:
    return bool(task.inputs or task.outputs or task.checkpoint.size_gib)


def price_data(task: Task, cloud: str, region: str, table: EgressTable) -> DataCost:
    """What the task's data costs where it runs at `cloud` and `region`.

    New machines are empty, so inputs move at every start. A bucket of the same cloud is taken to lie in the same
    region, where moving is free: its URL doesn't say where it is. Checkpoints lie beside the gang unless the task's
    BROKER_CHECKPOINT_DIR names a bucket. What is no bucket is read free of charge, and written to over the internet.
    """
    leaving = table.find(cloud, region).internet * GB_PER_GIB
    bucket = find_bucket_cloud(task.envs.get("BROKER_CHECKPOINT_DIR", "")) or cloud
    is_far = bucket != cloud
    size = task.checkpoint.size_gib
    return DataCost(
        start_usd=sum(_price_input(each, cloud, table) for each in task.inputs),
        finish_usd=sum(each.size_gib * leaving for each in task.outputs if find_bucket_cloud(each.url) != cloud),
        checkpoint_usd=size * leaving if is_far else 0.0,
        restore_usd=size * _price_leaving(bucket, table) if is_far else 0.0,
        storage_usd_hour=size * GB_PER_GIB * CHECKPOINTS_KEPT * STORAGE_USD_GB_MONTH / HOURS_A_MONTH,
    )


def find_bucket_cloud(url: str) -> str | None:
    """The cloud that sells the bucket of a URL; None for anything but a bucket."""
    scheme, separator, _ = url.partition("://")
    return BUCKET_CLOUDS.get(scheme) if separator else None


def measure_restore_s(size_gib: float) -> float:
    """Seconds to read a checkpoint back over one machine's network."""
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
    """USD per GiB that leaves a bucket whose region is not known."""
    if cloud is None or cloud in FREE_TO_LEAVE:
        return 0.0
    return table.find(cloud, "*").internet * GB_PER_GIB
