"""Access to Google's buckets: a service account limited to a task's keys, with an expiring key.

Google's own tokens expire after an hour, which would end a job whose broker is unavailable overnight.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from broker.access.base import FOLDER, Grant, Need
from broker.access.google_iam import GoogleIam, NotYetError
from broker.access.kept import KeptKeys, name_needs
from broker.clock import Clock
from broker.clouds.gcp.login import Login, find_login
from broker.clouds.gcp.settings import load_settings
from broker.config import Config
from broker.errors import AuthError, CloudError, InvalidRequestError, TransientError
from broker.types import Secret, Task

# Longer than Google runs a GPU machine (7 days, docs/GCP.md): libraries only read a key file once, when they start.
LIFE_S = 8 * 86400.0
PROPAGATION_S = 420.0  # Google IAM, "Access change propagation": typically 2 minutes, up to 7 or more
PAUSE_S = 5.0
SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
OWN_VARIABLES = ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT_KEY", "GOOGLE_SERVICE_ACCOUNT")
LOGIN = "`gcloud auth application-default login`"
ATTACH = 'for nodes at Google: name a service account, `service_account = "EMAIL"` in `gcp.toml` in the state folder'
OWN_KEY = (
    "or provide your own key file: `file_mounts: {~/key.json: KEY.json}` and "
    "`envs: {GOOGLE_APPLICATION_CREDENTIALS: ...}`"
)
PERMISSIONS = (
    "your login requires `iam.serviceAccounts.create`, `iam.serviceAccountKeys.create` and "
    "`storage.buckets.setIamPolicy`, `storage.buckets.getIamPolicy` (docs/BUCKET_ACCESS.md)"
)


def make_granter(config: Config, *, clock: Clock) -> GcsGranter:
    """Return the granter of this scheme; it contacts the cloud on first use."""
    return GcsGranter(config, clock=clock)


class RefusedKeyError(AuthError):
    """Google does not know the key: it has ended, or it or its account was deleted."""


class GcsGranter:
    """Implement `Granter` for Google Cloud Storage."""

    def __init__(self, config: Config, *, clock: Clock, open_iam: Callable[[Login], GoogleIam] | None = None) -> None:
        self._settings = load_settings(config.home)
        self._kept, self._owner, self._clock = KeptKeys(config.home, "gs"), config.owner, clock
        self._open_iam = open_iam or _open_iam

    def find_own(self, task: Task, cloud: str) -> str:
        """Return the task's own credentials, or the service account of a Google node; "" without either."""
        names = (*OWN_VARIABLES, "STORAGE_EMULATOR_HOST")
        if name := next((each for each in names if each in task.secrets or each in task.envs), ""):
            return f"the task's own `{name}`"
        if any("~/.config/gcloud" in target for target in task.file_mounts):
            return "the task's own `~/.config/gcloud`"
        if cloud == "gcp" and self._settings.service_account:
            return f"the service account `{self._settings.service_account}`"
        return ""

    def issue(self, needs: Sequence[Need], *, endpoint: str = "") -> Grant:
        """Issue a grant.

        Data that is only named (`is_optional`) is omitted, because its bucket may belong to another account.
        """
        required = [need for need in needs if not need.is_optional]
        if not required:
            raise InvalidRequestError(
                "Google grants do not cover buckets that a task only names in `inputs` and `outputs`"
            )
        login = find_login(self._settings)
        if login is None or not login.project:
            what = "your Google login has no project" if login else "no Google login"
            hint = "gcloud config set project PROJECT" if login else LOGIN
            raise AuthError(f"{what}, so access to `gs://` cannot be granted", hints=(hint, OWN_KEY))
        name = name_needs(self._owner, login.project, required)
        with self._kept.locked():
            kept = self._kept.read(name)
            now_s = self._clock.now_s()
            if kept is None or not kept["issued_s"] <= now_s < kept["issued_s"] + LIFE_S / 2:
                kept = self._make(login, f"broker-{name}", required)
                self._kept.write(name, kept)
        return Grant(
            files={"google.json": Secret(value=json.dumps(kept["key"]))},
            envs={
                "GOOGLE_APPLICATION_CREDENTIALS": f"{FOLDER}/google.json",
                # the only variable that gcloud and gsutil read
                "CLOUDSDK_AUTH_CREDENTIAL_FILE_OVERRIDE": f"{FOLDER}/google.json",
            },
            issued_s=kept["issued_s"],
            expires_s=kept["issued_s"] + LIFE_S,
            renew_s=kept["issued_s"] + LIFE_S / 2,
            by=f"the service account `{kept['key']['client_email']}`",
        )

    def prove(self, need: Need, grant: Grant) -> None:
        """Prove access like a node: exchange the key for a token, then write and delete an object, or list names.

        Google takes time to apply a new key or permission, also one that an earlier process made. An older key that
        Google refuses belongs to an account that was deleted there: it is forgotten, so that the next call makes both.
        """
        key = json.loads(grant.files["google.json"].value)
        while True:
            try:
                _use(key, need)
                return
            except AuthError as error:
                if not 0.0 <= self._clock.now_s() - grant.issued_s < PROPAGATION_S:
                    hints: tuple[str, ...] = (OWN_KEY,)
                    if isinstance(error, RefusedKeyError):
                        self._forget(key)
                        hints = ("run the command again: it makes another key", *hints)
                    raise AuthError(f"{grant.by} cannot use `{need.url}`: {error.message}", hints=hints) from error
            asyncio.run(self._clock.sleep(PAUSE_S))

    def _forget(self, key: Mapping[str, Any]) -> None:
        with self._kept.locked():
            for name in self._kept.list_names():
                kept = self._kept.read(name)
                if kept is not None and kept["key"] == key:
                    self._kept.forget(name)

    def sweep(self) -> int:
        """Delete the accounts with all their keys and permissions, each in its project; return their number.

        Every account is attempted, then the first failure is raised.
        """
        login = find_login(self._settings)
        if login is None or not (names := self._kept.list_names()):
            return 0
        iam, failures = self._open_iam(login), list[CloudError]()
        with self._kept.locked():
            for name in names:
                # The login may be for another project by now, where Google would answer that there is no such account.
                key = (self._kept.read(name) or {"key": {}})["key"]
                project = str(key.get("project_id") or login.project)
                email = key.get("client_email") or f"broker-{name}@{project}.iam.gserviceaccount.com"
                try:
                    iam.delete_account(str(email), project=project)
                    self._kept.forget(name)
                except CloudError as error:
                    failures.append(error)
        if failures:
            raise failures[0]
        return len(names)

    def _make(self, login: Login, account_id: str, needs: Sequence[Need]) -> dict[str, Any]:
        try:
            return self._try_make(login, account_id, needs)
        except AuthError as error:
            hints = error.hints or (PERMISSIONS, ATTACH, OWN_KEY)
            raise AuthError(
                f"Google does not permit your login to grant access: {error.message}", hints=hints
            ) from error

    def _try_make(self, login: Login, account_id: str, needs: Sequence[Need]) -> dict[str, Any]:
        """Create the account, permissions and key, retrying while Google has not propagated the previous step."""
        iam = self._open_iam(login)
        urls = ", ".join(need.url for need in needs)
        email = iam.ensure_account(account_id, description=f"broker {self._owner}: {urls}")
        give_up_s = self._clock.now_s() + PROPAGATION_S
        while True:
            try:
                for bucket in sorted({need.bucket for need in needs}):
                    own = [need for need in needs if need.bucket == bucket]
                    iam.ensure_bindings(bucket, email, own)
                now_s = self._clock.now_s()
                iam.delete_ended_keys(email, now_s=now_s)
                key = iam.upload_key(email, now_s=now_s, life_s=LIFE_S)
                return {"issued_s": now_s, "key": key}
            except NotYetError:
                if self._clock.now_s() >= give_up_s:
                    raise
            asyncio.run(self._clock.sleep(PAUSE_S))


