"""Logins through an OIDC issuer: what its ID tokens must prove, and what a login is worth here."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from broker.cli.main import main
from broker.client.browser_login import log_in
from broker.client.login import ServerLogin
from broker.clock import SystemClock
from broker.errors import AuthError, BrokerError, DeniedError, TransientError, UsageError
from broker.server.context import Policy
from broker.server.oidc import Issuer, check_claims, identify, read_header
from broker.server.oidc_settings import OidcSettings, read_oidc_settings
from broker.state.people import Role
from broker.types import Secret
from tests.server.conftest import Hosted
from tests.server.issuer import CLIENT, TestIssuer

SETTINGS = """\
[oidc]
issuer = "{url}"
client_id = "{client}"
allowed_domains = ["example.org"]
denied_users = ["eve@example.org"]
[oidc.roles]
readers = "viewer"
ml-team = "user"
ml-admins = "admin"
[oidc.projects]
vision-lead = "vision"
speech = "speech-lab"
"team vision" = "vision"
"""


@pytest.fixture(scope="module")
def issuer() -> Iterator[TestIssuer]:
    issuer = TestIssuer()
    yield issuer
    issuer.stop()


@pytest.fixture(scope="module")
def served(issuer: TestIssuer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    home = tmp_path_factory.mktemp("oidc")
    (home / "config.toml").write_text(SETTINGS.format(url=issuer.url, client=CLIENT))
    hosted = Hosted(home, policy=Policy(has_controller=False))
    yield hosted
    hosted.stop()


@pytest.fixture(autouse=True)
def fresh(issuer: TestIssuer) -> Iterator[None]:
    claims, key, published = dict(issuer.claims), issuer.key, list(issuer.published)
    yield
    issuer.claims, issuer.key, issuer.published = claims, key, published
    issuer.edit, issuer.sign = (lambda claims: None), issuer.sign_with_key


def browse(page: str) -> None:
    """Follow the redirect of the issuer back to the client, as a browser would, in a thread of its own."""
    import threading

    def follow() -> None:
        with contextlib.suppress(OSError):  # a refusal, or a client that has given up
            urlopen(page, timeout=300).read()

    threading.Thread(target=follow, daemon=True).start()


def enter(served: Hosted) -> str:
    return log_in(ServerLogin(url=served.listening.url, token=Secret(value="")), browse).value


def get_user(served: Hosted, token: str) -> tuple[int, Any]:
    status, answer = served.ask("/v1/handshake", token=token)
    return status, (answer.get("user"), answer.get("role"))


def test_login_yields_an_expiring_token_with_the_mapped_role(served: Hosted) -> None:
    token = enter(served)
    assert token.startswith("broker_")
    assert get_user(served, token) == (200, ("ada@example.org", "user"))
    made = served.context.store.tokens.list()[-1]
    assert made.expires_s is not None and 11.9 * 3600 < made.expires_s - made.created_s <= 12 * 3600
    (entry,) = [each for each in served.context.store.audit.list() if each.verb == "login"][-1:]
    assert (entry.user, entry.outcome, entry.target) == ("ada@example.org", "done", f"token {made.id}")


def test_revoked_user_is_refused_at_once(served: Hosted) -> None:
    token = enter(served)
    served.context.store.tokens.revoke(served.context.store.tokens.list()[-1].id)
    assert get_user(served, token)[0] == 401


@pytest.mark.parametrize(
    ("claims", "expected"),
    [
        ({"groups": ["readers", "ml-admins", "other"]}, "admin"),
        ({"groups": "readers"}, "viewer"),
        ({"groups": ["other"]}, "has no role"),
        ({"groups": 7}, "has no role"),
        ({"email_verified": False}, "not verified"),
        ({"email_verified": "true"}, "not verified"),
        ({"email": "ada@elsewhere.org"}, "users of `elsewhere.org` may not"),
        ({"email": "ada@example.org.evil.org"}, "may not log in"),
        ({"email": "eve@example.org"}, "may not log in"),
        ({"email": "Eve@Example.org"}, "may not log in"),
        ({"email": "a b@example.org"}, "no `email` that is a valid user name"),
        ({"email": None}, "no `email`"),
    ],
)
def test_claims_decide_role_and_access(
    served: Hosted, issuer: TestIssuer, claims: Mapping[str, Any], expected: str
) -> None:
    issuer.claims.update(claims)
    count = len(served.context.store.tokens.list())
    if expected in ("admin", "viewer"):
        assert get_user(served, enter(served))[1][1] == expected
        return
    with pytest.raises(DeniedError, match=expected):
        enter(served)
    assert len(served.context.store.tokens.list()) == count
    assert served.context.store.audit.list()[-1].outcome == "DeniedError"


@pytest.mark.parametrize(
    ("groups", "project"),
    [
        (["ml-team"], ""),
        (["ml-team", "team vision", "speech"], "speech-lab"),
        (["ml-team", "speech", "vision-lead"], "vision"),
        (["ml-team", "vision"], ""),
        (["ml-team", 7], ""),
    ],
)
def test_limits_of_the_project_of_a_group_apply_to_its_users(
    served: Hosted, issuer: TestIssuer, groups: list[object], project: str
) -> None:
    """The first line of the table that fits decides, so that a user cannot choose a project with room."""
    issuer.claims["groups"] = groups
    enter(served)
    assert served.context.store.tokens.list()[-1].project == project


def test_user_without_a_mapped_group_has_the_default_project(tmp_path: Path) -> None:
    text = SETTINGS.format(url="https://issuer", client=CLIENT)
    (tmp_path / "config.toml").write_text(
        text.replace("[oidc.roles]", 'project_claim = "dept"\ndefault_project = "rest"\n[oidc.roles]')
    )
    settings = read_oidc_settings(tmp_path)
    assert settings is not None
    claims = {"email": "ada@example.org", "email_verified": True, "groups": ["ml-team", "speech"]}
    assert identify(claims, settings).project == "rest"
    assert identify({**claims, "dept": "speech"}, settings).project == "speech-lab"


def test_settings_are_read_as_a_user_writes_them(tmp_path: Path) -> None:
    """Files of secrets end with a line break, domains may be in capitals, and one claim serves roles and projects."""
    (tmp_path / "secret").write_text("s3cret\n")
    (tmp_path / "page-secret").write_text("0ther\n")
    (tmp_path / "config.toml").write_text(
        '[oidc]\nissuer = "https://i.example.org"\nclient_id = "cli"\nclient_secret_file = "secret"\n'
        'role_claim = "teams"\nallowed_domains = ["Example.ORG"]\ndefault_role = "viewer"\n'
        '[oidc.pages]\nclient_id = "web"\nclient_secret_file = "page-secret"\n'
    )
    settings = read_oidc_settings(tmp_path)
    assert settings is not None and settings.client_secret is not None
    assert (settings.client_secret.value, settings.project_claim) == ("s3cret", "teams")
    assert settings.allowed_domains == ("example.org",) and settings.default_role is Role.VIEWER
    pages = settings.for_pages()
    assert pages.client_secret is not None and (pages.client_id, pages.client_secret.value) == ("web", "0ther")


def test_domains_apply_to_users_with_names_of_another_claim(tmp_path: Path) -> None:
    text = SETTINGS.format(url="https://issuer", client=CLIENT)
    (tmp_path / "config.toml").write_text(text.replace("[oidc]", '[oidc]\nuser_claim = "login"', 1))
    settings = read_oidc_settings(tmp_path)
    assert settings is not None
    claims = {"login": "ada", "email": "ada@example.org", "email_verified": True, "groups": ["ml-team"]}
    assert identify(claims, settings).user == "ada"
    for changes in ({"email": "ada@elsewhere.org"}, {"email_verified": False}, {"email": None}):
        with pytest.raises(DeniedError):
            identify({**claims, **changes}, settings)


EDITS: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "another audience": ({"aud": "other"}, "another audience"),
    "no audience": ({"aud": None}, "another audience"),
    "another party among audiences": ({"aud": [CLIENT, "other"], "azp": "other"}, "another client"),
    "audiences without a party": ({"aud": [CLIENT, "other"]}, "another client"),
    "another issuer": ({"iss": "https://evil.example.org"}, "another issuer"),
    "another nonce": ({"nonce": "x"}, "another login"),
    "no nonce": ({"nonce": None}, "another login"),
    "expired": ({"exp": 1_000_000}, "expired"),
    "no expiry": ({"exp": None}, "no valid `exp`"),
    "expiry as text": ({"exp": "9999999999"}, "no valid `exp`"),
    "issued long ago": ({"iat": 1_000_000}, "implausible time"),
    "issued in the future": ({"iat": 9_999_999_999}, "implausible time"),
    "not valid yet": ({"nbf": 9_999_999_999}, "not valid yet"),
}


@pytest.mark.parametrize("name", EDITS)
def test_token_with_a_wrong_claim_is_refused(served: Hosted, issuer: TestIssuer, name: str) -> None:
    changes, message = EDITS[name]
    issuer.edit = lambda claims: claims.update(changes)
    with pytest.raises(AuthError, match=message):
        enter(served)


def encode(data: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(data).encode()).decode().rstrip("=")


def sign_with_public_key(issuer: TestIssuer, claims: dict[str, Any]) -> str:
    """Use the issuer's public key as an HMAC secret: a verifier that trusts `alg` would accept it."""
    text = f"{encode({'alg': 'HS256', 'kid': issuer.key.kid})}.{encode(claims)}"
    secret = issuer.key.as_pem(private=False)
    digest = hmac.new(secret, text.encode(), hashlib.sha256).digest()
    return f"{text}.{base64.urlsafe_b64encode(digest).decode().rstrip('=')}"


