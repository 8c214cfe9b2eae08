"""Azure Blob Storage; the account is named by AZURE_STORAGE_ACCOUNT_NAME."""

from __future__ import annotations

from broker.storage.objects import ObjectBucket, open_store

LOGIN = "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or log in with `az login`"


def make_bucket(url: str) -> ObjectBucket:
    """`az://container/prefix`."""
    return ObjectBucket(open_store(url), url, login=LOGIN)
