"""The pages of a server in a browser: what each role may see and do, and hostile names are inert."""

from __future__ import annotations

import http.client
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, urlencode, urlsplit

import pytest

from broker.dashboard import content
from broker.server.context import Policy
from broker.server.proxy import TrustedProxy
from broker.server.tokens import create_token
from broker.state.people import Owned, Role
from broker.types import JobStatus, Resources, Secret, Task
from broker.types.outcomes import EventKind, make_event
from tests.dashboard.conftest import HOSTILE
from tests.server.conftest import Hosted

ADMIN_PAGES = ("/admin/users", "/admin/audit")
PAGES = ("/", "/jobs", "/clusters", "/places", "/cost", "/cost?by=job", "/clouds", "/services", "/plan")
TASK = Task(run="true", resources=(Resources(cloud="local"),))
SECRET = "a secret of the proxy, long enough"


class Page:
    def __init__(self, status: int, headers: http.client.HTTPMessage, text: str) -> None:
        self.status, self.headers, self.text = status, headers, text


def ask(hosted: Hosted, method: str, path: str, form: dict[str, str] | None = None, **headers: str) -> Page:
    """Send a request without following redirects."""
    connection = http.client.HTTPConnection(urlsplit(hosted.listening.url).netloc, timeout=300)
    body = None if form is None else urlencode(form)
    given = {"Content-Type": "application/x-www-form-urlencoded"} if form is not None else {}
    connection.request(method, path, body, {**given, **headers})
    answer = connection.getresponse()
    page = Page(answer.status, answer.headers, answer.read().decode())
    connection.close()
    return page


def log_in(hosted: Hosted, token: str, origin: str | None = None) -> Page:
    return ask(hosted, "POST", "/login", {"token": token}, Origin=origin or hosted.listening.url)


def read_cookie(page: Page) -> str:
    return page.headers["Set-Cookie"].partition(";")[0]


class Visitor:
    """A browser with the session of one user."""

    def __init__(self, hosted: Hosted, user: str) -> None:
        self._hosted = hosted
        self.cookie = read_cookie(log_in(hosted, hosted.tokens[user]))

    def get(self, path: str) -> Page:
        return ask(self._hosted, "GET", path, Cookie=self.cookie)

    def post(self, path: str, ticket: str, origin: str | None = None) -> Page:
        form = {"ticket": ticket}
        return ask(self._hosted, "POST", path, form, Cookie=self.cookie, Origin=origin or self._hosted.listening.url)

    def read_ticket(self, path: str) -> str:
        found = re.search(r'name="ticket" value="([^"]+)"', self.get(path).text)
        return found[1] if found else ""


def add_job(hosted: Hosted, name: str, owner: str | None) -> int:
    job_id = hosted.context.store.jobs.add(name, TASK).id
    if owner is not None:
        hosted.context.store.owners.put(Owned.JOB, str(job_id), owner)
    return job_id


@pytest.mark.parametrize("path", [*PAGES, *ADMIN_PAGES])
def test_pages_require_a_token_and_some_an_administrator(hosted: Hosted, path: str) -> None:
    assert ask(hosted, "GET", path).headers["Location"] == "/login"
    statuses = {
        user: ask(hosted, "GET", path, Authorization=f"Bearer {token}").status for user, token in hosted.tokens.items()
    }
    others = 403 if path in ADMIN_PAGES else 200
    assert statuses == {"viewer": others, "user": others, "other": others, "admin": 200}
    assert ask(hosted, "GET", path, Authorization="Bearer broker_wrong").status == 303
    assert ask(hosted, "GET", path, Cookie="broker_session=guess").status == 303
    assert ask(hosted, "GET", path, Cookie="broker_session=").status == 303


def test_without_a_session_there_are_only_the_login_and_its_style(hosted: Hosted) -> None:
    assert ask(hosted, "GET", "/login").status == ask(hosted, "GET", "/static/style.css").status == 200
    assert ask(hosted, "GET", "/static/..%2fviews.py").status == 401  # no such page
    assert ask(hosted, "GET", "/changes").status == 401
    assert ask(hosted, "POST", "/jobs/1/cancel", {"ticket": ""}, Origin=hosted.listening.url).status == 401
    assert ask(hosted, "GET", "/nothing").status == 401


