"""The fields of a storage mount in `file_mounts`."""

from __future__ import annotations

from broker.task import allowed
from broker.task.measures import Size
from broker.task.shapes import Anything, Choice, Either, Flag, ListOf, Text
from broker.task.tables import Field, Later, Table

SOURCE = Text(rule=allowed.SOURCE)
STORES = ("s3", "gcs", "azure", "r2", "ibm", "oci", "nebius", "coreweave", "vastdata", "hf", "volume")
BUCKET_SCHEMES = (
    "s3://", "gs://", "gcs://", "r2://", "https://", "http://", "az://", "cos://", "oci://", "nebius://", "cw://",
    "hf://", "vastdata://",
)  # fmt: skip

READ_ONLY = Field(shape=Flag(), about="Refuse writes to the mount; nodes get read access only.")


def _tuning(about: str, why: str = "broker's own setting is used") -> Field:
    later = Later(message=why, blocks_launch=False, applies=lambda value: True)
    return Field(shape=Anything(), about=about, later=later)


MOUNT = Table(
    name="mount",
    about="Options of `mode: MOUNT`.",
    fields={"read_only": READ_ONLY, "hf_mount_args": _tuning("Flags of `hf-mount`.", "`hf-mount` is not used")},
)
MOUNT_CACHED = Table(
    name="mount_cached",
    about="Options of `mode: MOUNT_CACHED`.",
    fields={
        "read_only": READ_ONLY,
        "transfers": _tuning("Number of parallel uploads."),
        "buffer_size": _tuning("Buffer of each open file."),
        "vfs_cache_max_size": _tuning("Maximum size of the cache."),
        "vfs_cache_max_age": _tuning("Maximum age of a file in the cache."),
        "vfs_read_ahead": _tuning("Bytes to read ahead."),
        "vfs_read_chunk_size": _tuning("Size of a read."),
        "vfs_read_chunk_streams": _tuning("Number of parallel reads of a file."),
        "vfs_write_back": _tuning("Delay before a file is uploaded (always one second)."),
    },
)
STORAGE_CONFIG = Table(
    name="storage_config",
    about="Storage mount options.",
    fields={
        "disk_size": Field(shape=Size(), about="Size of a new volume."),
        "disk_tier": Field(shape=Text(), about="Performance tier of a new volume."),
        "storage_type": Field(shape=Text(), about="`network` or `instance`."),
        "attach_mode": Field(shape=Text(), about="`read_write` or `read_only`."),
        "mount_cached": Field(shape=MOUNT_CACHED, about="Options of `mode: MOUNT_CACHED`."),
        "mount": Field(shape=MOUNT, about="Options of `mode: MOUNT`."),
    },
)
STORAGE = Table(
    name="storage",
    about="A bucket mounted as a folder on every node.",
    fields={
        "name": Field(shape=Text(rule=allowed.BUCKET), about="Bucket name; created if it does not exist."),
        "source": Field(
            shape=Either(shapes=(SOURCE, ListOf(item=SOURCE, count_min=1))),
            about="Bucket URL, or local paths to upload.",
            examples=("s3://bucket/folder",),
        ),
        "store": Field(
            shape=Choice(words=STORES),
            about="Storage provider of the bucket (default: the cloud's own, if `infra` names AWS, GCP or Azure).",
        ),
        "persistent": Field(shape=Flag(), about="Broker never deletes a bucket; `false` prints a warning."),
        "mode": Field(
            shape=Choice(words=("MOUNT", "COPY", "MOUNT_CACHED")),
            about="Read and write in place, copy before the run, or write back in the background.",
        ),
        "type": Field(
            shape=Choice(words=("MODEL_CHECKPOINT_RO", "MODEL_CHECKPOINT_RW", "DATASET_RO", "DATASET_RW")),
            about="Kind of data; one that ends with `_RO` is mounted read-only, unless `read_only: false` is set.",
        ),
        "config": Field(shape=STORAGE_CONFIG, about="Storage mount options."),
        "mount_options": Field(
            shape=Text(),
            about="Options of the mount program.",
            later=Later(message="options of the mount program are not supported", hint="remove `mount_options`"),
        ),
        "_is_sky_managed": Field(shape=Flag(), about="Internal to SkyPilot; no effect."),
        "_bucket_sub_path": Field(shape=Text(), about="Internal to SkyPilot; no effect."),
        "_force_delete": Field(shape=Flag(), about="Internal to SkyPilot; no effect."),
    },
)