def _use(key: dict[str, Any], need: Need) -> None:
    import requests
    from google.auth.exceptions import GoogleAuthError
    from google.auth.transport.requests import AuthorizedSession
    from google.oauth2.service_account import Credentials

    base = str(key["token_uri"]).removesuffix("/token").replace("oauth2.googleapis.com", "storage.googleapis.com")
    credentials = Credentials.from_service_account_info(key, scopes=[SCOPE])  # type: ignore[no-untyped-call]
    session = AuthorizedSession(credentials)  # type: ignore[no-untyped-call]
    objects = f"{base}/storage/v1/b/{need.bucket}/o"
    try:
        if need.is_written:
            url = f"{base}/upload/storage/v1/b/{need.bucket}/o"
            query = {"uploadType": "media", "name": need.find_probe()}
            answer = session.post(url, params=query, data=b"", timeout=30)
            if answer.status_code < 300:
                name = quote(need.find_probe(), safe="")
                answer = session.delete(f"{objects}/{name}", timeout=30)
        else:
            answer = session.get(objects, params={"maxResults": "1", "prefix": need.path}, timeout=30)
    except GoogleAuthError as error:
        raise RefusedKeyError(f"the key is not accepted ({type(error).__name__})") from error
    except requests.RequestException as error:
        raise TransientError(f"cannot reach Google: {type(error).__name__}") from error
    if answer.status_code in (401, 403):
        raise AuthError(f"HTTP {answer.status_code}")
    if answer.status_code >= 300:
        is_temporary = answer.status_code >= 500 or answer.status_code in (408, 429)
        kind: type[CloudError] = TransientError if is_temporary else InvalidRequestError
        raise kind(f"cannot use `{need.url}`: HTTP {answer.status_code}")


def _open_iam(login: Login) -> GoogleIam:
    try:
        import google.auth
        import requests
        from google.auth.transport.requests import AuthorizedSession
    except ImportError as error:
        raise AuthError(
            "granting nodes access to `gs://` requires Google's login library",
            hints=("pip install 'intercloud-broker[gcp]'", OWN_KEY),
        ) from error
    if login.endpoint:
        return GoogleIam(requests.Session(), login.project, endpoint=login.endpoint)
    try:
        credentials, _ = google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"])
    except google.auth.exceptions.DefaultCredentialsError as error:
        raise AuthError("no usable login for Google", hints=(LOGIN, OWN_KEY)) from error
    return GoogleIam(AuthorizedSession(credentials), login.project)  # type: ignore[no-untyped-call]
