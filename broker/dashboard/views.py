"""The routes of the dashboard: pages, actions, and changes as server-sent events.

`broker dashboard` and a server for several users host the same routes. Reads are short queries on connections of their
own, so no controller waits for a page.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

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
from broker.dashboard.guard import HEADERS, Handler, redirect, refuse
from broker.dashboard.html import Content, Markup, element
from broker.dashboard.metrics import MetricsPage
from broker.dashboard.model import NEWEST, JobPage, read_job, read_overview
from broker.dashboard.place_history import read_places
from broker.dashboard.place_page import show_places
from broker.dashboard.plan_page import show_choices, show_plan
from broker.dashboard.plans import PlanPage, read_plan
from broker.dashboard.reader import MakeContext, PageReader
from broker.dashboard.service_page import show_service, show_services
from broker.errors import BrokerError, DeniedError, NoOfferError, UsageError
from broker.types import Job

STATIC = Path(__file__).parent / "static"
TYPES = {".css": "text/css", ".js": "text/javascript"}
LOOK_S = 0.5  # between looks for new events
REFRESH_S = 5.0  # a page is loaded again after this long without an event: steps and costs are no events
STREAMS_MAX = 100
NEWEST_EVENT = web.RequestKey("newest", int)  # when the request came: a page may show later ones, and lacks none


class PagePolicy(Protocol):
    """What differs between `broker dashboard` and a server: the navigation, and who may act on a job."""

    def list_targets(self, request: web.Request) -> Mapping[str, str]:
        """Return the pages of the navigation, titles by path."""
        ...

    def get_ticket(self, request: web.Request) -> str:
        """Return the ticket that the forms of this visitor's pages carry."""
        ...

    def may_act(self, request: web.Request, context: Context, job: Job) -> bool:
        """Return whether the visitor may cancel and retry a job."""
        ...

    async def act(self, request: web.Request, verb: str, job_id: int) -> int:
        """Cancel or retry a job; return the ID of the job to show. Raises BrokerError."""
        ...


