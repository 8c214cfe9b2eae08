"""Open buckets on a node with obstore: regions, endpoints and logins.

Sent to nodes ahead of `node_mount.py`, which continues this file there; Python 3.8 and later.
"""

from __future__ import annotations

import configparser
import datetime
import json
import os
import pathlib
import urllib.request
from typing import Any

REGION_S = 10.0


class MountError(Exception):
    """A problem to report without a traceback."""


def open_store(url: str) -> tuple[Any, str]:
    """Open the bucket; return it and the path in it."""
    import obstore.store

    scheme, _, rest = url.partition("://")
    bucket, _, path = rest.partition("/")
    options: dict[str, Any] = {}
    if scheme == "r2":
        login, scheme = find_r2_login(), "s3"
        options = {"endpoint": login["endpoint"], "access_key_id": login["key"], "secret_access_key": login["secret"]}
        options.update(region="auto", client_options={"allow_http": login["endpoint"].startswith("http://")})
    elif scheme == "s3":
        options = find_s3_options(bucket)
    return obstore.store.from_url(f"{scheme}://{bucket}", **options), path.strip("/")


def find_s3_options(bucket: str) -> dict[str, Any]:
    """Return the S3 endpoint or the bucket's region, and the login granted by broker, if any."""
    options: dict[str, Any] = {}
    if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
        options = {"endpoint": endpoint, "client_options": {"allow_http": endpoint.startswith("http://")}}
    elif region := find_region(bucket):
        china = {"endpoint": f"https://s3.{region}.amazonaws.com.cn"} if region.startswith("cn-") else {}
        options = {"region": region, **china}  # not AWS_REGION, which is often that of other work
    granted = pathlib.Path(os.environ.get("BROKER_ACCESS_DIR") or "/nonexistent") / "aws.json"
    if granted.exists() and "AWS_ACCESS_KEY_ID" not in os.environ:
        options["credential_provider"] = lambda: read_granted(granted)
    return options


def read_granted(path: pathlib.Path) -> dict[str, Any]:
    """Read the granted login, to be read again in ten minutes: broker replaces the file before its session ends."""
    granted = json.loads(path.read_text(encoding="utf-8"))
    again = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(minutes=10)  # nodes may have Python 3.8
    names = {"access_key_id": "AccessKeyId", "secret_access_key": "SecretAccessKey", "token": "SessionToken"}
    return {**{name: granted.get(theirs) for name, theirs in names.items()}, "expires_at": again}


def find_region(bucket: str) -> str | None:
    """Read the bucket's region, which S3 sends to any client in a header; None if S3 cannot be reached.

    China and GovCloud are apart: elsewhere, a bucket of the same name may belong to another account. If S3 cannot be
    reached there, the region is that of the variables.
    """
    named = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or ""
    is_apart, host = named.startswith(("cn-", "us-gov-")), "s3.amazonaws.com"
    if is_apart:
        host = f"s3.{named}.amazonaws.com" + (".cn" if named.startswith("cn-") else "")
    # The certificate of S3 does not cover names with dots.
    url = f"https://{host}/{bucket}" if "." in bucket else f"https://{bucket}.{host}/"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=REGION_S) as answer:
            headers = answer.headers
    except OSError as error:  # an HTTPError has the header, too
        headers = getattr(error, "headers", {})
    return headers.get("x-amz-bucket-region") or (named if is_apart else None)


def find_r2_login() -> dict[str, str]:
    """Read the login from variables, or from SkyPilot's files for Cloudflare. Raises MountError if there is none."""
    folder = pathlib.Path.home() / ".cloudflare"
    account = os.environ.get("R2_ACCOUNT_ID") or read_text(folder / "accountid")
    endpoint = os.environ.get("R2_ENDPOINT_URL") or (f"https://{account}.r2.cloudflarestorage.com" if account else "")
    file = configparser.ConfigParser()
    file.read_string(read_text(folder / "r2.credentials") or "[r2]")
    profile = file["r2"] if file.has_section("r2") else {}
    key = os.environ.get("R2_ACCESS_KEY_ID") or profile.get("aws_access_key_id", "")
    secret = os.environ.get("R2_SECRET_ACCESS_KEY") or profile.get("aws_secret_access_key", "")
    if not (endpoint and key and secret):
        raise MountError("no login for r2://: set R2_ACCOUNT_ID, R2_ACCESS_KEY_ID and R2_SECRET_ACCESS_KEY")
    return {"endpoint": endpoint, "key": key, "secret": secret}


def read_text(path: pathlib.Path) -> str:
    """Return the stripped content of a file; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
