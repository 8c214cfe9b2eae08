"""Google's IAM and Cloud Storage over REST: an account for a task's keys, its permissions, and an expiring key.

All verbs are idempotent. IAM API v1, projects.serviceAccounts; Cloud Storage JSON API, buckets.getIamPolicy, "IAM
Conditions".
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from broker.access.base import Need
from broker.errors import AuthError, CloudError, InvalidRequestError, TransientError

TIMEOUT_S = 30.0
IAM, STORAGE, TOKEN = "https://iam.googleapis.com", "https://storage.googleapis.com", "https://oauth2.googleapis.com"
POLICY_VERSION = 3  # the first version with conditions
POLICY_TRIES = 4  # of read, change and write, because other writers may interfere
INSPECT, READ, WRITE = "roles/storage.legacyBucketReader", "roles/storage.objectViewer", "roles/storage.objectUser"
BACKDATED = timedelta(hours=1)  # Google's clocks and ours may differ
KEY_BITS = 2048


class NotYetError(TransientError):
    """A new resource is not known everywhere yet: Google's IAM may take minutes ("Access change propagation")."""


class GoogleIam:
    """A client of Google's API. `session`: a logged-in `requests` session. `endpoint`: a server instead of Google's."""

    def __init__(self, session: Any, project: str, *, endpoint: str = "") -> None:
        self._session, self._project, self._endpoint = session, project, endpoint

    @property
    def storage_url(self) -> str:
        """URL of Cloud Storage, or of the fake given by tests."""
        return self._endpoint or STORAGE

    @property
    def token_url(self) -> str:
        """URL that exchanges a signed assertion for a token."""
        return f"{self._endpoint or TOKEN}/token"

    def ensure_account(self, account_id: str, *, description: str) -> str:
        """Return the email of the service account; create it if necessary."""
        body = {"accountId": account_id, "serviceAccount": {"displayName": "broker", "description": description[:256]}}
        status, answer = self._request("POST", f"{self._iam}/serviceAccounts", body, fine=(409,))
        email = f"{account_id}@{self._project}.iam.gserviceaccount.com"
        return email if status == 409 else str(answer["email"])

    def ensure_bindings(self, bucket: str, email: str, needs: Sequence[Need]) -> None:
        """Allow the account to list the bucket's names and to use the keys of `needs`."""
        wanted = make_bindings(bucket, f"serviceAccount:{email}", needs)
        url = f"{self.storage_url}/storage/v1/b/{bucket}/iam"
        for _ in range(POLICY_TRIES):
            _, policy = self._request("GET", f"{url}?optionsRequestedPolicyVersion={POLICY_VERSION}")
            bindings = list(policy.get("bindings", ()))
            missing = [each for each in wanted if not any(is_bound(each, other) for other in bindings)]
            if not missing:
                return
            body = {**policy, "version": POLICY_VERSION, "bindings": [*bindings, *missing]}
            if self._request("PUT", url, body, fine=(412,))[0] != 412:  # 412: the etag is outdated
                return
        # Conditions are also refused with 412 if the objects of a bucket may have their own permissions.
        raise InvalidRequestError(
            f"cannot change the permissions of `gs://{bucket}`: HTTP 412",
            hints=(f"`gcloud storage buckets update gs://{bucket} --uniform-bucket-level-access`",),
        )

    def upload_key(self, email: str, *, now_s: float, life_s: float) -> dict[str, Any]:
        """Return a new key in the format of Google's key files.

        The private half is created and stored here; Google receives the public half as a certificate, and refuses the
        key once the certificate has expired ("Upload service account keys").
        """
        private, certificate = make_key(now_s=now_s, life_s=life_s)
        body = {"publicKeyData": base64.b64encode(certificate).decode("ascii")}
        _, answer = self._request("POST", f"{self._iam}/serviceAccounts/{email}/keys:upload", body)
        return {
            "type": "service_account",
            "project_id": self._project,
            "private_key_id": str(answer["name"]).rpartition("/")[2],
            "private_key": private.decode("ascii"),
            "client_email": email,
            "client_id": "",
            "token_uri": self.token_url,
            "universe_domain": "googleapis.com",
        }

    def delete_account(self, email: str, *, project: str) -> None:
        """Delete an account of this project with its keys and permissions; no effect if it does not exist."""
        self._request("DELETE", f"{self._endpoint or IAM}/v1/projects/{project}/serviceAccounts/{email}", fine=(404,))

    def delete_ended_keys(self, email: str, *, now_s: float) -> None:
        """Delete expired keys: an account may have at most ten, including expired ones."""
        url = f"{self._iam}/serviceAccounts/{email}/keys"
        for key in self._request("GET", f"{url}?keyTypes=USER_MANAGED")[1].get("keys", ()):
            end = datetime.fromisoformat(str(key["validBeforeTime"]).replace("Z", "+00:00"))
            if end.timestamp() < now_s:
                self._request("DELETE", f"{url}/{str(key['name']).rpartition('/')[2]}", fine=(404,))

    @property
    def _iam(self) -> str:
        return f"{self._endpoint or IAM}/v1/projects/{self._project}"

    def _request(
        self, method: str, url: str, body: Mapping[str, Any] | None = None, *, fine: Sequence[int] = ()
    ) -> tuple[int, dict[str, Any]]:
        import requests
        from google.auth.exceptions import GoogleAuthError

        try:
            answer = self._session.request(method, url, json=body, timeout=TIMEOUT_S)
        except GoogleAuthError as error:
            hints = ("`gcloud auth application-default login`",)
            raise AuthError(f"your Google login has expired: {type(error).__name__}", hints=hints) from error
        except requests.RequestException as error:
            raise TransientError(f"cannot reach Google: {type(error).__name__}") from error
        try:
            found: dict[str, Any] = answer.json() if answer.content else {}
        except ValueError:
            found = {}
        if answer.status_code < 300 or answer.status_code in fine:
            return answer.status_code, found
        raise translate(answer.status_code, found, method, url)


