"""Google Cloud Storage, with the application-default login."""

from __future__ import annotations

from broker.storage.objects import ObjectBucket, open_store

LOGIN = "log in with `gcloud auth application-default login`"


def make_bucket(url: str) -> ObjectBucket:
    """Make the bucket of `gs://bucket/prefix`."""
    return ObjectBucket(open_store(url), url, login=LOGIN)
