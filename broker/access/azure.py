"""Access to Azure Blob Storage: a shared access signature for one container, created with the account's key."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import http.client
import re
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from urllib.parse import quote, urlencode

from broker.access.base import Grant, Need
from broker.clock import Clock
from broker.config import Config
from broker.environment import read_azure_environment
from broker.errors import AuthError, InvalidRequestError, TransientError
from broker.redirects import NoRedirect
from broker.types import Secret, Task

LIFE_S = 8 * 86400.0  # as for Google: the variable is only read once, when a program starts
BACKDATED_S = 900.0  # Azure Storage documentation, "Best practices when using SAS": clocks differ
VERSION = "2021-08-06"  # of the service; it determines the string to sign
PERMISSIONS_WRITE, PERMISSIONS_READ = "racwdl", "rl"  # in the order that Azure requires
ACCOUNTS = ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT")
KEYS = ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_MASTER_KEY", "AZURE_STORAGE_KEY")
ENDPOINTS = ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
OWN = (*KEYS, "AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY", "AZURE_CLIENT_SECRET", "AZURE_FEDERATED_TOKEN_FILE")
LOGIN = (
    "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY here: `az storage account keys list -n NAME`; nodes "
    "get a signature made with the key, not the key itself"
)
OWN_TOKEN = "or give the program its own: `secrets: {AZURE_STORAGE_SAS_TOKEN: }`"
ANSWER_S = 20.0


def make_granter(config: Config, *, clock: Clock) -> AzureGranter:
    """Return the granter of this scheme; it contacts the cloud on first use."""
    return AzureGranter(clock=clock)


class AzureGranter:
    """Implement `Granter` for Azure containers."""

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock

    def find_own(self, task: Task, cloud: str) -> str:
        """Return the task's own credentials, or the managed identity of an Azure node; "" without either."""
        if name := next((each for each in OWN if each in task.secrets or each in task.envs), ""):
            return f"the task's own `{name}`"
        return "the machine's managed identity" if cloud == "azure" else ""

    def issue(self, needs: Sequence[Need], *, endpoint: str = "") -> Grant:
        """Issue a signature for the whole container: limiting it to a folder requires hierarchical namespaces."""
        variables = read_azure_environment()
        account, key = _find(ACCOUNTS, variables), _find(KEYS, variables)
        if not account or not key:
            raise AuthError("no storage account key for `az://`", hints=(LOGIN, OWN_TOKEN))
        containers = sorted({need.bucket for need in needs if not need.is_optional} or {need.bucket for need in needs})
        if len(containers) > 1:
            raise InvalidRequestError(
                f"the task uses {len(containers)} containers, but one signature covers one: {', '.join(containers)}",
                hints=("put the data into one container, or pass `secrets: {AZURE_STORAGE_SAS_TOKEN: }`",),
            )
        issued_s = self._clock.now_s()
        is_written = any(not need.is_read_only for need in needs if need.bucket == containers[0])
        token = make_signature(
            account, key, containers[0], permissions=PERMISSIONS_WRITE if is_written else PERMISSIONS_READ,
            start_s=issued_s - BACKDATED_S, end_s=issued_s + LIFE_S,
        )  # fmt: skip
        address = _find(ENDPOINTS, variables)
        if address and not re.fullmatch(r"https?://[^\s/?#]+[^\s?#]*", address):
            name = next(each for each in ENDPOINTS if variables.get(each))
            raise InvalidRequestError(
                f"{name} is not a URL that begins with `https://`",
                hints=(f"for example: https://{account}.blob.core.windows.net",),
            )
        return Grant(
            envs={"AZURE_STORAGE_ACCOUNT_NAME": account, **({"AZURE_STORAGE_ENDPOINT": address} if address else {})},
            secrets={"AZURE_STORAGE_SAS_TOKEN": Secret(value=token)},
            issued_s=issued_s,
            expires_s=issued_s + LIFE_S,
            renew_s=issued_s + LIFE_S / 2,
            by=f"a signature for the container `{containers[0]}` of `{account}`",
        )

    def prove(self, need: Need, grant: Grant) -> None:
        """Prove access by writing and deleting an empty blob, or by listing one blob."""
        account = grant.envs["AZURE_STORAGE_ACCOUNT_NAME"]
        base = grant.envs.get("AZURE_STORAGE_ENDPOINT", "").rstrip("/") or f"https://{account}.blob.core.windows.net"
        token = grant.secrets["AZURE_STORAGE_SAS_TOKEN"].value
        if not need.is_written:
            query = {"restype": "container", "comp": "list", "maxresults": "1", "prefix": need.path}
            _send_request("GET", f"{base}/{need.bucket}?{urlencode(query)}&{token}", need)
            return
        url = f"{base}/{need.bucket}/{quote(need.find_probe())}?{token}"
        _send_request("PUT", url, need, {"x-ms-blob-type": "BlockBlob"})
        _send_request("DELETE", url, need)


def make_signature(account: str, key: str, container: str, *, permissions: str, start_s: float, end_s: float) -> str:
    """Make a query string (Azure Storage documentation, "Create a service SAS", version 2020-12-06 and later)."""
    start, end = (datetime.fromtimestamp(each, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") for each in (start_s, end_s))
    # Identifier, address, protocol; snapshot, encryption scope and five response headers are empty.
    lines = [permissions, start, end, f"/blob/{account}/{container}", "", "", "", VERSION, "c", *[""] * 7]
    try:
        secret = base64.b64decode(key, validate=True)
    except binascii.Error as error:
        raise AuthError("invalid storage account key: it is not base64", hints=(LOGIN,)) from error
    digest = hmac.new(secret, "\n".join(lines).encode(), hashlib.sha256).digest()
    fields = {"sv": VERSION, "sr": "c", "sp": permissions, "st": start, "se": end}
    return urlencode({**fields, "sig": base64.b64encode(digest).decode("ascii")}, quote_via=quote, safe="")


def _send_request(method: str, url: str, need: Need, headers: Mapping[str, str] | None = None) -> None:
    body = b"" if method == "PUT" else None
    all_headers = {"x-ms-version": VERSION, **(headers or {})}
    try:
        request = urllib.request.Request(url, method=method, data=body, headers=all_headers)
        with urllib.request.build_opener(NoRedirect).open(request, timeout=ANSWER_S):
            return
    except urllib.error.HTTPError as error:
        what = f"cannot use `{need.url}`: HTTP {error.code}"
        if error.code in (401, 403):
            raise AuthError(what, hints=(LOGIN, OWN_TOKEN)) from error
        if error.code == 404:
            hints = (f"create it with `az storage container create --name {need.bucket}`",)
            raise InvalidRequestError(what, hints=hints) from error
        if 400 <= error.code < 500 and error.code not in (408, 409, 429):  # 409: the container is being deleted
            raise InvalidRequestError(what) from error
        raise TransientError(what) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        # Not its message, nor the error itself as the cause: some contain the URL, which has the signature.
        raise TransientError(f"cannot reach Azure: {type(error).__name__}") from None


def _find(names: Sequence[str], variables: Mapping[str, str]) -> str:
    return next((variables[name] for name in names if variables.get(name)), "")
