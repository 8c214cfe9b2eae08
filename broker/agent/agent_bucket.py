"""Upload a run's outcome and log to a bucket, to be read after the node has shut down. Standard library only.

S3, compatible services and Google Cloud Storage use the logins that `agent_login` finds; Azure uses the account's key,
a shared access signature or the machine's identity.
"""

from __future__ import annotations

import base64
import binascii
import email.utils
import hashlib
import hmac
import http.client
import importlib
import json
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from broker.agent import agent_login
    from broker.agent.agent_login import Refused
else:  # a sibling module: a plain name on a node, a package member in the broker, which uses the object names here
    agent_login = importlib.import_module(__name__.replace("agent_bucket", "agent_login"))
    Refused = agent_login.Refused

ANSWER_S = 10.0
TRIES, PAUSE_S = 3, 1.0
LOG_BYTES_MAX = 64 << 20  # per object; only the head and the tail of a longer log are kept
LOG_HEAD_BYTES = 16 << 20
CUT = "[broker: {} bytes of the log were cut here]\n"
KNOWN_REGION = "BROKER_BUCKET_REGION"  # the result of `find_region` for a caller's one bucket
SCHEMES = ("s3://", "gs://", "az://")
AZURE_VERSION = "2021-08-06"
# As obstore reads them, with which the trainers write to the same bucket.
AZURE_ACCOUNTS = ("AZURE_STORAGE_ACCOUNT_NAME",)
AZURE_KEYS = ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_MASTER_KEY")
AZURE_SIGNATURES = ("AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY")
AZURE_ENDPOINTS = ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")


def name_outcome(attempt: int) -> str:
    """Return the key of an attempt's outcome below the job's checkpoint folder."""
    return f"outcomes/{attempt}.json"


def name_log(attempt: int) -> str:
    """Return the key of an attempt's log below the checkpoint folder."""
    return f"logs/{attempt}.log"


def find_url(variables: Mapping[str, str], name: Callable[[int], str]) -> str:
    """Return the URL of an object of this attempt; "" if the environment names no bucket."""
    place, attempt = variables.get("BROKER_CHECKPOINT_DIR", ""), variables.get("BROKER_ATTEMPT", "")
    return f"{place}/{name(int(attempt))}" if place.startswith(SCHEMES) and attempt.isdigit() else ""


def leave_outcome(outcome: Mapping[str, Any], variables: Mapping[str, str]) -> str:
    """Upload the outcome and return its URL; "" if the environment names no bucket. Raises Refused."""
    url = find_url(variables, name_outcome)
    if url:
        put(url, json.dumps(dict(outcome)).encode(), variables)
    return url


def leave_log(path: Path, variables: Mapping[str, str]) -> str:
    """Upload the log at `path` like `leave_outcome`; a missing log becomes an empty one."""
    url = find_url(variables, name_log)
    if url:
        put(url, read_bounded(path), variables)
    return url


def read_bounded(path: Path) -> bytes:
    """Return the log; beyond LOG_BYTES_MAX its head, a line that says how much was cut, and its tail."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            if size <= LOG_BYTES_MAX:
                return file.read(size)
            head = file.read(LOG_HEAD_BYTES)
            cut_bytes = size - LOG_BYTES_MAX
            file.seek(LOG_HEAD_BYTES + cut_bytes)
            return head + CUT.format(cut_bytes).encode() + file.read(LOG_BYTES_MAX - LOG_HEAD_BYTES)
    except FileNotFoundError:
        return b""


def find_rest(content: bytes, offset: int) -> tuple[bytes, int]:
    """Return the part after byte `offset` of the log that `read_bounded` cut to `content`, and the log's length.

    An offset within the cut part returns the line that says so, and the tail.
    """
    if len(content) <= LOG_BYTES_MAX:
        return content[offset:], max(offset, len(content))
    head, rest = content[:LOG_HEAD_BYTES], content[LOG_HEAD_BYTES:]
    tail = rest[len(rest) - (LOG_BYTES_MAX - LOG_HEAD_BYTES) :]
    note = rest[: len(rest) - len(tail)]
    cut_bytes = int(re.sub(rb"[^0-9]", b"", note) or b"0")
    skipped_bytes = offset - LOG_HEAD_BYTES - cut_bytes  # the part of the tail that was already read
    length = len(head) + cut_bytes + len(tail)
    if skipped_bytes >= 0:
        return tail[skipped_bytes:], max(offset, length)
    return head[offset:] + note + tail, length


def put(url: str, content: bytes, variables: Mapping[str, str]) -> None:
    """Write one object, replacing an existing one. Raises Refused."""
    send(url, content, variables)


def get(url: str, variables: Mapping[str, str]) -> bytes | None:
    """Return one object, cut to the length that its store announced; None if it does not exist. Raises Refused."""
    return send(url, None, variables)


def send(url: str, content: bytes | None, variables: Mapping[str, str]) -> bytes | None:
    """Write `content`, or read the object if it is None; return the answer's body, None for an unknown object."""
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    if scheme == "s3":
        login = agent_login.find_s3_login(variables)
        region = variables.get(KNOWN_REGION) or find_region(bucket, variables)
        request = make_s3_request(bucket, key, content, variables=variables, login=login, region=region)
    elif scheme == "gs":
        request = make_google_request(bucket, key, content, variables)
    elif scheme == "az":
        request = make_azure_request(bucket, key, content, variables)
    else:
        raise Refused(f"unsupported bucket scheme {scheme}://")
    opener = urllib.request.build_opener(agent_login.RefusesRedirects)
    for attempt in range(1, TRIES + 1):
        try:
            with opener.open(request, timeout=ANSWER_S) as answer:
                body: bytes = answer.read()
                return body
        except urllib.error.HTTPError as error:
            if error.code == 404 and content is None:
                return None
            if error.code < 500 or attempt == TRIES:
                raise Refused(f"{url}: HTTP {error.code}") from error
        except (OSError, http.client.HTTPException) as error:  # the second: an answer that breaks off
            if attempt == TRIES:
                raise Refused(f"{url}: {error}") from error
        time.sleep(PAUSE_S)
    raise AssertionError("the last try returns or raises")


