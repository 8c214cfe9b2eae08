"""Serve `broker dashboard`: the routes of the dashboard behind one link, and `/metrics`."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from aiohttp import web

from broker.app import jobs
from broker.app.container import Context
from broker.dashboard import pages
from broker.dashboard.guard import HEADERS, LOGIN, Gatekeeper, Handler, read_scrape_token, refuse
from broker.dashboard.views import Dashboard
from broker.types import Job

SCRAPE_FILE = "metrics-token"  # in the state folder


class OpenPolicy:
    """The policy of `broker dashboard`: every visitor with the cookie may do everything."""

    def __init__(self, home: Path, guard: Gatekeeper) -> None:
        self._home = home
        self._guard = guard

    def list_targets(self, request: web.Request) -> Mapping[str, str]:
        """Return all pages."""
        return pages.PAGES

    def get_ticket(self, request: web.Request) -> str:
        """Return the ticket of this process."""
        return self._guard.ticket

    def may_act(self, request: web.Request, context: Context, job: Job) -> bool:
        """Return True."""
        return True

    async def act(self, request: web.Request, verb: str, job_id: int) -> int:
        """Act in a thread, with a store of its own, because checking the access to buckets takes a while."""
        return await asyncio.to_thread(self._act, verb, job_id)

    def _act(self, verb: str, job_id: int) -> int:
        context = Context(self._home)
        try:
            job = jobs.find_job(context, job_id)
            if verb == "retry":
                return jobs.retry(context, job, secrets={}, request_id=None).id
            context.store.jobs.request_cancel(job.id)
            context.ensure_daemon()
            return job.id
        finally:
            context.close()


def make_app(dashboard: Dashboard, guard: Gatekeeper, hosts: frozenset[str]) -> web.Application:
    """Make the application of `broker dashboard`; `hosts` are the values of `Host` that it answers."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        answer = guard.check(request, hosts)
        if answer is None:
            try:
                answer = await handler(request)
            except web.HTTPException as refusal:
                answer = refuse(refusal.status, refusal.reason.lower())
        if not answer.prepared:
            answer.headers.update(HEADERS)
        return answer

    app = web.Application(middlewares=[check])
    app.router.add_get(LOGIN, guard.log_in)
    app.router.add_get("/metrics", dashboard.show_metrics)
    dashboard.add_routes(app)
    return app


async def serve(
    context: Context, *, host: str, port: int, on_ready: Callable[[str], None], until: Callable[[], Awaitable[object]]
) -> None:
    """Serve the pages until `until` returns; `on_ready` receives the link. Raises OSError if the port is taken."""
    guard = Gatekeeper(read_scrape_token(context.config.home / SCRAPE_FILE))
    sock = socket.create_server((host, port))
    bound = sock.getsockname()[1]
    home = context.config.home
    dashboard = Dashboard(context, OpenPolicy(home, guard), make_context=lambda: Context(home))
    app = make_app(dashboard, guard, frozenset({f"{host}:{bound}", f"localhost:{bound}"}))
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.SockSite(runner, sock).start()
        on_ready(guard.make_link(host, bound))
        await until()
    finally:
        await runner.cleanup()
        dashboard.close()
