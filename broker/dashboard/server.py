"""The web server of `broker dashboard`: pages, actions, changes as server-sent events, and `/metrics`.

Reads are short queries on a connection of their own, so no controller waits for a page.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

from aiohttp import web

from broker.app import jobs
from broker.app.checks import read_checks
from broker.app.container import Context
from broker.app.deadline_chances import ChancePoint, list_chances
from broker.app.forecasts import list_paid
from broker.app.services import describe_services, list_service_events
from broker.app.spending import By, list_day_shares, read_spending
from broker.dashboard import pages
from broker.dashboard.chances import ChanceCache
from broker.dashboard.cloud_page import show_clouds
from broker.dashboard.cost_page import show_cost
from broker.dashboard.guard import HEADERS, LOGIN, Gatekeeper, Handler, read_scrape_token, redirect, refuse
from broker.dashboard.html import Content, element
from broker.dashboard.metrics import MetricsPage
from broker.dashboard.model import NEWEST, list_places, read_job, read_overview
from broker.dashboard.plan_page import show_choices, show_plan
from broker.dashboard.plans import PlanPage, read_plan
from broker.dashboard.service_page import show_service, show_services
from broker.errors import BrokerError, NoOfferError, UsageError
from broker.types import Job

STATIC = Path(__file__).parent / "static"
TYPES = {".css": "text/css", ".js": "text/javascript"}
LOOK_S = 0.5  # between looks for new events
REFRESH_S = 5.0  # a page is reloaded after this long without an event: steps and costs do not cause events
STREAMS_MAX = 100
SCRAPE_FILE = "metrics-token"  # in the state folder


class Dashboard:
    """The pages of one state folder."""

    def __init__(self, context: Context, guard: Gatekeeper) -> None:
        self._context = context
        self._guard = guard
        self._notes: list[str] = []
        self._streams = 0
        self._chances = ChanceCache()
        self._metrics_page = MetricsPage(context)
        context.note = self._notes.append

    def make_app(self, hosts: frozenset[str]) -> web.Application:
        """Make the application; `hosts` are the values of `Host` that it answers."""

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            answer = self._guard.check(request, hosts)
            if answer is None:
                answer = await self._answer(request, handler)
            if not answer.prepared:
                answer.headers.update(HEADERS)
            return answer

        app = web.Application(middlewares=[guard])
        app.router.add_get(LOGIN, self._guard.log_in)
        for path, show in (
            ("/", self._overview),
            ("/clusters", self._clusters),
            ("/places", self._places),
            ("/cost", self._cost),
            ("/clouds", self._clouds),
            ("/services", self._services),
            (r"/services/{name}", self._service),
            ("/plan", self._choose_plan),
            (r"/jobs/{job:\d+}", self._job),
            (r"/jobs/{job:\d+}/plan", self._plan),
            ("/metrics", self._metrics),
            ("/changes", self._changes),
            (r"/static/{name:[a-z]+\.[a-z]+}", self._static),
        ):
            app.router.add_get(path, show)
        app.router.add_post(r"/jobs/{job:\d+}/{verb:cancel|retry}", self._act)
        return app

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Run a handler; an error of broker becomes a page that says what happened and what to do."""
        try:
            return await handler(request)
        except web.HTTPException as answer:
            return refuse(answer.status, answer.reason.lower())
        except UsageError as error:
            return self._show("Not found", *_describe(error), status=404)
        except BrokerError as error:
            return self._show("Error", *_describe(error), status=500)

    def _show(
        self, title: str, *content: Content, path: str = "", status: int = 200, is_live: bool = True
    ) -> web.Response:
        text = pages.lay_out(title, *content, path=path, notes=list(dict.fromkeys(self._notes)), is_live=is_live)
        self._notes.clear()
        return web.Response(text=text, content_type="text/html", status=status)

    async def _overview(self, request: web.Request) -> web.Response:
        self._context.keep_jobs_going()
        return self._show("Overview", pages.show_overview(read_overview(self._context)), path="/")

    async def _job(self, request: web.Request) -> web.Response:
        job = jobs.find_job(self._context, int(request.match_info["job"]))
        chances = await self._find_chances(job)
        log, _ = jobs.read_log(self._context, job.id)
        page = replace(read_job(self._context, job), chances=chances)
        shown = pages.show_job(page, log, ticket=self._guard.ticket)
        return self._show(f"Job {job.id}: {job.name}", shown)

    async def _find_chances(self, job: Job) -> tuple[ChancePoint, ...]:
        """Return the chances of the deadline over time, computed in a thread if they are not known."""
        if job.task.goal is None or job.task.goal.deadline_hours is None:
            return ()  # without opening the state once more, in a thread
        now_s, is_ended = self._context.clock.now_s(), job.status.is_terminal
        found = self._chances.get(job.id, now_s=now_s, is_ended=is_ended)
        if found is None:
            found = await asyncio.to_thread(self._read_chances, job)
            self._chances.put(job.id, found, now_s=now_s, is_ended=is_ended)
        return found

    def _read_chances(self, job: Job) -> tuple[ChancePoint, ...]:
        context = Context(self._context.config.home)
        try:
            return list_chances(context, jobs.explain(context, job))
        finally:
            context.close()

    async def _clusters(self, request: web.Request) -> web.Response:
        store, now_s = self._context.store, self._context.clock.now_s()
        clusters = store.clusters.list(on_damage=self._context.warn)
        spent = {each.name: store.bills.spend_usd(cluster=each.name, now_s=now_s) for each in clusters}
        return self._show("Clusters", pages.show_clusters(clusters, spent, now_s), path="/clusters")

    async def _places(self, request: web.Request) -> web.Response:
        store, now_s = self._context.store, self._context.clock.now_s()
        page = pages.show_places(list_places(store), store.refusals.list_active(now_s), now_s)
        return self._show("Locations", page, path="/places")

    async def _cost(self, request: web.Request) -> web.Response:
        by = By(request.query["by"]) if request.query.get("by") in list(By) else By.DAY
        store = self._context.store
        spending = read_spending(store, by, self._context.clock.now_s(), on_damage=self._context.warn)
        lines = store.jobs.list_lines(on_damage=self._context.warn)
        shares = list_day_shares(store.bills.list(on_damage=self._context.warn), self._context.clock.now_s())
        names = {line.id: line.name for line in lines}
        return self._show("Cost", show_cost(by, spending, names, shares, list_paid(self._context)), path="/cost")

    async def _clouds(self, request: web.Request) -> web.Response:
        checks = read_checks(self._context.config)
        return self._show("Clouds", show_clouds(checks, self._context.clock.now_s()), path="/clouds")

    async def _services(self, request: web.Request) -> web.Response:
        lines = describe_services(self._context)
        return self._show("Services", show_services(lines, self._context.clock.now_s()), path="/services")

    async def _service(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        (line,) = describe_services(self._context, [name])
        events = list_service_events(self._context, name)
        return self._show(f"Service {name}", show_service(line, events, self._context.clock.now_s()))

    async def _choose_plan(self, request: web.Request) -> web.Response:
        lines = self._context.store.jobs.list_lines(NEWEST, on_damage=self._context.warn)[:NEWEST]
        return self._show("Plan", show_choices([(line.id, line.name) for line in lines]), path="/plan")

    async def _plan(self, request: web.Request) -> web.Response:
        job = jobs.find_job(self._context, int(request.match_info["job"]))
        title = f"Plan of job {job.id}: {job.name}"
        try:
            page = await asyncio.to_thread(self._read_plan, job, request.query.get("change", "").strip())
        except NoOfferError as error:
            return self._show(title, *_describe(error), path="/plan", is_live=False)
        return self._show(title, show_plan(page), path="/plan", is_live=False)

    def _read_plan(self, job: Job, change: str) -> PlanPage:
        """Plan in a thread, with a store of its own: ranking 100,000 offers takes a while."""
        context = Context(self._context.config.home)
        try:
            return read_plan(context, job, change)
        finally:
            context.close()

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self._metrics_page.render(), content_type="text/plain")

    async def _static(self, request: web.Request) -> web.Response:
        path = STATIC / request.match_info["name"]
        if path.suffix not in TYPES or not path.is_file():
            raise web.HTTPNotFound
        return web.Response(body=path.read_bytes(), content_type=TYPES[path.suffix], charset="utf-8")

    async def _act(self, request: web.Request) -> web.StreamResponse:
        """Cancel or retry a job, then show it."""
        if (await request.post()).get("ticket") != self._guard.ticket:
            return refuse(403, "this page is outdated; load it again")
        job = jobs.find_job(self._context, int(request.match_info["job"]))
        if request.match_info["verb"] == "cancel":
            self._context.store.jobs.request_cancel(job.id)
            self._context.ensure_daemon()
        else:
            job = await asyncio.to_thread(self._retry, job.id)
        return redirect(f"/jobs/{job.id}")

    def _retry(self, job_id: int) -> Job:
        """Retry a job in a thread, with a store of its own: checking the access to buckets takes a while."""
        context = Context(self._context.config.home)
        try:
            return jobs.retry(context, jobs.find_job(context, job_id), secrets={}, request_id=None)
        finally:
            context.close()

    async def _changes(self, request: web.Request) -> web.StreamResponse:
        """Send the id of the newest event whenever it changed, and at least every `REFRESH_S`."""
        if self._streams >= STREAMS_MAX:
            return refuse(503, "too many pages are open")
        answer = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        await answer.prepare(request)
        self._streams += 1
        try:
            await self._send_changes(answer, request.headers.get("Last-Event-ID"))
        except ConnectionResetError:
            pass  # the page was closed
        finally:
            self._streams -= 1
        return answer

    async def _send_changes(self, answer: web.StreamResponse, known: str | None) -> None:
        store, clock = self._context.store, self._context.clock
        sent, sent_s = known or str(store.events.get_newest_id()), clock.now_s()
        await answer.write(b": connected\n\n")
        while True:
            newest = str(store.events.get_newest_id())
            if newest != sent or clock.now_s() - sent_s >= REFRESH_S:
                sent, sent_s = newest, clock.now_s()
                await answer.write(f"id: {newest}\ndata: {newest}\n\n".encode())
            await clock.sleep(LOOK_S)


def _describe(error: BrokerError) -> Sequence[Content]:
    lines = [error.message, *error.details, *(f"hint: {hint}" for hint in error.hints)]
    return [element("p", line) for line in lines]


async def serve(
    context: Context, *, host: str, port: int, on_ready: Callable[[str], None], until: Callable[[], Awaitable[object]]
) -> None:
    """Serve the pages until `until` returns; `on_ready` receives the link. Raises OSError if the port is taken."""
    guard = Gatekeeper(read_scrape_token(context.config.home / SCRAPE_FILE))
    sock = socket.create_server((host, port))
    bound = sock.getsockname()[1]
    app = Dashboard(context, guard).make_app(frozenset({f"{host}:{bound}", f"localhost:{bound}"}))
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.SockSite(runner, sock).start()
        on_ready(guard.make_link(host, bound))
        await until()
    finally:
        await runner.cleanup()
