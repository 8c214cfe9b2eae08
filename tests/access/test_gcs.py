"""Access to Google's buckets over the wire: Google's own login library uses the files that nodes get."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from google.auth.exceptions import RefreshError
from google.auth.transport.requests import AuthorizedSession

from broker.access import gcs, google_iam
from broker.access.base import Grant, Need
from broker.access.gcs import LIFE_S, GcsGranter
from broker.access.granting import Grants
from broker.access.needs import list_needs
from broker.agent import agent_bucket, agent_login
from broker.clock import SystemClock
from broker.config import Config
from broker.errors import AuthError, CloudError, InvalidRequestError, TransientError
from tests.access.plans import make_task, plan_on
from tests.testbed.google_iam import FakeGoogle, Refusal, serve_google

PLACE = "gs://testbed/runs"


class PatientClock(SystemClock):
    """A clock whose sleeps return at once and advance it."""

    ahead_s = 0.0

    def now_s(self) -> float:
        return super().now_s() + self.ahead_s

    async def sleep(self, duration_s: float) -> None:
        self.ahead_s += duration_s


@pytest.fixture
def google(config: Config, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGoogle]:
    for name in [name for name in os.environ if name.startswith(("GOOGLE_", "CLOUDSDK_"))]:
        monkeypatch.delenv(name)
    with serve_google() as served:
        monkeypatch.setenv("BROKER_GCP_ENDPOINT", served.url)
        monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "vision")
        yield served


def issue(config: Config, clock: SystemClock, *needs: Need) -> Grant:
    return GcsGranter(config, clock=clock).issue(needs or list_needs(make_task(PLACE), "0wner"))


def write(config: Config, google: FakeGoogle, grant: Grant, key: str) -> None:
    """Write an outcome as the node's agent does, with the file that Google's libraries read too."""
    path = config.home / "google.json"
    path.write_text(grant.files["google.json"].value)
    variables = {"GOOGLE_APPLICATION_CREDENTIALS": str(path), "STORAGE_EMULATOR_HOST": google.url}
    agent_bucket.put(f"gs://testbed/{key}", b"{}", variables)


def test_key_writes_this_installations_checkpoints_and_nothing_else(config: Config, google: FakeGoogle) -> None:
    google.policies["testbed"]["bindings"] = [{"role": "roles/storage.admin", "members": ["user:me"]}]
    grants = Grants(config, clock=SystemClock())
    (sentence,) = grants.check([plan_on(make_task(PLACE), "aws")], allowances_s=[12 * 3600.0])
    assert "gs://testbed/runs/0wner-*" in sentence and "for 8 days at a time" in sentence
    assert "ends before" not in sentence and not google.objects
    grant = issue(config, SystemClock())
    write(config, google, grant, "runs/0wner-job/outcomes/1.json")
    assert google.objects == {"testbed/runs/0wner-job/outcomes/1.json": b"{}"}
    for key in ("runs/other-job/outcomes/1.json", "data/a"):
        with pytest.raises(agent_login.Refused, match="HTTP 403"):
            write(config, google, grant, key)
    kept = [each for each in google.policies["testbed"]["bindings"] if each["members"] == ["user:me"]]
    assert kept, "the bucket's other permissions stay"


def test_commands_and_jobs_share_one_key_until_half_of_its_life(config: Config, google: FakeGoogle) -> None:
    clock = PatientClock()
    first, second = issue(config, clock), issue(config, clock)
    assert first.files["google.json"].value == second.files["google.json"].value and google.writes == 1
    (path,) = (config.home / "access").glob("*.json")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    clock.ahead_s += LIFE_S / 2 + 1
    third = issue(config, clock)
    assert third.files != first.files and third.expires_s > first.expires_s
    assert google.writes == 1, "the permissions are there already"
    path.write_text("{damaged")
    clock.ahead_s += LIFE_S / 2
    issue(config, clock)
    (keys,) = google.keys.values()
    assert len(keys) == 2, "an expired key is deleted: an account has at most ten"


def test_sweep_deletes_the_accounts_that_were_made(config: Config, google: FakeGoogle) -> None:
    granter = GcsGranter(config, clock=SystemClock())
    assert granter.sweep() == 0
    granter.issue(list_needs(make_task(PLACE), "0wner"))
    assert granter.sweep() == 1 and not google.accounts and not list((config.home / "access").glob("*.json"))


def test_sweep_finds_accounts_in_the_project_of_an_earlier_login(
    config: Config, google: FakeGoogle, monkeypatch: pytest.MonkeyPatch
) -> None:
    issue(config, SystemClock())
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "other")
    granter = GcsGranter(config, clock=SystemClock())
    google.refusals["/serviceAccounts/"] = Refusal(403, "no permission in that project")
    with pytest.raises(AuthError):
        granter.sweep()
    assert list((config.home / "access").glob("*.json")), "it is not forgotten"
    google.refusals.clear()
    assert granter.sweep() == 1 and not google.accounts


def test_key_of_an_account_that_was_deleted_by_hand_is_made_again(config: Config, google: FakeGoogle) -> None:
    clock = PatientClock()
    grants, plan = Grants(config, clock=clock), plan_on(make_task(PLACE), "aws")
    grants.check([plan])
    (email,) = google.accounts
    google.accounts.clear()
    google.keys.clear()
    google.policies["testbed"]["bindings"] = []
    clock.ahead_s += 3600.0
    with pytest.raises(AuthError, match="the key is not accepted") as refused:
        grants.check([plan])
    assert "run the command again" in refused.value.hints[0]
    grants.check([plan])
    assert google.accounts == {email}


def test_key_that_an_earlier_process_has_just_made_is_given_time(
    config: Config, google: FakeGoogle, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = PatientClock()
    need = list_needs(make_task(PLACE), "0wner")[0]
    grant = issue(config, clock)
    use, tries = gcs._use, 0

    def refuse_twice(key: dict[str, Any], need: Need) -> None:
        nonlocal tries
        tries += 1
        if tries <= 2:
            raise AuthError("HTTP 403")
        use(key, need)

    monkeypatch.setattr(gcs, "_use", refuse_twice)
    GcsGranter(config, clock=clock).prove(need, grant)
    assert tries == 3
    tries, clock.ahead_s = 0, clock.ahead_s + 3600.0
    with pytest.raises(AuthError, match="HTTP 403"):
        GcsGranter(config, clock=clock).prove(need, grant)
    assert tries == 1 and list((config.home / "access").glob("*.json")), "others may use the key"


def test_an_account_that_has_not_propagated_yet_is_waited_for(config: Config, google: FakeGoogle) -> None:
    google.unknown_count = 3
    clock = PatientClock()
    issue(config, clock)
    assert clock.ahead_s == 15.0
    google.unknown_count, clock.ahead_s = 10**6, 0.0
    for path in (config.home / "access").glob("*.json"):
        path.unlink()
    with pytest.raises(Exception, match="unknown service account"):
        issue(config, clock)


@pytest.mark.parametrize(
    ("path", "refusal", "hint"),
    [
        ("/serviceAccounts", Refusal(403, "Permission denied"), "iam.serviceAccounts.create"),
        ("keys:upload", Refusal(400, "constraints/iam.disableServiceAccountKeyUpload"), "service_account"),
        ("/iam", Refusal(403, "no setIamPolicy"), "storage.buckets.setIamPolicy"),
        ("/iam PUT", Refusal(412, "conditions"), "--uniform-bucket-level-access"),
    ],
    ids=["account", "organisation", "bucket", "uniform"],
)
def test_missing_google_permission_refuses_the_launch_and_lists_remedies(
    config: Config, google: FakeGoogle, path: str, refusal: Refusal, hint: str
) -> None:
    google.refusals[path] = refusal
    with pytest.raises((AuthError, InvalidRequestError), match="nodes on aws would have no access") as refused:
        Grants(config, clock=PatientClock()).check([plan_on(make_task(PLACE), "aws")])
    assert hint in " ".join(refused.value.hints)


def test_missing_bucket_is_found_before_money_is_spent(config: Config, google: FakeGoogle) -> None:
    with pytest.raises(InvalidRequestError, match="does not exist") as refused:
        Grants(config, clock=PatientClock()).check([plan_on(make_task("gs://typo/runs"), "gcp")])
    assert "gcloud storage buckets create gs://typo" in refused.value.hints[0]


def test_users_own_service_account_takes_precedence_at_google_only(config: Config, google: FakeGoogle) -> None:
    (config.home / "gcp.toml").write_text('service_account = "mine@vision.iam.gserviceaccount.com"\n')
    granter = GcsGranter(config, clock=SystemClock())
    assert granter.find_own(make_task(PLACE), "gcp") and not granter.find_own(make_task(PLACE), "aws")
    assert granter.find_own(make_task(PLACE, envs={"GOOGLE_APPLICATION_CREDENTIALS": "~/k.json"}), "aws")


def test_grant_for_copied_data_is_read_only(config: Config, google: FakeGoogle) -> None:
    google.objects["testbed/data/a"] = b"a"
    grant = issue(config, SystemClock(), Need(scheme="gs", bucket="testbed", path="data", is_read_only=True))
    email = json.loads(grant.files["google.json"].value)["client_email"]
    for name, action, allowed in (
        *(("data", "get", True), ("data/a", "get", True), ("database", "get", False)),
        *(("data/a", "create", False), ("", "list", True)),
    ):
        assert google.allows(email, "testbed", name, action) is allowed, (name, action)


def test_obstore_signs_with_the_key_that_nodes_are_given(
    config: Config, google: FakeGoogle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainers' library finds the file through the variable, and has no other login."""
    from obstore.store import GCSStore

    path = config.home / "google.json"
    path.write_text(issue(config, SystemClock()).files["google.json"].value)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
    GCSStore("testbed")  # it fails on a file that it cannot read
    path.write_text("{}")
    with pytest.raises(Exception, match=r"(?i)credential|missing|decode"):
        GCSStore("testbed")