def find_region(bucket: str, variables: Mapping[str, str]) -> str:
    """Return a bucket's region, which S3 sends in a header of any answer, even without a login.

    The variables name another one where the bucket is not in the region of other work.
    """
    named = variables.get("AWS_REGION") or variables.get("AWS_DEFAULT_REGION") or "us-east-1"
    if find_endpoint(variables):
        return named
    try:
        request = urllib.request.Request(f"https://{find_s3_host(named)}/{bucket}", method="HEAD")
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            headers = answer.headers
    except urllib.error.HTTPError as error:
        headers = error.headers
    except OSError:
        return named
    return headers.get("x-amz-bucket-region") or named


def find_s3_host(region: str, *, is_regional: bool = False) -> str:
    """Return the host of S3 for a region; unless `is_regional`, that of all regions in the public partition.

    In China and in GovCloud, a bucket of the same name may belong to another account.
    """
    domain = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
    return f"s3.{region}.{domain}" if is_regional or region.startswith(("cn-", "us-gov-")) else f"s3.{domain}"


def find_endpoint(variables: Mapping[str, str]) -> str:
    """Return the S3 endpoint of the environment; "" for AWS itself."""
    return variables.get("AWS_ENDPOINT_URL_S3") or variables.get("AWS_ENDPOINT_URL") or ""


def make_s3_request(
    bucket: str, key: str, content: bytes | None, *, variables: Mapping[str, str], login: Mapping[str, str], region: str
) -> urllib.request.Request:
    """Make a PUT, or a GET without content, signed with AWS Signature Version 4.

    Source: AWS documentation, "Create a signed AWS API request".
    """
    method = "GET" if content is None else "PUT"
    base = find_endpoint(variables).rstrip("/") or f"https://{find_s3_host(region, is_regional=True)}"
    path = urllib.parse.quote(f"{urllib.parse.urlsplit(base).path}/{bucket}/{key}", safe="/-_.~")
    origin = urllib.parse.urlsplit(base)
    now = time.gmtime()
    stamp, day = time.strftime("%Y%m%dT%H%M%SZ", now), time.strftime("%Y%m%d", now)
    digest = hashlib.sha256(content or b"").hexdigest()
    headers = {"host": origin.netloc, "x-amz-content-sha256": digest, "x-amz-date": stamp}
    if login.get("token"):
        headers["x-amz-security-token"] = login["token"]
    names = ";".join(sorted(headers))
    lines = [f"{name}:{headers[name]}\n" for name in sorted(headers)]
    canonical = "\n".join([method, path, "", "".join(lines), names, digest])
    scope = f"{day}/{region}/s3/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    secret = f"AWS4{login['secret']}".encode()
    for part in (day, region, "s3", "aws4_request"):
        secret = hmac.new(secret, part.encode(), hashlib.sha256).digest()
    signature = hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()
    headers["Authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={login['key']}/{scope}, SignedHeaders={names}, Signature={signature}"
    )
    if content is not None:
        headers["Content-Type"] = find_type(key)  # urllib would default to a form
    url = f"{origin.scheme}://{origin.netloc}{path}"
    return urllib.request.Request(url, data=content, method=method, headers=headers)