def spoil_signature(issuer: TestIssuer, claims: dict[str, Any]) -> str:
    head, _, signature = issuer.sign_with_key({**claims, "groups": []}).partition(".")
    return f"{head}.{encode(claims)}.{signature.partition('.')[2]}"


def sign_with_own_key(issuer: TestIssuer, claims: dict[str, Any]) -> str:
    """Sign with another key under the key ID of the issuer's."""
    true, issuer.key = issuer.key, issuer.make_key(str(issuer.key.kid))
    try:
        return issuer.sign_with_key(claims)
    finally:
        issuer.key = true


FORGERIES: Mapping[str, tuple[Callable[[TestIssuer, dict[str, Any]], str], str]] = {
    "no algorithm": (lambda issuer, claims: f"{encode({'alg': 'none'})}.{encode(claims)}.", "algorithm"),
    "public key as a secret": (sign_with_public_key, "algorithm"),
    "changed claims": (spoil_signature, "signature"),
    "own key": (sign_with_own_key, "signature"),
    "not a token": (lambda issuer, claims: "x.y", "malformed"),
    "header that is no JSON": (lambda issuer, claims: "////.e30.x", "malformed"),
    "huge": (lambda issuer, claims: f"{'x' * 20_000}.e30.x", "malformed"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_forged_token_is_refused(served: Hosted, issuer: TestIssuer, name: str) -> None:
    forge, message = FORGERIES[name]
    issuer.sign = lambda claims: forge(issuer, claims)
    with pytest.raises(AuthError, match=message):
        enter(served)


def test_shared_secret_in_the_key_set_is_not_accepted_as_a_key(served: Hosted, issuer: TestIssuer) -> None:
    from broker.server.oidc import _match_keys

    keys = [{"kty": "oct", "k": "AAAA", "kid": "one"}, {"kty": "RSA", "kid": "one", "use": "enc"}]
    assert _match_keys(keys, {"alg": "RS256", "kid": "one"}) == []


def finish(served: Hosted, issuer: TestIssuer, nonce: str, **more: str) -> tuple[int, Any]:
    """Complete a login by hand."""
    verifier = "v" * 43
    challenge = base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).decode().rstrip("=")
    redirect_uri = "http://127.0.0.1:1/callback"
    issuer.codes["by-hand"] = {"redirect_uri": redirect_uri, "code_challenge": challenge, "nonce": nonce}
    body = {"code": "by-hand", "verifier": verifier, "redirect_uri": redirect_uri, "nonce": nonce, **more}
    return served.ask("/v1/login", body)


def test_nonce_is_accepted_once_and_only_from_this_server(served: Hosted, issuer: TestIssuer) -> None:
    nonce = served.ask("/v1/login")[1]["nonce"]
    assert finish(served, issuer, nonce)[0] == 200
    status, answer = finish(served, issuer, nonce)
    assert status == 401 and "already completed" in answer["error"]["message"]
    for other in ("x", f"{nonce}0", f"9{nonce}"):
        status, answer = finish(served, issuer, other)
        assert status == 401 and "not started here" in answer["error"]["message"]


def test_code_of_another_verifier_or_redirect_is_refused(served: Hosted, issuer: TestIssuer) -> None:
    nonce = served.ask("/v1/login")[1]["nonce"]
    assert finish(served, issuer, nonce, verifier="w" * 43)[0] == 401
    status, answer = finish(served, issuer, nonce, redirect_uri="https://evil.example.org/callback")
    assert status == 400 and "on the client's own machine" in answer["error"]["message"]
    assert finish(served, issuer, nonce)[0] == 200, "a failed attempt does not use up the nonce"
    assert served.ask("/v1/login", {"code": 1})[0] == 400


class HandClock:
    def __init__(self, now_s: float) -> None:
        self.time_s = now_s

    def now_s(self) -> float:
        return self.time_s

    async def sleep(self, duration_s: float) -> None:
        self.time_s += duration_s


def test_new_key_is_fetched_and_a_retired_one_is_forgotten(issuer: TestIssuer, served: Hosted) -> None:
    from broker.clock import SystemClock
    from broker.server.oidc import Issuer, fetch_json

    settings = read_oidc_settings(served.home)
    assert settings is not None
    clock = HandClock(SystemClock().now_s())
    client = Issuer(settings, clock=clock, fetch=fetch_json)

    def verify(token: str) -> str:
        return asyncio.run(client.verify(token, nonce="n")).user

    def make() -> str:
        now_s = int(clock.now_s())
        return issuer.make_token("n", iat=now_s, exp=now_s + 300)

    assert verify(make()) == "ada@example.org"
    old, issuer.key = issuer.key, issuer.make_key("two")
    asked = issuer.asked["/keys"]
    for _ in range(3):
        with pytest.raises(AuthError, match="does not publish"):
            verify(make())  # not published, and requested at most once a minute
    assert issuer.asked["/keys"] == asked
    issuer.published = [issuer.key]
    clock.time_s += 61.0
    assert verify(make()) == "ada@example.org" and issuer.asked["/keys"] == asked + 1
    issuer.key = old
    with pytest.raises(AuthError, match="does not publish"):
        verify(make())


def test_answers_of_the_issuer_are_read_whole_and_bounded(issuer: TestIssuer) -> None:
    from broker.server.oidc import BODY_MAX, DISCOVERY, fetch_json

    for size in (500_000, BODY_MAX):
        issuer.padding = "x" * size
        if size < BODY_MAX:
            assert asyncio.run(fetch_json(issuer.url + DISCOVERY))["issuer"] == issuer.url
        else:
            with pytest.raises(AuthError, match="exceeds a megabyte"):
                asyncio.run(fetch_json(issuer.url + DISCOVERY))
    issuer.padding = ""
    with pytest.raises(AuthError, match="status 302"):
        asyncio.run(fetch_json(f"{issuer.url}/authorize?redirect_uri=http://127.0.0.1:1/&state=s"))
    with pytest.raises(TransientError, match="does not respond"):
        asyncio.run(fetch_json("http://127.0.0.1:1/keys"))


def test_server_without_an_issuer_names_the_other_way(hosted: Hosted) -> None:
    with pytest.raises(UsageError, match="no login through a browser"):
        enter(hosted)


def test_issuer_that_names_another_is_refused(tmp_path: Path, issuer: TestIssuer, served: Hosted) -> None:
    from broker.clock import SystemClock
    from broker.server.oidc import Issuer

    settings = read_oidc_settings(served.home)
    assert settings is not None

    async def lie(url: str, form: Mapping[str, str] | None = None) -> Mapping[str, Any]:
        return {"issuer": "https://evil.example.org", "jwks_uri": "https://evil.example.org/keys"}

    async def downgrade(url: str, form: Mapping[str, str] | None = None) -> Mapping[str, Any]:
        return {"issuer": issuer.url, "jwks_uri": "http://keys.example.org/keys"}

    for fetch, message in ((lie, "discovery document"), (downgrade, "https://")):
        with pytest.raises(AuthError, match=message):
            asyncio.run(Issuer(settings, clock=SystemClock(), fetch=fetch).find_endpoint("jwks_uri"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('issuer = "http://issuer.example.org"\nclient_id = "x"\ndefault_role = "user"', "https://"),
        ('issuer = "https://i.example.org"\nclient_id = "x"', "no user could log in"),
        ('issuer = "https://i.example.org"\ndefault_role = "user"', "client_id"),
        ('issuer = "https://i.example.org"\nclient_id = "x"\ndefault_role = "root"', "root"),
        ('issuer = "https://i.example.org"\nclient_id = "x"\ndefault_role = "user"\nscopes = "email"', "openid"),
        ('issuer = "https://i.example.org"\nclient_id = "x"\ndefault_role = "user"\ntoken_hours = 0', "token_hours"),
        ('issuer = "https://i.example.org"\nclient_id = "x"\ndefault_role = "user"\nclient_secret_file = "no"', "no"),
    ],
)
def test_invalid_settings_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.toml").write_text(f"[oidc]\n{text}\n")
    with pytest.raises(UsageError, match=message):
        read_oidc_settings(tmp_path)


def test_login_command_opens_the_browser_and_saves_the_token(
    served: Hosted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BROKER_HOME", str(tmp_path))
    monkeypatch.setattr("webbrowser.open", browse)
    with pytest.raises(SystemExit, match=r"^0$"):
        main(("login", served.listening.url))
    out, err = capsys.readouterr()
    assert out.startswith(f"Logged in to {served.listening.url} as ada@example.org (user)")
    assert "log in at http://127.0.0.1:" in err
    saved = json.loads((tmp_path / "login.json").read_text())
    assert get_user(served, saved["token"])[0] == 200
    assert (tmp_path / "login.json").stat().st_mode & 0o777 == 0o600


def test_redirect_of_another_login_is_ignored_and_an_error_ends_it(served: Hosted) -> None:
    def interfere(page: str) -> None:
        from urllib.parse import parse_qs, urlencode, urlsplit

        query = {name: values[0] for name, values in parse_qs(urlsplit(page).query).items()}
        back = query["redirect_uri"]
        assert query["code_challenge_method"] == "S256" and len(query["code_challenge"]) == 43
        browse(f"{back}?{urlencode({'code': 'evil', 'state': 'guess'})}")
        browse(f"{back}?{urlencode({'error': 'access_denied', 'state': query['state']})}")

    with pytest.raises(BrokerError, match="refused the login: access_denied"):
        log_in(ServerLogin(url=served.listening.url, token=Secret(value="")), interfere)


def test_login_that_never_arrives_ends(served: Hosted) -> None:
    with pytest.raises(UsageError, match="no login was received"):
        log_in(ServerLogin(url=served.listening.url, token=Secret(value="")), lambda page: None, waits=-99)


NOW_S = 1_780_000_000.0
PLAIN = OidcSettings(issuer="https://issuer.example.org", client_id="broker")
PLAIN_CLAIMS = {"iss": PLAIN.issuer, "aud": "broker", "nonce": "n", "exp": NOW_S + 300, "iat": NOW_S}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, ""),
        ({"exp": NOW_S - 59}, ""),  # a minute, for clocks that differ
        ({"exp": NOW_S - 60}, "expired"),
        ({"iat": NOW_S + 60}, ""),
        ({"iat": NOW_S + 61}, "implausible"),
        ({"iat": NOW_S - 600}, ""),
        ({"iat": NOW_S - 601}, "implausible"),
        ({"nbf": NOW_S + 60}, ""),
        ({"nbf": NOW_S + 61}, "not valid yet"),
        ({"exp": True}, "no valid `exp`"),
        ({"aud": ["broker"]}, ""),
        ({"aud": ["broker", "other"], "azp": "broker"}, ""),
        ({"aud": ["broker", "other"]}, "another client"),
        ({"azp": "other"}, "another client"),
        ({"azp": "broker"}, ""),
        ({"aud": ["other"]}, "another audience"),
    ],
)
def test_bounds_of_a_token_are_exact(change: dict[str, Any], problem: str) -> None:
    claims = PLAIN_CLAIMS | change
    if not problem:
        check_claims(claims, PLAIN, nonce="n", now_s=NOW_S)
        return
    with pytest.raises(AuthError, match=problem):
        check_claims(claims, PLAIN, nonce="n", now_s=NOW_S)