def translate(status: int, answer: Mapping[str, Any], method: str, url: str) -> CloudError:
    """Translate an error by its status, and by the reason in the details of Google's error model (AIP-193)."""
    error = answer.get("error", {})
    error = error if isinstance(error, Mapping) else {}
    reasons = [str(each.get("reason") or each.get("violations") or "") for each in error.get("details", ())]
    message = f"{str(error.get('message') or f'HTTP {status}').rstrip('.')[:300]} ({method} {url.partition('?')[0]})"
    if status in (401, 403):
        return AuthError(message)
    if status >= 500 or status == 429:
        return TransientError(message)
    if "constraints/" in " ".join(reasons) + message:  # an organisation's policy: permanent
        return AuthError(message)
    if status == 404 and "/serviceAccounts/" in url:
        return NotYetError(message)  # new, and not known everywhere yet
    if status == 400 and url.endswith("/iam") and "does not exist" in message:  # Google has no error code for this
        return NotYetError(message)
    bucket = url.partition("/b/")[2].partition("/")[0]
    hints = (f"create it with `gcloud storage buckets create gs://{bucket}`",) if status == 404 and bucket else ()
    return InvalidRequestError(message, hints=hints)


def make_bindings(bucket: str, member: str, needs: Sequence[Need]) -> list[dict[str, Any]]:
    """Make the bindings.

    Pure. Listing is allowed for the whole bucket; without it, a missing object would be "403" instead of "404".
    """
    bindings: list[dict[str, Any]] = [{"role": INSPECT, "members": [member]}]
    for need in needs:
        binding: dict[str, Any] = {"role": READ if need.is_read_only else WRITE, "members": [member]}
        if need.path:
            binding["condition"] = {"title": "broker", "expression": write_condition(bucket, need)}
        bindings.append(binding)
    return bindings


def write_condition(bucket: str, need: Need) -> str:
    """Make a CEL condition: an object's `resource.name` is `projects/_/buckets/BUCKET/objects/KEY`."""
    name = f"projects/_/buckets/{bucket}/objects/{need.path}"
    if need.is_open:
        return f"resource.name.startsWith({json.dumps(name)})"
    return f"resource.name == {json.dumps(name)} || resource.name.startsWith({json.dumps(name + '/')})"


def is_bound(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """Return whether an existing policy binding includes the wanted one."""
    (member,) = wanted["members"]
    expressions = [each.get("condition", {}).get("expression") for each in (wanted, found)]
    return wanted["role"] == found.get("role") and expressions[0] == expressions[1] and member in found["members"]


def make_key(*, now_s: float, life_s: float) -> tuple[bytes, bytes]:
    """Make a private RSA key (PKCS #8) and a certificate of its public half that expires with it; both are PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=KEY_BITS)
    # required by Google; contains nothing private
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "unused")])
    now = datetime.fromtimestamp(now_s, UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + timedelta(seconds=life_s))
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private, certificate.public_bytes(serialization.Encoding.PEM)
