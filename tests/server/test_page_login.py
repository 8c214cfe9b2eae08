"""Logins to the pages through an OIDC issuer: bound to one browser, accepted once, and worth what the claims say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit
from urllib.request import HTTPRedirectHandler, build_opener

import pytest

from broker.errors import AuthError, UsageError
from broker.server.context import Policy
from broker.server.nonces import NONCE_S, Nonces
from broker.server.oidc_settings import read_oidc_settings
from tests.dashboard.conftest import HOSTILE
from tests.dashboard.test_browser import CHROMIUM, FLAGS
from tests.server.conftest import Hosted
from tests.server.issuer import CLIENT, TestIssuer
from tests.server.test_oidc import EDITS, SETTINGS, HandClock, finish
from tests.server.test_pages import Page, ask

START, CALLBACK = "/login/issuer", "/login/callback"
OTHER_SITE = "127.0.0.2"  # for browsers, another site than 127.0.0.1


def start_server(home: Path, issuer: TestIssuer, more: str = "") -> Hosted:
    (home / "config.toml").write_text(SETTINGS.format(url=issuer.url, client=CLIENT) + more)
    return Hosted(home, policy=Policy(has_controller=False))


@pytest.fixture(scope="module")
def issuer() -> Iterator[TestIssuer]:
    issuer = TestIssuer(OTHER_SITE)
    yield issuer
    issuer.stop()


@pytest.fixture(scope="module")
def served(issuer: TestIssuer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    hosted = start_server(tmp_path_factory.mktemp("oidc"), issuer)
    yield hosted
    hosted.stop()


@pytest.fixture(autouse=True)
def fresh(issuer: TestIssuer) -> Iterator[None]:
    claims = dict(issuer.claims)
    yield
    issuer.claims, issuer.edit, issuer.client = claims, (lambda claims: None), CLIENT


class Browser:
    """A browser at the login page: it begins a login, lets the issuer answer, and returns with its cookies."""

    def __init__(self, served: Hosted) -> None:
        self.served = served
        self.cookies: dict[str, str] = {}

    def get(self, path: str, **headers: str) -> Page:
        cookies = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        page = ask(self.served, "GET", path, **({"Cookie": cookies} if cookies else {}), **headers)
        for line in page.headers.get_all("Set-Cookie", []):
            name, _, value = line.partition(";")[0].partition("=")
            self.cookies[name] = value.strip('"')
            if not self.cookies[name]:
                del self.cookies[name]
        return page

    def begin(self) -> str:
        """Begin a login; return the URL of the issuer."""
        page = self.get(START)
        assert page.status == 303, page.text
        return page.headers["Location"]

    def return_from(self, url: str, **changes: str) -> Page:
        """Let the issuer log the user in, and follow its redirect with some of its parameters changed."""
        return self.get(f"{CALLBACK}?{urlencode({**visit(url), **changes})}")

    def log_in(self) -> Page:
        return self.return_from(self.begin())


class _NoRedirect(HTTPRedirectHandler):
    def redirect_request(self, *arguments: Any) -> None:
        return None


def visit(url: str) -> dict[str, str]:
    """Log in at the issuer; return what its redirect carries."""
    from urllib.error import HTTPError

    with pytest.raises(HTTPError) as caught:
        build_opener(_NoRedirect()).open(url, timeout=300)
    return read_query(caught.value.headers["Location"])


def read_query(url: str) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}


def test_a_browser_logs_in_through_the_issuer_and_out_again(served: Hosted) -> None:
    browser = Browser(served)
    assert f'href="{START}"' in browser.get("/login").text
    page = browser.log_in()
    assert page.status == 200 and page.headers["Refresh"] == "0; url=/"
    session = next(each for each in page.headers.get_all("Set-Cookie", []) if each.startswith("broker_session="))
    assert "HttpOnly" in session and "SameSite=Strict" in session
    assert "broker_login" not in browser.cookies  # it has been used
    shown = browser.get("/login").text
    assert "Logged in as ada@example.org, role user." in shown
    assert browser.get("/").status == 200 and browser.get("/admin/users").status == 403
    made = served.context.store.tokens.list()[-1]
    assert (made.user, made.revoked_s) == ("ada@example.org", None)
    assert made.expires_s is not None and made.expires_s - made.created_s <= 12 * 3600
    entry = served.context.store.audit.list(verb="login")[-1]
    assert (entry.user, entry.target, entry.outcome) == ("ada@example.org", f"token {made.id}", "done")
    ticket = shown.partition('name="ticket" value="')[2].partition('"')[0]
    cookie = f"broker_session={browser.cookies['broker_session']}"
    ask(served, "POST", "/logout", {"ticket": ticket}, Cookie=cookie, Origin=served.listening.url)
    assert browser.get("/").status == 303
    assert served.context.store.tokens.list()[-1].revoked_s is not None  # no one else knows this token


def test_the_issuer_learns_a_challenge_and_no_secret_of_the_browser(served: Hosted) -> None:
    browser = Browser(served)
    first, second = read_query(browser.begin()), read_query(Browser(served).begin())
    assert (first["response_type"], first["client_id"], first["scope"]) == ("code", CLIENT, "openid email profile")
    assert first["redirect_uri"] == served.listening.url + CALLBACK
    assert first["code_challenge_method"] == "S256" and len(first["code_challenge"]) == 43
    assert all(first[name] != second[name] for name in ("state", "nonce", "code_challenge"))
    assert not any(browser.cookies["broker_login"] in value for value in first.values())


def test_the_cookie_of_a_login_is_for_the_login_only(served: Hosted) -> None:
    cookie = ask(served, "GET", START).headers["Set-Cookie"]
    for part in ("HttpOnly", "SameSite=Lax", "Path=/login", f"Max-Age={NONCE_S:.0f}"):
        assert part in cookie
    assert ask(served, "GET", "/", Cookie=cookie.partition(";")[0]).status == 303


def expect_refusal(page: Page, message: str, browser: Browser) -> None:
    assert page.status == 403 and message in page.text, page.text
    assert "broker_session" not in browser.cookies and browser.get("/").status == 303


def test_an_answer_with_another_state_is_refused(served: Hosted) -> None:
    for state in ("guess", "", "\u00e9"):
        browser = Browser(served)
        expect_refusal(browser.return_from(browser.begin(), state=state), "another login", browser)


def test_an_answer_to_another_browser_is_refused(served: Hosted) -> None:
    victim, attacker = Browser(served), Browser(served)
    answer = visit(attacker.begin())  # of the attacker's own account
    query = urlencode(answer)
    expect_refusal(victim.get(f"{CALLBACK}?{query}"), "not started here", victim)
    victim.begin()
    expect_refusal(victim.get(f"{CALLBACK}?{query}"), "another login", victim)
    assert attacker.get(f"{CALLBACK}?{query}").status == 200  # it was valid where it was begun


def test_a_code_from_the_login_of_another_browser_is_refused(served: Hosted) -> None:
    victim, attacker = Browser(served), Browser(served)
    stolen = visit(victim.begin())["code"]
    page = attacker.return_from(attacker.begin(), code=stolen)  # with a valid state of its own
    expect_refusal(page, "refused the login with status 400", attacker)  # the verifier differs


def test_an_answer_is_accepted_once(served: Hosted) -> None:
    browser = Browser(served)
    url = browser.begin()
    cookie = browser.cookies["broker_login"]
    query = urlencode(visit(url))
    assert browser.get(f"{CALLBACK}?{query}").status == 200
    again = Browser(served)
    expect_refusal(again.get(f"{CALLBACK}?{query}"), "not started here", again)
    again.cookies = {"broker_login": cookie}
    expect_refusal(again.get(f"{CALLBACK}?{query}"), "already completed", again)
    again.cookies = {"broker_login": cookie}
    expect_refusal(again.return_from(url), "already completed", again)  # nor with a new code


def test_cookies_that_this_server_did_not_make_are_refused(served: Hosted) -> None:
    of_cli = served.ask("/v1/login")[1]["nonce"]
    for cookie in ("guess", of_cli, "1.2.3", "a.b.c"):
        browser = Browser(served)
        browser.cookies["broker_login"] = cookie
        expect_refusal(browser.get(f"{CALLBACK}?code=c&state=s"), "not started here", browser)


def test_a_cookie_of_the_pages_begins_no_login_of_a_client(served: Hosted, issuer: TestIssuer) -> None:
    browser = Browser(served)
    browser.begin()
    status, answer = finish(served, issuer, browser.cookies["broker_login"])
    assert status == 401 and "not started here" in answer["error"]["message"]


def test_a_login_that_takes_too_long_is_refused() -> None:
    clock = HandClock(1e9)
    nonces = Nonces(clock, hints=["open the login page again"])
    nonce = nonces.make()
    nonces.check(nonce)
    clock.time_s += NONCE_S
    with pytest.raises(AuthError, match="took too long"):
        nonces.check(nonce)


@pytest.mark.parametrize("name", EDITS)
def test_an_id_token_with_a_wrong_claim_begins_no_session(served: Hosted, issuer: TestIssuer, name: str) -> None:
    changes, message = EDITS[name]
    issuer.edit = lambda claims: claims.update(changes)
    browser = Browser(served)
    expect_refusal(browser.log_in(), message.partition("`")[0], browser)


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        ({"groups": ["other"]}, "has no role"),
        ({"email_verified": False}, "not verified"),
        ({"email": "ada@elsewhere.org"}, "may not log in"),
        ({"email": "eve@example.org"}, "may not log in"),
        ({"email": HOSTILE}, "is a valid user name"),
    ],
)
def test_a_user_without_access_is_refused_and_audited(
    served: Hosted, issuer: TestIssuer, claims: dict[str, Any], message: str
) -> None:
    issuer.claims.update(claims)
    count, browser = len(served.context.store.tokens.list()), Browser(served)
    page = browser.log_in()
    expect_refusal(page, message, browser)
    assert "<script" not in page.text
    assert len(served.context.store.tokens.list()) == count
    entry = served.context.store.audit.list(verb="login")[-1]
    assert (entry.user, entry.outcome) == ("(unknown)", "DeniedError")


def test_a_refusal_of_the_issuer_is_shown_as_text(served: Hosted) -> None:
    browser = Browser(served)
    state = read_query(browser.begin())["state"]
    page = browser.get(f"{CALLBACK}?{urlencode({'error': HOSTILE, 'state': state})}")
    expect_refusal(page, "the issuer refused the login: &lt;script&gt;", browser)
    assert "<script>" not in page.text and "\x1b" not in page.text
    page = browser.return_from(browser.begin(), iss="https://evil.example.org")
    expect_refusal(page, "another issuer", browser)


def test_an_issuer_that_does_not_answer_leaves_the_token(tmp_path: Path, issuer: TestIssuer) -> None:
    (tmp_path / "config.toml").write_text(SETTINGS.format(url="http://127.0.0.1:1", client=CLIENT))
    hosted = Hosted(tmp_path, policy=Policy(has_controller=False))
    try:
        page = ask(hosted, "GET", START)
        assert page.status == 502 and "the issuer does not respond" in page.text
        assert "Token" in ask(hosted, "GET", "/login").text
        (tmp_path / "config.toml").write_text("[oidc]\nissuer = 7\n")
        shown = ask(hosted, "GET", "/login")
        assert shown.status == 200 and START not in shown.text
    finally:
        hosted.stop()


def test_login_page_without_an_issuer_has_no_link(hosted: Hosted) -> None:
    assert START not in ask(hosted, "GET", "/login").text
    assert ask(hosted, "GET", START).status == ask(hosted, "GET", f"{CALLBACK}?code=c&state=s").status == 403


def test_pages_may_have_an_address_and_a_client_of_their_own(tmp_path: Path, issuer: TestIssuer) -> None:
    hosted = start_server(
        tmp_path, issuer, '[oidc.pages]\nurl = "https://broker.example.org"\nclient_id = "web"\n'
    )  # as behind a proxy that ends TLS
    try:
        browser = Browser(hosted)
        assert f'href="https://broker.example.org{START}"' in browser.get("/login").text
        query = read_query(url := browser.begin())
        assert (query["client_id"], query["redirect_uri"]) == ("web", f"https://broker.example.org{CALLBACK}")
        expect_refusal(browser.return_from(url), "another audience", browser)  # the client of `broker login`
        issuer.client = "web"
        page = browser.log_in()
        cookies = page.headers.get_all("Set-Cookie", [])
        assert page.status == 200 and all("Secure" in each for each in cookies if "broker_session" in each)
        assert "Secure" in browser.get(START).headers["Set-Cookie"]
    finally:
        hosted.stop()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('url = "http://broker.example.org"', "https://"),
        ('url = "https://broker.example.org/path"', "no path"),
        ('client_secret_file = "secret"', "requires `client_id`"),
        ('clientid = "web"', "clientid"),
    ],
)
def test_invalid_settings_of_the_pages_are_named(tmp_path: Path, text: str, message: str) -> None:
    settings = SETTINGS.format(url="https://issuer.example.org", client=CLIENT)
    (tmp_path / "config.toml").write_text(f"{settings}[oidc.pages]\n{text}\n")
    with pytest.raises(UsageError, match=message):
        read_oidc_settings(tmp_path)


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_real_browser_returns_from_another_site_with_its_session(served: Hosted) -> None:
    from playwright.sync_api import sync_playwright

    flags = [*FLAGS[:-1], f"{FLAGS[-1]},EXCLUDE {OTHER_SITE}"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        page = browser.new_context().new_page()
        page.set_default_timeout(300_000)
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(message.text))
        page.goto(served.listening.url)
        page.get_by_role("link", name="Log in with your organization's account").click()
        page.get_by_role("heading", name="Overview").wait_for()
        page.get_by_role("link", name="ada@example.org").click()
        page.get_by_role("button", name="Log out").click()
        page.get_by_label("Token").wait_for()
        assert complaints == []
        browser.close()