def test_a_login_begins_a_session_of_strict_cookies(hosted: Hosted) -> None:
    refused = log_in(hosted, "broker_wrong")
    assert refused.status == 403 and "Set-Cookie" not in refused.headers and "broker_wrong" not in refused.text
    assert log_in(hosted, "").status == 403
    assert log_in(hosted, hosted.tokens["user"], origin="http://evil.example").status == 403
    begun = log_in(hosted, hosted.tokens["user"])
    assert begun.status == 303 and begun.headers["Location"] == "/"
    assert "HttpOnly" in begun.headers["Set-Cookie"] and "SameSite=Strict" in begun.headers["Set-Cookie"]
    assert hosted.tokens["user"] not in begun.headers["Set-Cookie"]
    page = ask(hosted, "GET", "/", Cookie=read_cookie(begun))
    assert page.status == 200 and "script-src 'self'" in page.headers["Content-Security-Policy"]


def test_the_navigation_shows_what_the_role_may_see(hosted: Hosted) -> None:
    assert "/admin/users" in Visitor(hosted, "admin").get("/").text
    shown = Visitor(hosted, "viewer").get("/").text
    assert "/admin/users" not in shown and ">viewer</a>" in shown
    assert "/cost" not in ask(hosted, "GET", "/login").text


def test_a_session_admits_to_no_verb_and_ends_with_its_token(hosted: Hosted) -> None:
    made = create_token(hosted.context.store, user="second", role=Role.ADMIN, days=1)
    cookie = read_cookie(log_in(hosted, made.value.value))
    assert ask(hosted, "GET", "/admin/users", Cookie=cookie).status == 200
    assert ask(hosted, "POST", "/v1/list_queue", {}, Cookie=cookie).status == 401
    assert ask(hosted, "GET", "/metrics", Cookie=cookie).status == 401
    assert hosted.context.store.tokens.revoke(made.id)
    assert ask(hosted, "GET", "/", Cookie=cookie).status == 303


def test_a_logout_ends_the_session(hosted: Hosted) -> None:
    visitor = Visitor(hosted, "user")
    assert "Logged in as user, role user." in visitor.get("/login").text
    assert visitor.post("/logout", "guess").status == 303
    assert visitor.get("/").status == 200
    visitor.post("/logout", visitor.read_ticket("/login"))
    assert visitor.get("/").status == 303


def test_users_cancel_their_own_jobs_only_and_the_audit_records_it(hosted: Hosted) -> None:
    own, foreign = add_job(hosted, "own", "user"), add_job(hosted, "foreign", "other")
    jobs = hosted.context.store.jobs
    user, viewer = Visitor(hosted, "user"), Visitor(hosted, "viewer")
    ticket = user.read_ticket(f"/jobs/{own}")
    assert ticket and user.read_ticket(f"/jobs/{foreign}") == viewer.read_ticket(f"/jobs/{own}") == ""
    assert user.post(f"/jobs/{own}/cancel", ticket, origin="http://evil.example").status == 403
    assert user.post(f"/jobs/{own}/cancel", "guess").status == 403
    assert viewer.post(f"/jobs/{own}/cancel", ticket).status == 403  # the ticket of another user
    refused = user.post(f"/jobs/{foreign}/cancel", ticket)
    assert refused.status == 403 and "belongs to other" in refused.text
    assert not jobs.is_cancel_requested(own) and not jobs.is_cancel_requested(foreign)
    done = user.post(f"/jobs/{own}/cancel", ticket)
    assert (done.status, done.headers["Location"]) == (303, f"/jobs/{own}")
    assert jobs.is_cancel_requested(own)
    admin = Visitor(hosted, "admin")
    assert admin.post(f"/jobs/{foreign}/cancel", admin.read_ticket(f"/jobs/{foreign}")).status == 303
    assert jobs.is_cancel_requested(foreign)
    events = hosted.context.store.audit.list(verb="cancel_jobs")
    assert [(each.user, each.outcome) for each in events[-3:]] == [
        ("user", "DeniedError"), ("user", "done"), ("admin", "done"),
    ]  # fmt: skip


def test_a_retry_belongs_to_the_user_who_asked(hosted: Hosted) -> None:
    failed = add_job(hosted, "failed", "user")
    hosted.context.store.jobs.set_status(failed, JobStatus.FAILED, "exit code 3")
    user = Visitor(hosted, "user")
    done = user.post(f"/jobs/{failed}/retry", user.read_ticket(f"/jobs/{failed}"))
    assert done.status == 303, done.text
    again = done.headers["Location"].rpartition("/")[2]
    assert int(again) != failed and hosted.context.store.owners.get(Owned.JOB, again) == "user"


