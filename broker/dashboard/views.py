"""Handle the routes of the dashboard: pages, actions, and changes as server-sent events.

`broker dashboard` and a server for several users host the same routes. Reads are short queries on connections of their
own, so no controller waits for a page.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Protocol

from aiohttp import web

from broker.app import jobs
from broker.app.container import Context
from broker.app.deadline_chances import list_chances
from broker.app.forecasts import forecast_job
from broker.app.spending import Grouping
from broker.dashboard import content, pages
from broker.dashboard.chances import ExpectationCache, JobExpectation
from broker.dashboard.changes import ChangeFeed
from broker.dashboard.guard import HEADERS, Handler, redirect, refuse
from broker.dashboard.html import Content, Markup, element
from broker.dashboard.jobs_page import JobFilter, read_jobs, show_list
from broker.dashboard.metrics import MetricsPage
from broker.dashboard.pages import JobContent
from broker.dashboard.plan_page import show_plan
from broker.dashboard.plans import PlanPage, read_plan
from broker.dashboard.reader import MakeContext, PageReader
from broker.dashboard.sharing import SharedReads
from broker.errors import BrokerError, DeniedError, NoOfferError, UsageError
from broker.types import Job

STATIC = Path(__file__).parent / "static"
TYPES = {".css": "text/css", ".js": "text/javascript"}
STREAMS_MAX = 100
AFTER = "Broker-After"  # in a request of `live.js`: the id of the event that the page must include
NEWEST_EVENT = web.RequestKey("newest", int)  # when the page was read: it includes all events up to this one


class PagePolicy(Protocol):
    """The differences between `broker dashboard` and a server: the navigation, and who may act on a job."""

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
        self._shared = SharedReads(context.clock, context.store.events.get_newest_id)
        self._feed = ChangeFeed(context.store, context.clock)
        self._metrics = MetricsPage()
        self._overview_page = content.OverviewPage()
        self._streams = 0
        self._expectations = ExpectationCache()

    def close(self) -> None:
        """Close the store of the pages."""
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
            ("/jobs", self._jobs),
            (r"/jobs/{job:\d+}", self._job),
            (r"/jobs/{job:\d+}/log", self._log),
            (r"/jobs/{job:\d+}/plan", self._plan),
            ("/changes", self._changes),
            (r"/static/{name:[a-z]+\.[a-z]+}", self._static),
        ):
            app.router.add_get(path, self._guard(show))
        app.router.add_post(r"/jobs/{job:\d+}/{verb:cancel|retry}", self._guard(self._act))

    def _guard(self, handler: Handler) -> Handler:
        """Wrap a handler: turn an error of broker into a page with its message and hints."""

        async def guarded(request: web.Request) -> web.StreamResponse:
            try:
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
        job_id: int | None = None,
    ) -> web.Response:
        """Make the response to a request from the content of a page."""
        text = pages.lay_out(
            title,
            *content,
            path=path,
            notes=notes,
            is_live=is_live,
            targets=self._policy.list_targets(request),
            newest=request.get(NEWEST_EVENT, 0),
            job_id=job_id,
            now_s=self._context.clock.now_s(),
        )
        return web.Response(text=text, content_type="text/html", status=status, headers=HEADERS)

    async def show_read(
        self, request: web.Request, title: str, read: Callable[[Context], Markup], *, path: str
    ) -> web.Response:
        """Make a page for one visitor from the result of `read` in the pages' thread; it is not reloaded."""
        shown, notes = await self._reader.read(read)
        return self.show(request, title, shown, path=path, is_live=False, notes=notes)

    async def _show_shared(
        self, request: web.Request, title: str, make: Callable[[Context], Markup], *key: str, path: str
    ) -> web.Response:
        """Make a page whose content is the same for all visitors; `key` holds the arguments of `make`."""
        shared = await self._shared.get((path, *key), lambda: self._reader.read(make), after=_read_after(request))
        request[NEWEST_EVENT] = shared.newest
        shown, notes = shared.found
        return self.show(request, title, shown, path=path, notes=notes)

    async def _overview(self, request: web.Request) -> web.Response:
        return await self._show_shared(request, "Overview", self._overview_page.make, path="/")

    async def _jobs(self, request: web.Request) -> web.Response:
        query = request.query
        choice = JobFilter(query["status"]) if query.get("status") in list(JobFilter) else JobFilter.ALL
        wanted = partial(read_jobs, choice=choice, name=query.get("name", ""), before=_read_number(query.get("before")))
        return await self.show_read(request, "Jobs", lambda context: show_list(wanted(context)), path="/jobs")

    async def _log(self, request: web.Request) -> web.StreamResponse:
        """Send the whole log of a job unchanged, as plain text, which browsers do not interpret."""
        job_id = int(request.match_info["job"])
        job, _ = await self._reader.read(lambda context: jobs.find_job(context, job_id))
        path = self._context.config.logs / "jobs" / f"{job.id}.log"
        headers = {**HEADERS, "Content-Type": "text/plain; charset=utf-8"}
        if not path.is_file():
            return web.Response(headers=headers)
        return web.FileResponse(path, headers=headers)

    async def _job(self, request: web.Request) -> web.Response:
        job_id = int(request.match_info["job"])
        shared = await self._shared.get(
            ("/jobs", str(job_id)), lambda: self._read_job(job_id), after=_read_after(request)
        )
        request[NEWEST_EVENT] = shared.newest
        shown, notes = shared.found
        may_act = self._policy.may_act(request, self._context, shown.job)
        ticket = self._policy.get_ticket(request) if may_act else ""
        title = f"Job {shown.job.id}: {shown.job.name}"
        return self.show(request, title, shown.show(ticket), notes=notes, job_id=shown.job.id)

    async def _read_job(self, job_id: int) -> tuple[JobContent, list[str]]:
        job, _ = await self._reader.read(lambda context: jobs.find_job(context, job_id))
        expectation = await self._find_expectation(job)
        return await self._reader.read(lambda context: content.make_job(context, job.id, expectation))

    async def _find_expectation(self, job: Job) -> JobExpectation:
        """Return the expectation of a job with a known amount of work; compute it in a thread if it is not cached."""
        if job.task.goal is None or job.task.goal.work_hours is None:
            return JobExpectation()  # do not open another store for nothing
        now_s, is_ended = self._context.clock.now_s(), job.status.is_terminal
        found = self._expectations.get(job.id, now_s=now_s, is_ended=is_ended)
        if found is None:
            found = await asyncio.to_thread(self._read_expectation, job)
            self._expectations.put(job.id, found, now_s=now_s, is_ended=is_ended)
        return found

    def _read_expectation(self, job: Job) -> JobExpectation:
        context = self._make_context()
        try:
            explanation = jobs.explain(context, job)
            forecast = forecast_job(context, explanation.job, paid_usd=explanation.paid_usd)
            return JobExpectation(chances=list_chances(context, explanation), forecast=forecast)
        finally:
            context.close()

    async def _clusters(self, request: web.Request) -> web.Response:
        return await self._show_shared(request, "Clusters", content.make_clusters, path="/clusters")

    async def _places(self, request: web.Request) -> web.Response:
        return await self._show_shared(request, "Locations", content.make_places, path="/places")

    async def _cost(self, request: web.Request) -> web.Response:
        by = Grouping(request.query["by"]) if request.query.get("by") in list(Grouping) else Grouping.DAY
        return await self._show_shared(request, "Cost", partial(content.make_cost, by=by), by.value, path="/cost")

    async def _clouds(self, request: web.Request) -> web.Response:
        return await self._show_shared(request, "Clouds", content.make_clouds, path="/clouds")

    async def _services(self, request: web.Request) -> web.Response:
        return await self._show_shared(request, "Services", content.make_services, path="/services")

    async def _service(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        make = partial(content.make_service, name=name)
        return await self._show_shared(request, f"Service {name}", make, name, path="/services")

    async def _choose_plan(self, request: web.Request) -> web.Response:
        return await self._show_shared(request, "Plan", content.make_choices, path="/plan")

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
        """Plan with a separate store, for a thread: ranking 100,000 offers takes a while."""
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
        try:
            shown = await self._policy.act(request, request.match_info["verb"], int(request.match_info["job"]))
        finally:
            self._shared.forget()  # a request to cancel is not recorded as an event
        return redirect(f"/jobs/{shown}")

    async def _changes(self, request: web.Request) -> web.StreamResponse:
        """Send the id of the newest event of a page whenever it changes, and regularly."""
        if self._streams >= STREAMS_MAX:
            return refuse(503, "too many pages are open")
        after = _read_number(request.headers.get("Last-Event-ID") or request.query.get("after"))
        if after is None:
            after = self._context.store.events.get_newest_id()
        answer = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        await answer.prepare(request)
        self._streams += 1
        try:
            await answer.write(b": connected\n\n")
            async with aclosing(self._feed.follow(_read_number(request.query.get("job")), after=after)) as changes:
                async for newest in changes:
                    await answer.write(f"id: {newest}\ndata: {newest}\n\n".encode())
        except ConnectionResetError:
            pass  # the page was closed
        finally:
            self._streams -= 1
        return answer


def _read_after(request: web.Request) -> int | None:
    return _read_number(request.headers.get(AFTER))


def _read_number(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,18}", text) else None


def describe(error: BrokerError) -> Sequence[Content]:
    """Show an error with its details and hints."""
    lines = [error.message, *error.details, *(f"hint: {hint}" for hint in error.hints)]
    return [element("p", line) for line in lines]