def make_google_request(
    bucket: str, key: str, content: bytes | None, variables: Mapping[str, str]
) -> urllib.request.Request:
    """Make a simple upload request of the JSON API, or without content a download."""
    token = agent_login.find_google_token(variables)
    base = variables.get("STORAGE_EMULATOR_HOST", "").rstrip("/") or "https://storage.googleapis.com"
    name = urllib.parse.quote(key, safe="")
    if content is None:
        url = f"{base}/storage/v1/b/{bucket}/o/{name}?alt=media"
        return urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    url = f"{base}/upload/storage/v1/b/{bucket}/o?uploadType=media&name={name}"
    headers = {"Authorization": f"Bearer {token}", "Content-Type": find_type(key)}
    return urllib.request.Request(url, data=content, method="POST", headers=headers)


def make_azure_request(
    bucket: str, key: str, content: bytes | None, variables: Mapping[str, str]
) -> urllib.request.Request:
    """Make a request for Put Blob, or Get Blob without content (Azure Storage documentation).

    Raises Refused without account or login.
    """
    account = find_first(AZURE_ACCOUNTS, variables)
    if not account:
        raise Refused("no login for az://: AZURE_STORAGE_ACCOUNT_NAME is not set")
    base = find_first(AZURE_ENDPOINTS, variables).rstrip("/") or f"https://{account}.blob.core.windows.net"
    url = f"{base}/{bucket}/{urllib.parse.quote(key, safe='/-_.~')}"
    headers = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": AZURE_VERSION}
    if content is not None:
        headers.update({"Content-Type": find_type(key), "x-ms-blob-type": "BlockBlob"})  # Python 3.8 has no `|=`
    if account_key := find_first(AZURE_KEYS, variables):
        signature = sign_for_azure(url, headers, content, account=account, key=account_key)
        headers["Authorization"] = f"SharedKey {account}:{signature}"
    elif token := find_first(AZURE_SIGNATURES, variables):
        url += "?" + token.lstrip("?")
    else:
        headers["Authorization"] = f"Bearer {find_azure_token(variables)}"
    return urllib.request.Request(url, data=content, method="GET" if content is None else "PUT", headers=headers)


def sign_for_azure(url: str, headers: Mapping[str, str], content: bytes | None, *, account: str, key: str) -> str:
    """Sign a PUT, or a GET without content, whose only standard header is its type.

    Source: Azure Storage documentation, "Authorize with Shared Key".
    """
    own = [f"{name}:{headers[name]}" for name in sorted(headers) if name.startswith("x-ms-")]
    resource = f"/{account}{urllib.parse.urlsplit(url).path}"
    # Encoding, language, length, MD5, type, date, four conditions and the range precede our own headers.
    verb, length = ("GET", 0) if content is None else ("PUT", len(content))
    lines = [verb, "", "", str(length or ""), "", headers.get("Content-Type", ""), *[""] * 6, *own, resource]
    try:
        secret = base64.b64decode(key, validate=True)
    except binascii.Error as error:
        raise Refused("invalid storage account key: not base64") from error
    return base64.b64encode(hmac.new(secret, "\n".join(lines).encode(), hashlib.sha256).digest()).decode("ascii")


def find_azure_token(variables: Mapping[str, str]) -> str:
    """Return a token of the machine's managed identity; AZURE_CLIENT_ID selects among several."""
    query = {"api-version": "2018-02-01", "resource": "https://storage.azure.com/"}
    if variables.get("AZURE_CLIENT_ID"):
        query["client_id"] = variables["AZURE_CLIENT_ID"]
    url = f"{agent_login.METADATA}/metadata/identity/oauth2/token?{urllib.parse.urlencode(query)}"
    try:
        token = json.loads(agent_login.fetch_metadata(urllib.request.Request(url, headers={"Metadata": "true"})))[
            "access_token"
        ]
    except (OSError, ValueError, KeyError) as error:
        names = f"{AZURE_KEYS[0]} nor {AZURE_SIGNATURES[0]}"
        raise Refused(f"no login for az://: neither {names} is set, and the machine has no identity") from error
    return str(token)


def find_type(key: str) -> str:
    """Return the Content-Type of a log, of a JSON document, or of anything else."""
    kinds = {"log": "text/plain; charset=utf-8", "json": "application/json"}
    return kinds.get(key.rpartition(".")[2], "application/octet-stream")


def find_first(names: Iterable[str], variables: Mapping[str, str]) -> str:
    """Return the value of the first variable that is set; "" if none is."""
    return next((variables[name] for name in names if variables.get(name)), "")
