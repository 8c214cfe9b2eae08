"""Users and audit in a browser: administrators only, and inert for hostile names."""

from __future__ import annotations

import http.client
from urllib.parse import quote, urlencode, urlsplit

import pytest

from broker.server.tokens import create_token
from broker.state.people import Owned, Role
from broker.types import Resources, Task
from tests.dashboard.conftest import HOSTILE
from tests.server.conftest import Hosted

PAGES = ("/admin/users", "/admin/audit")
TASK = Task(run="true", resources=(Resources(cloud="local"),))


class Page:
    def __init__(self, status: int, headers: http.client.HTTPMessage, text: str) -> None:
        self.status, self.headers, self.text = status, headers, text


def ask(hosted: Hosted, method: str, path: str, form: dict[str, str] | None = None, **headers: str) -> Page:
    """Send a request without following redirects."""
    connection = http.client.HTTPConnection(urlsplit(hosted.listening.url).netloc, timeout=60)
    body = None if form is None else urlencode(form)
    given = {"Content-Type": "application/x-www-form-urlencoded"} if form is not None else {}
    connection.request(method, path, body, {**given, **headers})
    answer = connection.getresponse()
    page = Page(answer.status, answer.headers, answer.read().decode())
    connection.close()
    return page


def log_in(hosted: Hosted, token: str, origin: str | None = None) -> Page:
    return ask(hosted, "POST", "/admin/login", {"token": token}, Origin=origin or hosted.listening.url)


def read_cookie(page: Page) -> str:
    return page.headers["Set-Cookie"].partition(";")[0]


@pytest.mark.parametrize("path", PAGES)
def test_only_an_administrator_may_see_the_pages(hosted: Hosted, path: str) -> None:
    assert ask(hosted, "GET", path).headers["Location"] == "/admin/login"
    statuses = {
        user: ask(hosted, "GET", path, Authorization=f"Bearer {token}").status for user, token in hosted.tokens.items()
    }
    assert statuses == {"viewer": 403, "user": 403, "other": 403, "admin": 200}
    assert ask(hosted, "GET", path, Authorization="Bearer broker_wrong").status == 303
    assert ask(hosted, "GET", path, Cookie="broker_admin=guess").status == 303
    assert ask(hosted, "GET", path, Cookie="broker_admin=").status == 303


def test_the_form_takes_tokens_of_administrators_only(hosted: Hosted) -> None:
    for user in ("viewer", "user"):
        refused = log_in(hosted, hosted.tokens[user])
        assert refused.status == 403 and "Set-Cookie" not in refused.headers
        assert hosted.tokens[user] not in refused.text
    assert log_in(hosted, "").status == 403
    assert log_in(hosted, hosted.tokens["admin"], origin="http://evil.example").status == 403
    begun = log_in(hosted, hosted.tokens["admin"])
    assert begun.status == 303 and begun.headers["Location"] == "/admin/users"
    for flag in ("HttpOnly", "SameSite=Strict", "Path=/admin"):
        assert flag in begun.headers["Set-Cookie"]
    assert hosted.tokens["admin"] not in begun.headers["Set-Cookie"]
    page = ask(hosted, "GET", "/admin/users", Cookie=read_cookie(begun))
    assert page.status == 200 and "script-src 'self'" in page.headers["Content-Security-Policy"]


def test_the_cookie_admits_to_no_verb_and_ends_with_its_token(hosted: Hosted) -> None:
    made = create_token(hosted.context.store, user="second", role=Role.ADMIN, days=1)
    cookie = read_cookie(log_in(hosted, made.value.value))
    assert ask(hosted, "GET", "/admin/users", Cookie=cookie).status == 200
    assert ask(hosted, "POST", "/v1/list_queue", {}, Cookie=cookie).status == 401
    assert hosted.context.store.tokens.revoke(made.id)
    assert ask(hosted, "GET", "/admin/users", Cookie=cookie).status == 303


def test_hostile_names_are_inert_and_filters_match(hosted: Hosted) -> None:
    store = hosted.context.store
    store.owners.put(Owned.JOB, str(store.jobs.add("theirs", TASK).id), HOSTILE)
    store.audit.add(user=HOSTILE, verb="launch_jobs", target=HOSTILE, outcome="done")
    store.audit.add(user="ada", verb="cancel_jobs", target="7", outcome="DeniedError")
    cookie = read_cookie(log_in(hosted, hosted.tokens["admin"]))
    for path in (*PAGES, f"/admin/audit?user={quote(HOSTILE)}", f"/admin/audit?verb={quote(HOSTILE)}"):
        page = ask(hosted, "GET", path, Cookie=cookie)
        assert page.status == 200 and "<script>document" not in page.text and "\x1b" not in page.text
    only = ask(hosted, "GET", "/admin/audit?user=ada&outcome=DeniedError", Cookie=cookie).text
    assert "cancel_jobs" in only and "launch_jobs" not in only
    assert "No change matches" in ask(hosted, "GET", "/admin/audit?verb=nothing", Cookie=cookie).text
