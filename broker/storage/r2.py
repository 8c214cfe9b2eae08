"""Cloudflare's R2: the S3 API at an account's address, with a login of its own, also from SkyPilot's files."""

from __future__ import annotations

import configparser
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from broker.environment import read_r2_environment
from broker.errors import AuthError
from broker.storage.node_objects import read_text
from broker.storage.objects import ObjectBucket, open_store

LOGIN = (
    "set R2_ACCOUNT_ID, R2_ACCESS_KEY_ID and R2_SECRET_ACCESS_KEY, or write ~/.cloudflare/accountid and the profile "
    "[r2] of ~/.cloudflare/r2.credentials, as for SkyPilot"
)


def make_bucket(url: str) -> ObjectBucket:
    """Make the bucket of `r2://bucket/prefix`."""
    parts = urlsplit(url)
    return ObjectBucket(open_store(f"s3://{parts.netloc}{parts.path}", **find_options()), url, login=LOGIN)


def find_options() -> dict[str, Any]:
    """Return options for obstore's S3 store. Raises AuthError if account or key is missing."""
    login = find_login(read_r2_environment(), Path.home() / ".cloudflare")
    return {**login, "region": "auto", "client_options": {"allow_http": login["endpoint"].startswith("http://")}}


def find_login(variables: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Read `endpoint`, `access_key_id` and `secret_access_key` from variables or files. Raises AuthError."""
    account = variables.get("R2_ACCOUNT_ID") or read_text(folder / "accountid")
    endpoint = variables.get("R2_ENDPOINT_URL") or (f"https://{account}.r2.cloudflarestorage.com" if account else "")
    file = configparser.ConfigParser()
    file.read_string(read_text(folder / "r2.credentials") or "[r2]")
    profile = file["r2"] if file.has_section("r2") else {}
    key = variables.get("R2_ACCESS_KEY_ID") or profile.get("aws_access_key_id", "")
    secret = variables.get("R2_SECRET_ACCESS_KEY") or profile.get("aws_secret_access_key", "")
    if not (endpoint and key and secret):
        raise AuthError("no login for r2://", hints=(LOGIN,))
    return {"endpoint": endpoint, "access_key_id": key, "secret_access_key": secret}


def create_bucket(name: str) -> None:
    """Create an empty bucket. Raises the errors of `s3.create_bucket`."""
    from broker.storage.s3 import create_with

    login = find_login(read_r2_environment(), Path.home() / ".cloudflare")
    create_with(  # R2 maps us-east-1 to its own `auto` (Cloudflare, "S3 API compatibility")
        name, region="us-east-1", endpoint_url=login["endpoint"], aws_access_key_id=login["access_key_id"],
        aws_secret_access_key=login["secret_access_key"],
    )  # fmt: skip