def test_hostile_names_are_inert_and_filters_match(hosted: Hosted) -> None:
    store = hosted.context.store
    store.owners.put(Owned.JOB, str(store.jobs.add(HOSTILE, TASK).id), HOSTILE)
    store.audit.add(user=HOSTILE, verb="launch_jobs", target=HOSTILE, outcome="done")
    store.audit.add(user="ada", verb="cancel_jobs", target="7", outcome="DeniedError")
    admin = Visitor(hosted, "admin")
    hostile = quote(HOSTILE)
    for path in ("/", *ADMIN_PAGES, f"/admin/audit?user={hostile}", f"/admin/audit?verb={hostile}"):
        page = admin.get(path)
        assert page.status == 200 and "<script>document" not in page.text and "\x1b" not in page.text
    only = admin.get("/admin/audit?user=ada&outcome=DeniedError").text
    assert "cancel_jobs" in only and "launch_jobs" not in only
    assert "No change matches" in admin.get("/admin/audit?verb=nothing").text


@pytest.fixture
def proxied(tmp_path: Path) -> Iterator[Hosted]:
    proxy = TrustedProxy(
        header="X-Forwarded-User", addresses=("127.0.0.1",), secret=Secret(value=SECRET), role=Role.USER
    )
    hosted = Hosted(tmp_path, policy=Policy(has_controller=False, has_local_cloud=True, proxy=proxy))
    yield hosted
    hosted.stop()


def test_a_user_of_a_trusted_proxy_needs_no_login(proxied: Hosted) -> None:
    given = {"X-Forwarded-User": "ada", "Broker-Proxy-Secret": SECRET}
    own = add_job(proxied, "own", "ada")
    page = ask(proxied, "GET", f"/jobs/{own}", **given)
    ticket = re.search(r'name="ticket" value="([^"]+)"', page.text)
    assert page.status == 200 and ticket
    assert "Log out" not in ask(proxied, "GET", "/login", **given).text
    path, form = f"/jobs/{own}/cancel", {"ticket": ticket[1]}
    assert ask(proxied, "POST", path, form, Origin="https://evil.example", **given).status == 403
    https = f"https://{urlsplit(proxied.listening.url).netloc}"  # the proxy ends TLS
    assert ask(proxied, "POST", path, form, Origin=https, **given).status == 303
    assert proxied.context.store.jobs.is_cancel_requested(own)
    wrong = {**given, "Broker-Proxy-Secret": "guess"}
    assert ask(proxied, "GET", "/", **wrong).status == 303


def test_visitors_share_what_is_read_and_nothing_that_is_theirs(
    hosted: Hosted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One read serves a page to all; names, tickets and rights are those of each visitor."""
    made = Counter[str]()
    for home, name in ((content.OverviewPage, "make"), (content, "make_job")):
        make = getattr(home, name)
        monkeypatch.setattr(home, name, lambda *given, name=name, make=make: made.update([name]) or make(*given))
    monkeypatch.setattr("broker.dashboard.sharing.SHARED_S", math.inf)
    own = add_job(hosted, "shared", "user")
    users = ("user", "viewer", "admin", "other", "user", "viewer")
    visitors = {user: Visitor(hosted, user) for user in hosted.tokens}
    hosted.context.store.events.add(make_event(EventKind.NOTE, text="a change"), job_id=own)
    shown = [(user, visitors[user].get(f"/jobs/{own}").text, visitors[user].get("/").text) for user in users]
    assert made == {"make": 1, "make_job": 1}
    tickets: dict[str, set[str]] = {}
    for user, job, overview in shown:
        tickets.setdefault(user, set()).update(re.findall(r'name="ticket" value="([^"]+)"', job))
        for page in (job, overview):
            assert [name for name in hosted.tokens if f">{name}</a>" in page] == [user]
            assert ("/admin/users" in page) == (user == "admin")
    assert tickets["viewer"] == tickets["other"] == set()
    assert len(tickets["user"]) == len(tickets["admin"]) == 1 and tickets["user"] != tickets["admin"]
    done = visitors["user"].post(f"/jobs/{own}/cancel", *tickets["user"])
    assert done.status == 303 and "Cancel job" in visitors["user"].get(f"/jobs/{own}").text
    assert made["make_job"] == 2  # what an action changes is shown at once
