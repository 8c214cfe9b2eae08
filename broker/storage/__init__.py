"""Store objects in folders and buckets behind one Protocol, and mount them on nodes."""

from __future__ import annotations

import importlib
from urllib.parse import urlsplit

from broker.errors import InvalidRequestError
from broker.storage.base import Bucket, MakeBucket

# scheme -> "module:maker"; a maker is `broker.storage.base.MakeBucket`
BUCKETS: dict[str, str] = {
    "file": "broker.storage.folder:make_bucket",
    "s3": "broker.storage.s3:make_bucket",
    "gs": "broker.storage.gcs:make_bucket",
    "r2": "broker.storage.r2:make_bucket",
    "az": "broker.storage.azure:make_bucket",
}


def open_bucket(url: str) -> Bucket:
    """Return the bucket, or the folder in a bucket, of a URL.

    Raises InvalidRequestError for an unsupported scheme, or the errors of the scheme's `MakeBucket`.
    """
    scheme = urlsplit(url).scheme
    target = BUCKETS.get(scheme)
    if target is None:
        supported = ", ".join(f"`{each}://`" for each in BUCKETS)
        raise InvalidRequestError(f"unsupported storage `{scheme}://` in `{url}`", hints=(f"supported: {supported}",))
    module, _, maker = target.partition(":")
    make: MakeBucket = getattr(importlib.import_module(module), maker)
    return make(url)
