"""Leaves a run's outcome in a bucket, where it can be read after the node has ended itself. Standard library only.

S3 and what speaks like it, by keys of the environment or the machine's role; Google's by the machine's own identity.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

METADATA = "http://169.254.169.254"
METADATA_S = 2.0
ANSWER_S = 10.0
TRIES, PAUSE_S = 3, 1.0


class Refused(Exception):
    """Told in one line of the runner's log."""


def name_outcome(attempt: int) -> str:
    """Below the job's folder for checkpoints."""
    return f"outcomes/{attempt}.json"


def leave_outcome(outcome: Mapping[str, Any], variables: Mapping[str, str]) -> str:
    """Where it was left; "" where the environment names no bucket. Raises Refused."""
    place, attempt = variables.get("BROKER_CHECKPOINT_DIR", ""), variables.get("BROKER_ATTEMPT", "")
    if "://" not in place or place.startswith("file:") or not attempt:
        return ""
    url = f"{place}/{name_outcome(int(attempt))}"
    put(url, json.dumps(dict(outcome)).encode(), variables)
    return url


def put(url: str, content: bytes, variables: Mapping[str, str]) -> None:
    """One small object, whatever was there before. Raises Refused."""
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    if scheme == "s3":
        login = find_login(variables)
        region = variables.get("AWS_REGION") or variables.get("AWS_DEFAULT_REGION") or find_region(bucket, variables)
        request = make_s3_request(bucket, key, content, variables=variables, login=login, region=region)
    elif scheme == "gs":
        request = make_google_request(bucket, key, content, variables)
    else:
        raise Refused(f"nothing here writes to {scheme}://")
    for attempt in range(1, TRIES + 1):
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S):
                return
        except urllib.error.HTTPError as error:
            if error.code < 500 or attempt == TRIES:
                raise Refused(f"{url}: HTTP {error.code}") from error
        except OSError as error:
            if attempt == TRIES:
                raise Refused(f"{url}: {error}") from error
        time.sleep(PAUSE_S)


def find_login(variables: Mapping[str, str]) -> dict[str, str]:
    """Keys of the environment, else of the role that the machine has (IMDSv2)."""
    if variables.get("AWS_ACCESS_KEY_ID") and variables.get("AWS_SECRET_ACCESS_KEY"):
        names = {"key": "AWS_ACCESS_KEY_ID", "secret": "AWS_SECRET_ACCESS_KEY", "token": "AWS_SESSION_TOKEN"}
        return {short: variables.get(name, "") for short, name in names.items()}
    base = f"{METADATA}/latest/meta-data/iam/security-credentials/"
    try:
        ttl = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
        token = ask(urllib.request.Request(f"{METADATA}/latest/api/token", method="PUT", headers=ttl))
        headers = {"X-aws-ec2-metadata-token": token}
        role = ask(urllib.request.Request(base, headers=headers)).split()[0]
        found = json.loads(ask(urllib.request.Request(base + role, headers=headers)))
        return {"key": found["AccessKeyId"], "secret": found["SecretAccessKey"], "token": found["Token"]}
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise Refused("no login for S3: neither AWS_ACCESS_KEY_ID nor a role of the machine") from error


def find_region(bucket: str, variables: Mapping[str, str]) -> str:
    """S3 tells a bucket's region to anyone, in a header of whatever it answers."""
    if find_endpoint(variables):
        return "us-east-1"
    try:
        request = urllib.request.Request(f"https://s3.amazonaws.com/{bucket}", method="HEAD")
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            headers = answer.headers
    except urllib.error.HTTPError as error:
        headers = error.headers
    except OSError:
        return "us-east-1"
    return headers.get("x-amz-bucket-region") or "us-east-1"


def find_endpoint(variables: Mapping[str, str]) -> str:
    return variables.get("AWS_ENDPOINT_URL_S3") or variables.get("AWS_ENDPOINT_URL") or ""


def make_s3_request(
    bucket: str, key: str, content: bytes, *, variables: Mapping[str, str], login: Mapping[str, str], region: str
) -> urllib.request.Request:
    """Signed with AWS Signature Version 4 (AWS documentation, "Create a signed AWS API request")."""
    base = find_endpoint(variables).rstrip("/") or f"https://s3.{region}.amazonaws.com"
    path = urllib.parse.quote(f"{urllib.parse.urlsplit(base).path}/{bucket}/{key}", safe="/-_.~")
    origin = urllib.parse.urlsplit(base)
    now = time.gmtime()
    stamp, day = time.strftime("%Y%m%dT%H%M%SZ", now), time.strftime("%Y%m%d", now)
    digest = hashlib.sha256(content).hexdigest()
    headers = {"host": origin.netloc, "x-amz-content-sha256": digest, "x-amz-date": stamp}
    if login.get("token"):
        headers["x-amz-security-token"] = login["token"]
    names = ";".join(sorted(headers))
    lines = [f"{name}:{headers[name]}\n" for name in sorted(headers)]
    canonical = "\n".join(["PUT", path, "", "".join(lines), names, digest])
    scope = f"{day}/{region}/s3/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    secret = f"AWS4{login['secret']}".encode()
    for part in (day, region, "s3", "aws4_request"):
        secret = hmac.new(secret, part.encode(), hashlib.sha256).digest()
    signature = hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()
    headers["Authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={login['key']}/{scope}, SignedHeaders={names}, Signature={signature}"
    )
    headers["Content-Type"] = "application/json"  # urllib would call it a form
    url = f"{origin.scheme}://{origin.netloc}{path}"
    return urllib.request.Request(url, data=content, method="PUT", headers=headers)


def make_google_request(bucket: str, key: str, content: bytes, variables: Mapping[str, str]) -> urllib.request.Request:
    """By the JSON API's simple upload, as the service account that the machine has."""
    path = "/computeMetadata/v1/instance/service-accounts/default/token"
    try:
        answer = ask(urllib.request.Request(METADATA + path, headers={"Metadata-Flavor": "Google"}))
        token = json.loads(answer)["access_token"]
    except (OSError, ValueError, KeyError) as error:
        raise Refused("no login for gs://: the machine has no service account") from error
    base = variables.get("STORAGE_EMULATOR_HOST", "").rstrip("/") or "https://storage.googleapis.com"
    name = urllib.parse.quote(key, safe="")
    url = f"{base}/upload/storage/v1/b/{bucket}/o?uploadType=media&name={name}"
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    return urllib.request.Request(url, data=content, method="POST", headers=headers)


def ask(request: urllib.request.Request) -> str:
    """The metadata server's word, past any proxy of the environment."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=METADATA_S) as answer:
        text: str = answer.read().decode("utf-8")
        return text
