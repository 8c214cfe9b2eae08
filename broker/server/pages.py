"""The dashboard of a server: the same pages as `broker dashboard`, by role, plus users and audit for administrators."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from broker.app.container import Context
from broker.client.wire import VERBS
from broker.dashboard.guard import redirect, refuse
from broker.dashboard.html import Content, Markup, element
from broker.dashboard.pages import PAGES
from broker.dashboard.people import list_audit, read_people
from broker.dashboard.people_page import AUDIT, USERS, show_audit, show_login, show_people, show_session
from broker.dashboard.reader import MakeContext
from broker.dashboard.views import Dashboard, describe
from broker.errors import BrokerError, TransientError
from broker.server.authorisation import has_role
from broker.server.nonces import NONCE_S
from broker.server.page_login import CALLBACK, START, PageLogins
from broker.server.sessions import COOKIE, SESSION_S, Authenticate, Sessions
from broker.server.store_thread import StoreThread
from broker.state.people import Owned, Role, Token
from broker.types import Job

PREFIX = "/admin/"
LOGIN, LOGOUT = "/login", "/logout"
LOGIN_COOKIE = "broker_login"  # cookie of a login through the issuer, until the login ends
STATIC = "/static/"
ADMIN_PAGES = {USERS: "Users", AUDIT: "Audit"}
VISITOR = web.RequestKey("visitor", Token)
RunVerb = Callable[[Token, str, Mapping[str, Any]], Awaitable[object]]


class ServerPages:
    """The pages of one server, and the permissions of users there; `run_verb` runs a verb for a user."""

    def __init__(
        self,
        context: Context,
        *,
        make_context: MakeContext,
        lookups: StoreThread,
        authenticate: Authenticate,
        run_verb: RunVerb,
    ) -> None:
        self._lookups = lookups
        self._sessions = Sessions(lookups.context, authenticate)
        self._logins = PageLogins(context)
        self._run_verb = run_verb
        self._dashboard = Dashboard(context, self, make_context=make_context)
        self._resources: frozenset[web.AbstractResource] = frozenset()

    def close(self) -> None:
        """Close the connection of the pages."""
        self._dashboard.close()

    async def show_metrics(self, request: web.Request) -> web.Response:
        """Respond with the metrics, which are not a page: the API checks the permission to read them."""
        return await self._dashboard.show_metrics(request)

    def add_routes(self, app: web.Application) -> None:
        """Add the pages to the application of the API."""
        others = frozenset(app.router.resources())
        app.router.add_get(LOGIN, self._show_login)
        app.router.add_post(LOGIN, self._log_in)
        app.router.add_get(START, self._begin_login)
        app.router.add_get(CALLBACK, self._finish_login)
        app.router.add_post(LOGOUT, self._log_out)
        app.router.add_get(USERS, self._show_users)
        app.router.add_get(AUDIT, self._show_audit)
        self._dashboard.add_routes(app)
        self._resources = frozenset(app.router.resources()) - others

    def has(self, request: web.Request) -> bool:
        """Return whether a request is for a page, not for the API."""
        return request.match_info.route.resource in self._resources

    def check(self, request: web.Request) -> web.StreamResponse | None:
        """Return the refusal of a request for a page; None if the user may see it. Runs in the thread of lookups."""
        if request.path in (LOGIN, START, CALLBACK) or request.path.startswith(STATIC):
            return None
        token = self._sessions.find(request)
        if token is None:
            is_page = request.method == "GET" and request.path != "/changes"
            return redirect(LOGIN) if is_page else refuse(401, f"log in at {LOGIN}")
        request[VISITOR] = token
        if request.path.startswith(PREFIX) and not has_role(token, Role.ADMIN):
            return self._show(request, "Refused", _make_paragraph("This page requires the role `admin`."), status=403)
        if request.method == "POST" and not self._sessions.is_own_origin(request):
            return refuse(403, "this action was not submitted from a page of this server")
        return None

    def list_targets(self, request: web.Request) -> Mapping[str, str]:
        """Return the pages that the visitor may see, including the page of the session."""
        token = request.get(VISITOR)
        if token is None:
            return {}
        return {**PAGES, **(ADMIN_PAGES if has_role(token, Role.ADMIN) else {}), LOGIN: token.user}

    def get_ticket(self, request: web.Request) -> str:
        """Return the ticket of the visitor's forms."""
        return self._sessions.make_ticket(request[VISITOR])

    def may_act(self, request: web.Request, context: Context, job: Job) -> bool:
        """Return whether the visitor may cancel and retry a job. The verbs check everything that they change again."""
        token = request[VISITOR]
        if not has_role(token, VERBS["cancel_jobs"].role):
            return False
        return has_role(token, Role.ADMIN) or context.store.owners.get(Owned.JOB, str(job.id)) == token.user

    async def act(self, request: web.Request, verb: str, job_id: int) -> int:
        """Cancel or retry a job with the verb of the API, which checks the owner and the limits, and is audited."""
        token = request[VISITOR]
        if verb == "retry":
            given: dict[str, Any] = {"job": str(job_id), "secrets": {}, "request_id": None}
            job = await self._run_verb(token, "retry_job", given)
            assert isinstance(job, Job)
            return job.id
        await self._run_verb(token, "cancel_jobs", {"names": (str(job_id),)})
        return job_id

    async def _show_login(self, request: web.Request) -> web.StreamResponse:
        token = await self._lookups.run(lambda: self._sessions.find(request))
        if token is None:
            return self._show(request, "Log in", show_login(LOGIN, self._logins.find_start()))
        request[VISITOR] = token
        ticket = self.get_ticket(request) if COOKIE in request.cookies else ""
        return self._show(request, "Session", show_session(token, LOGOUT, ticket), path=LOGIN)

    async def _log_in(self, request: web.Request) -> web.StreamResponse:
        """Begin a session for the token of a user."""
        if request.headers.get("Origin") != f"{request.scheme}://{request.host}":
            refused = _make_paragraph("This login was not submitted from a page of this server.")
            return self._show(request, "Refused", refused, status=403)
        value = str((await request.post()).get("token", "")).strip()
        session = await self._lookups.run(lambda: self._sessions.begin(value))
        if session is None:
            refused = element("p", "This token is unknown, expired or revoked.", class_="note", role="alert")
            form = show_login(LOGIN, self._logins.find_start())
            return self._show(request, "Log in", refused, form, status=403)
        answer = redirect("/")
        _set_session(answer, session, is_secure=request.scheme == "https")
        return answer

    async def _begin_login(self, request: web.Request) -> web.StreamResponse:
        """Send the browser to the issuer, with a cookie that only this login can use."""
        try:
            departure = await self._logins.begin(_read_own_url(request))
        except BrokerError as error:
            return self._refuse_login(request, error)
        answer = redirect(departure.url)
        answer.set_cookie(  # with `Strict`, it would not be sent with the redirect, which comes from another site
            LOGIN_COOKIE, departure.cookie, httponly=True, samesite="Lax", path=LOGIN, secure=departure.is_secure,
            max_age=int(NONCE_S),
        )  # fmt: skip
        return answer

    async def _finish_login(self, request: web.Request) -> web.StreamResponse:
        """Begin a session for the user whom the issuer redirects back.

        Browsers do not send `Strict` cookies with a redirect from another site, so this response is a page that
        reloads.
        """
        try:
            cookie = request.cookies.get(LOGIN_COOKIE, "")
            arrival = await self._logins.finish(_read_own_url(request), cookie, request.query)
        except BrokerError as error:
            answer = self._refuse_login(request, error)
        else:
            session = await self._lookups.run(lambda: self._sessions.begin(arrival.token.value, is_own=True))
            assert session is not None, "its token was just created"
            answer = self._show(request, "Logged in", element("p", element("a", "Continue to the overview", href="/")))
            answer.headers["Refresh"] = "0; url=/"
            _set_session(answer, session, is_secure=arrival.is_secure)
        answer.del_cookie(LOGIN_COOKIE, path=LOGIN)
        return answer

    def _refuse_login(self, request: web.Request, error: BrokerError) -> web.Response:
        status = 502 if isinstance(error, TransientError) else 403
        again = element("p", element("a", "Log in", href=LOGIN))
        return self._show(request, "Refused", *describe(error), again, status=status)

    async def _log_out(self, request: web.Request) -> web.StreamResponse:
        if (await request.post()).get("ticket") == self.get_ticket(request):
            await self._lookups.run(lambda: self._sessions.end(request))
        return redirect(LOGIN)

    async def _show_users(self, request: web.Request) -> web.Response:
        def read(context: Context) -> Markup:
            return show_people(read_people(context), context.clock.now_s())

        return await self._dashboard.show_read(request, "Users", read, path=USERS)

    async def _show_audit(self, request: web.Request) -> web.Response:
        user, verb, outcome = (request.query.get(name, "").strip()[:100] for name in ("user", "verb", "outcome"))

        def read(context: Context) -> Markup:
            events = list_audit(context, user=user, verb=verb, outcome=outcome)
            return show_audit(events, user=user, verb=verb, outcome=outcome)

        return await self._dashboard.show_read(request, "Audit", read, path=AUDIT)

    def _show(
        self, request: web.Request, title: str, *content: Content, path: str = "", status: int = 200
    ) -> web.Response:
        return self._dashboard.show(request, title, *content, path=path, status=status, is_live=False)


def _read_own_url(request: web.Request) -> str:
    return f"{request.scheme}://{request.host}"


def _set_session(answer: web.Response, session: str, *, is_secure: bool) -> None:
    answer.set_cookie(
        COOKIE, session, httponly=True, samesite="Strict", path="/", secure=is_secure, max_age=int(SESSION_S)
    )


def _make_paragraph(text: str) -> Markup:
    return element("p", text)