def make_found(**found: Any) -> str:
    return json.dumps(found)


def test_agent_uses_a_users_login_file(config: Config, google: FakeGoogle, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, list[str]]] = []

    def exchange(body: bytes) -> dict[str, str]:
        from urllib.parse import parse_qs

        asked.append(parse_qs(body.decode()))
        return {"access_token": "token-of-the-user"}

    answer = google.answer
    monkeypatch.setattr(google, "answer", lambda *call: exchange(call[3]) if call[1] == "/token" else answer(*call))
    path = config.home / "adc.json"
    path.write_text(
        make_found(
            type="authorized_user", client_id="c", client_secret="s", refresh_token="r", token_uri=f"{google.url}/token"
        )
    )
    variables = {"GOOGLE_APPLICATION_CREDENTIALS": str(path)}
    assert agent_login.find_google_token(variables) == "token-of-the-user"
    assert asked[0]["grant_type"] == ["refresh_token"] and asked[0]["refresh_token"] == ["r"]
    for text in ("{", make_found(type="external_account"), make_found(type="service_account", client_email="x")):
        path.write_text(text)
        with pytest.raises(agent_login.Refused, match="no login for gs://"):
            agent_login.find_google_token(variables)


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (requests.ConnectionError("reset"), TransientError, "cannot reach Google: ConnectionError"),
        (requests.Timeout(), TransientError, "cannot reach Google: Timeout"),
        (RefreshError("expired"), AuthError, "the key is not accepted"),
        (401, AuthError, "HTTP 401"),
        (403, AuthError, "HTTP 403"),
        (404, InvalidRequestError, "cannot use `gs://testbed/runs/x`: HTTP 404"),
        (503, TransientError, "cannot use `gs://testbed/runs/x`: HTTP 503"),
    ],
)
@pytest.mark.parametrize("is_written", [True, False])
def test_a_key_that_cannot_be_tried_is_distinguished_from_one_that_is_refused(
    config: Config,
    google: FakeGoogle,
    monkeypatch: pytest.MonkeyPatch,
    answer: Exception | int,
    kind: type[Exception],
    words: str,
    *,
    is_written: bool,
) -> None:
    key = json.loads(issue(config, SystemClock()).files["google.json"].value)

    def respond(*arguments: object, **options: object) -> SimpleNamespace:
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(status_code=answer)

    for verb in ("get", "post"):
        monkeypatch.setattr(AuthorizedSession, verb, respond)
    with pytest.raises(kind, match=words):
        gcs._use(key, Need(scheme="gs", bucket="testbed", path="runs/x", is_written=is_written))


@pytest.mark.parametrize(
    ("status", "kind"), [(429, TransientError), (503, TransientError), (403, AuthError), (400, InvalidRequestError)]
)
def test_answers_of_google_are_errors_that_pass_or_do_not(status: int, kind: type[CloudError]) -> None:
    found = google_iam.translate(status, {}, "GET", "https://storage.googleapis.com/storage/v1/b/x/o")
    assert type(found) is kind