def test_login_without_a_nonce_accepts_no_token() -> None:
    with pytest.raises(AuthError, match="another login"):
        check_claims(PLAIN_CLAIMS | {"nonce": ""}, PLAIN, nonce="", now_s=NOW_S)


def test_domain_of_an_address_ignores_case() -> None:
    settings = replace(PLAIN, allowed_domains=("example.org",), default_role=Role.USER)
    claims = PLAIN_CLAIMS | {"email": "ada@Example.ORG", "email_verified": True}
    assert identify(claims, settings).user == "ada@Example.ORG"


def test_keys_are_fetched_again_after_an_hour(issuer: TestIssuer) -> None:
    """A key that the issuer has withdrawn must not be accepted for longer."""
    fetched: list[str] = []
    now_s = NOW_S

    class KeyClock(SystemClock):
        def now_s(self) -> float:
            return now_s

    async def fetch(url: str, form: Mapping[str, str] | None = None) -> Mapping[str, Any]:
        fetched.append(url)
        if url.endswith("openid-configuration"):
            return {"issuer": PLAIN.issuer, "jwks_uri": "https://issuer.example.org/keys"}
        return {"keys": [{"kty": "RSA", "kid": "a"}]}

    client = Issuer(PLAIN, clock=KeyClock(), fetch=fetch)
    for wait_s in (0.0, 3599.0, 1.0):
        now_s += wait_s
        asyncio.run(client._find_keys({"alg": "RS256", "kid": "a"}))
    assert [url.rpartition("/")[2] for url in fetched].count("keys") == 2


@pytest.mark.parametrize(
    ("header", "is_accepted"),
    [
        ({"alg": "RS256", "kid": "a"}, True),
        ({"alg": "RS256", "crit": ["exp"]}, False),  # what must be understood, and is not
        ({"alg": "HS256"}, False),
        ({"alg": "none"}, False),
    ],
)
def test_only_signatures_that_are_understood_are_accepted(header: dict[str, Any], is_accepted: bool) -> None:
    text = base64.urlsafe_b64encode(json.dumps(header).encode()).decode().rstrip("=")
    if is_accepted:
        assert read_header(f"{text}.e30.x") == header
        return
    with pytest.raises(AuthError, match="not accepted"):
        read_header(f"{text}.e30.x")
