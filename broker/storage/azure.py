"""Azure Blob Storage. AZURE_STORAGE_ACCOUNT_NAME names the account, AZURE_STORAGE_ENDPOINT an emulator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from broker.environment import read_azure_environment
from broker.storage.objects import ObjectBucket, open_store

LOGIN = "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or log in with `az login`"
ENDPOINTS = ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")


def make_bucket(url: str) -> ObjectBucket:
    """Make the bucket of `az://container/prefix`."""
    return ObjectBucket(open_store(url, **find_options(read_azure_environment())), url, login=LOGIN)


def find_options(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return options for obstore, which reads the variables itself but requires a flag for an emulator without TLS."""
    endpoint = next((variables[name] for name in ENDPOINTS if variables.get(name)), "")
    return {"client_options": {"allow_http": True}} if endpoint.startswith("http://") else {}