class Dashboard:
    """The pages of one state folder. The event loop uses `context` for short queries; pages are read in a thread."""

    def __init__(self, context: Context, policy: PagePolicy, *, make_context: MakeContext) -> None:
        self._context = context
        self._policy = policy
        self._make_context = make_context
        self._reader = PageReader(make_context)
        self._metrics = MetricsPage()
        self._streams = 0
        self._chances = ChanceCache()

    def close(self) -> None:
        """Close the connection of the pages."""
        self._reader.close()

    async def show_metrics(self, request: web.Request) -> web.Response:
        """Answer with the metrics in Prometheus' format."""
        text, _ = await self._reader.read(self._metrics.render)
        return web.Response(text=text, content_type="text/plain")

    def add_routes(self, app: web.Application) -> None:
        """Add the pages to an application, which decides who may see them."""
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
            ("/changes", self._changes),
            (r"/static/{name:[a-z]+\.[a-z]+}", self._static),
        ):
            app.router.add_get(path, self._guard(show))
        app.router.add_post(r"/jobs/{job:\d+}/{verb:cancel|retry}", self._guard(self._act))

    def _guard(self, handler: Handler) -> Handler:
        """Run a handler; an error of broker becomes a page that says what happened and what to do."""

        async def guarded(request: web.Request) -> web.StreamResponse:
            try:
                request[NEWEST_EVENT] = self._context.store.events.get_newest_id()
                answer = await handler(request)
            except web.HTTPException as refusal:
                answer = refuse(refusal.status, refusal.reason.lower())
            except UsageError as error:
                answer = self.show(request, "Not found", *describe(error), status=404)
            except DeniedError as error:
                answer = self.show(request, "Refused", *describe(error), status=403)
            except BrokerError as error:
                answer = self.show(request, "Error", *describe(error), status=500)
            if not answer.prepared:
                answer.headers.update(HEADERS)
            return answer

        return guarded

    def show(
        self,
        request: web.Request,
        title: str,
        *content: Content,
        path: str = "",
        status: int = 200,
        is_live: bool = True,
        notes: Sequence[str] = (),
    ) -> web.Response:
        """Make the answer to a request from the content of a page."""
        targets = self._policy.list_targets(request)
        text = pages.lay_out(
            title,
            *content,
            path=path,
            notes=notes,
            is_live=is_live,
            targets=targets,
            newest=request.get(NEWEST_EVENT, 0),
        )
        return web.Response(text=text, content_type="text/html", status=status, headers=HEADERS)

    async def show_read(
        self, request: web.Request, title: str, read: Callable[[Context], Markup], *, path: str, is_live: bool = True
    ) -> web.Response:
        """Make a page from what `read` returns in the thread of the pages."""
        shown, notes = await self._reader.read(read)
        return self.show(request, title, shown, path=path, is_live=is_live, notes=notes)

    async def _overview(self, request: web.Request) -> web.Response:
        def read(context: Context) -> Markup:
            context.keep_jobs_going()
            return pages.show_overview(read_overview(context))

        return await self.show_read(request, "Overview", read, path="/")

    async def _job(self, request: web.Request) -> web.Response:
        job_id = int(request.match_info["job"])
        job, _ = await self._reader.read(lambda context: jobs.find_job(context, job_id))
        chances = await self._find_chances(job)

        def read(context: Context) -> tuple[JobPage, Sequence[str], bool]:
            log, _ = jobs.read_log(context, job.id)
            found = jobs.find_job(context, job.id)
            return read_job(context, found), log, self._policy.may_act(request, context, found)

        (page, log, may_act), notes = await self._reader.read(read)
        ticket = self._policy.get_ticket(request) if may_act else ""
        shown = pages.show_job(replace(page, chances=chances), log, ticket=ticket)
        return self.show(request, f"Job {job.id}: {job.name}", shown, notes=notes)

    async def _find_chances(self, job: Job) -> tuple[ChancePoint, ...]:
        """Return the chances of the deadline as they moved, planned in a thread where they are not known."""
        if job.task.goal is None or job.task.goal.deadline_hours is None:
            return ()  # without opening the state once more, in a thread
        now_s, is_ended = self._context.clock.now_s(), job.status.is_terminal
        found = self._chances.get(job.id, now_s=now_s, is_ended=is_ended)
        if found is None:
            found = await asyncio.to_thread(self._read_chances, job)
            self._chances.put(job.id, found, now_s=now_s, is_ended=is_ended)
        return found

    def _read_chances(self, job: Job) -> tuple[ChancePoint, ...]:
        context = self._make_context()
        try:
            return list_chances(context, jobs.explain(context, job))
        finally:
            context.close()

    async def _clusters(self, request: web.Request) -> web.Response:
        def read(context: Context) -> Markup:
            store, now_s = context.store, context.clock.now_s()
            clusters = store.clusters.list(on_damage=context.warn)
            spent = {each.name: store.bills.spend_usd(cluster=each.name, now_s=now_s) for each in clusters}
            return pages.show_clusters(clusters, spent, now_s)

        return await self.show_read(request, "Clusters", read, path="/clusters")

    async def _places(self, request: web.Request) -> web.Response:
        def read(context: Context) -> Markup:
            store, now_s = context.store, context.clock.now_s()
            return show_places(read_places(context), store.refusals.list_active(now_s), now_s)

        return await self.show_read(request, "Locations", read, path="/places")

    async def _cost(self, request: web.Request) -> web.Response:
        by = By(request.query["by"]) if request.query.get("by") in list(By) else By.DAY

        def read(context: Context) -> Markup:
            store, now_s = context.store, context.clock.now_s()
            spending = read_spending(store, by, now_s, on_damage=context.warn)
            lines = store.jobs.list_lines(on_damage=context.warn)
            shares = list_day_shares(store.bills.list(on_damage=context.warn), now_s)
            names = {line.id: line.name for line in lines}
            return show_cost(by, spending, names, shares, list_paid(context))

        return await self.show_read(request, "Cost", read, path="/cost")

    async def _clouds(self, request: web.Request) -> web.Response:
        def read(context: Context) -> Markup:
            return show_clouds(read_checks(context.config), context.clock.now_s())

        return await self.show_read(request, "Clouds", read, path="/clouds")

    async def _services(self, request: web.Request) -> web.Response:
        def read(context: Context) -> Markup:
            return show_services(describe_services(context), context.clock.now_s())

        return await self.show_read(request, "Services", read, path="/services")

    async def _service(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]

        def read(context: Context) -> Markup:
            (line,) = describe_services(context, [name])
            return show_service(line, list_service_events(context, name), context.clock.now_s())

        return await self.show_read(request, f"Service {name}", read, path="/services")

    async def _choose_plan(self, request: web.Request) -> web.Response:
        def read(context: Context) -> Markup:
            lines = context.store.jobs.list_lines(NEWEST, on_damage=context.warn)[:NEWEST]
            return show_choices([(line.id, line.name) for line in lines])

        return await self.show_read(request, "Plan", read, path="/plan")

    async def _plan(self, request: web.Request) -> web.Response:
        job_id = int(request.match_info["job"])
        job, _ = await self._reader.read(lambda context: jobs.find_job(context, job_id))
        title = f"Plan of job {job.id}: {job.name}"
        try:
            page = await asyncio.to_thread(self._read_plan, job, request.query.get("change", "").strip())
        except NoOfferError as error:
            return self.show(request, title, *describe(error), path="/plan", is_live=False)
        return self.show(request, title, show_plan(page), path="/plan", is_live=False)

    def _read_plan(self, job: Job, change: str) -> PlanPage:
        """Plan in a thread, with a store of its own: ranking 100,000 offers takes a while."""
        context = self._make_context()
        try:
            return read_plan(context, job, change)
        finally:
            context.close()

    async def _static(self, request: web.Request) -> web.Response:
        path = STATIC / request.match_info["name"]
        if path.suffix not in TYPES or not path.is_file():
            raise web.HTTPNotFound
        return web.Response(body=path.read_bytes(), content_type=TYPES[path.suffix], charset="utf-8")

    async def _act(self, request: web.Request) -> web.StreamResponse:
        """Cancel or retry a job, then show it."""
        if (await request.post()).get("ticket") != self._policy.get_ticket(request):
            return refuse(403, "this page is outdated; load it again")
        shown = await self._policy.act(request, request.match_info["verb"], int(request.match_info["job"]))
        return redirect(f"/jobs/{shown}")

    async def _changes(self, request: web.Request) -> web.StreamResponse:
        """Send the id of the newest event whenever it changed, and at least every `REFRESH_S`."""
        if self._streams >= STREAMS_MAX:
            return refuse(503, "too many pages are open")
        answer = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        await answer.prepare(request)
        self._streams += 1
        try:
            await self._send_changes(answer, request.headers.get("Last-Event-ID") or request.query.get("after"))
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


def describe(error: BrokerError) -> Sequence[Content]:
    """Show an error with its details and hints."""
    lines = [error.message, *error.details, *(f"hint: {hint}" for hint in error.hints)]
    return [element("p", line) for line in lines]
