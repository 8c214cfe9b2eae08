"""Amazon S3, and compatible services at AWS_ENDPOINT_URL."""

from __future__ import annotations

import contextlib
import urllib.error
import urllib.request
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from broker.environment import read_aws_environment
from broker.errors import AuthError, InvalidRequestError
from broker.storage.objects import CODES, ObjectBucket, open_store

LOGIN = "log in with `aws configure`, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
REGION_TIMEOUT_S = 10.0


def make_bucket(url: str) -> ObjectBucket:
    """Make the bucket of `s3://bucket/prefix`."""
    variables = read_aws_environment()
    options = find_options(urlsplit(url).netloc, variables)
    # boto3 knows every way to log in; without it, the library may find one itself.
    has_login = "AWS_ACCESS_KEY_ID" in variables or "credential_provider" in options or find_spec("boto3") is None
    return ObjectBucket(open_store(url, **options), url, login=LOGIN, has_login=has_login)


def find_options(bucket: str, variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the options that obstore does not find by itself: endpoint, bucket's region, and logins in `~/.aws`."""
    options: dict[str, Any] = {}
    endpoint = variables.get("AWS_ENDPOINT_URL_S3") or variables.get("AWS_ENDPOINT_URL")
    if endpoint:
        options |= {"endpoint": endpoint, "client_options": {"allow_http": endpoint.startswith("http://")}}
    elif bucket and (region := find_region(bucket)):
        options |= {"region": region}  # AWS_REGION is often that of other work; the library follows no redirect
        if region.startswith("cn-"):  # the library knows one domain only
            options |= {"endpoint": f"https://{find_host(region)}"}
    if "AWS_ACCESS_KEY_ID" not in variables:
        with contextlib.suppress(ImportError):
            import boto3
            from obstore.auth.boto3 import Boto3CredentialProvider

            session = boto3.Session()
            if session.get_credentials() is not None:
                options["credential_provider"] = Boto3CredentialProvider(session)
    return options


def find_host(named: str) -> str:
    """Return the host of S3 for the region that the login names.

    China and GovCloud are partitions of their own: a bucket of the same name may belong to another account than in the
    public partition.
    """
    domain = "amazonaws.com.cn" if named.startswith("cn-") else "amazonaws.com"
    return f"s3.{named}.{domain}" if named.startswith(("cn-", "us-gov-")) else f"s3.{domain}"


def find_region(bucket: str) -> str | None:
    """Read the bucket's region, which S3 sends to any client in a header; None if S3 cannot be reached.

    In China and in GovCloud, it is otherwise the region of the variables.
    """
    variables = read_aws_environment()
    named = variables.get("AWS_REGION") or variables.get("AWS_DEFAULT_REGION") or ""
    home = find_host(named)
    # The certificate of S3 does not cover names with dots.
    host = f"{home}/{bucket}" if "." in bucket else f"{bucket}.{home}/"
    fallback = named if named.startswith(("cn-", "us-gov-")) else None
    request = urllib.request.Request(f"https://{host}", method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=REGION_TIMEOUT_S) as answer:
            headers = answer.headers
    except urllib.error.HTTPError as error:
        headers = error.headers
    except OSError:
        return fallback
    region: str | None = headers.get("x-amz-bucket-region")
    return region or fallback


def create_bucket(name: str) -> None:
    """Create an empty bucket, private by S3's default, in the login's region. One that the login owns is success.

    Raises AuthError, InvalidRequestError.
    """
    variables = read_aws_environment()
    create_with(name, region=variables.get("AWS_REGION") or variables.get("AWS_DEFAULT_REGION"))


def create_with(name: str, *, region: str | None, **login: str) -> None:
    """Create a bucket with boto3, and with the given login if any. Raises AuthError, InvalidRequestError."""
    try:
        import boto3
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError as error:
        hints = ("pip install 'intercloud-broker[aws]', or create the bucket yourself",)
        raise InvalidRequestError(f"creating bucket `{name}` requires the package boto3", hints=hints) from error
    session = boto3.Session()
    region = region or session.region_name or "us-east-1"
    # Other regions must be named, us-east-1 must not be (S3 API, CreateBucket).
    place = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
    try:
        session.client("s3", region_name=region, **login).create_bucket(Bucket=name, **place)
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code"))
        if code == "BucketAlreadyOwnedByYou":
            return
        kind = AuthError if CODES.get(code) is AuthError else InvalidRequestError
        hints = (LOGIN,) if kind is AuthError else ("bucket names are shared by all accounts: choose another one",)
        raise kind(f"cannot create bucket `{name}`: {code}", hints=hints) from error
    except BotoCoreError as error:
        raise AuthError(f"cannot create bucket `{name}`: {error}", hints=(LOGIN,)) from error
