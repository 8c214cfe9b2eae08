"""The routes of the server: verbs, answers, files, health, metrics and the OpenAPI document."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiohttp import web

from broker import __version__
from broker.app.mapping import MapRequest
from broker.app.sweeping import SweepRequest
from broker.app.verbs.shells import ShellInput
from broker.client.wire import (
    HEADER,
    LINES,
    MESSAGE_MAX,
    PROTOCOL,
    VERBS,
    Verb,
    check_fields,
    decode,
    decode_error,
    encode,
    read_signature,
)
from broker.errors import AuthError, BrokerError, DeniedError, InvalidRequestError, UsageError
from broker.server.answers import collect, make_refusal
from broker.server.authorisation import check_role, has_role
from broker.server.context import Policy, ServerContext
from broker.server.files import DIGEST, FileStore
from broker.server.login import BrowserLogins
from broker.server.openapi import describe_api
from broker.server.pages import LOGIN as PAGE_LOGIN
from broker.server.pages import ServerPages
from broker.server.running import RunningVerb, VerbRequest
from broker.server.store_thread import StoreThread
from broker.server.tokens import find_token
from broker.state.people import Role, Token
from broker.types import Task

log = logging.getLogger(__name__)

BEAT_S = 5.0  # between blank lines, which keep the connection of a silent verb alive
THREADS_MAX = 64  # number of concurrent verbs that stay until something ends, and of all others; each has a connection
STAYING = (
    "follow_run", "follow_log", "follow_service_log", "wait_for_job", "wait_for_service", "watch_jobs", "run_map",
    "run_sweep", "run_on_node", "open_shell",
)  # fmt: skip
UNKNOWN_TOKEN = AuthError(
    "the token is unknown, expired or revoked",
    hints=("ask an administrator of the server for a new one, then `broker login URL --token-file FILE`",),
)
LOGIN = "/v1/login"
OPEN = ("/healthz", "/readyz", "/openapi.json", LOGIN)  # routes without a token
OPEN_BODY_MAX = 64 * 2**10  # of a login, which anyone may send
TOKEN = web.RequestKey("token", Token)


class Server:
    """The application on one state folder."""

    def __init__(self, home: Path, policy: Policy) -> None:
        self._home = home
        self._policy = policy
        self._context = ServerContext(home, policy=policy)
        self._lookups = StoreThread(ServerContext(home, policy=policy))
        self._files = FileStore(home / "uploads")
        self._pages = ServerPages(
            self._context,
            make_context=lambda: ServerContext(home, policy=policy),
            lookups=self._lookups,
            authenticate=self._authenticate,
            run_verb=self._run_for_page,
        )
        self._login = BrowserLogins(self._context)
        # Apart from each other, so that no number of clients that follow something keeps others from ending it.
        self._threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="verb")
        self._staying = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="staying")
        self._running: dict[str, RunningVerb] = {}
        self._is_leaving = asyncio.Event()

    def make_app(self) -> web.Application:
        """Return the application, with all routes behind one guard."""
        app = web.Application(middlewares=[self._guard], client_max_size=MESSAGE_MAX)
        app.router.add_get("/healthz", self._show_health)
        app.router.add_get("/readyz", self._show_readiness)
        app.router.add_get("/openapi.json", self._show_api)
        app.router.add_get("/metrics", self._pages.show_metrics)
        app.router.add_get("/v1/handshake", self._shake_hands)
        app.router.add_get(LOGIN, self._begin_login)
        app.router.add_post(LOGIN, self._finish_login)
        app.router.add_get(r"/v1/files/{digest:[0-9a-f]{64}}", self._find_files)
        app.router.add_put(r"/v1/files/{digest:[0-9a-f]{64}}", self._receive_files)
        app.router.add_post(r"/v1/answers/{id:[0-9a-f]{32}}", self._answer)
        app.router.add_post(r"/v1/input/{id:[0-9a-f]{32}}", self._receive_input)
        app.router.add_post(r"/v1/cancel/{id:[0-9a-f]{32}}", self._cancel)
        app.router.add_post(r"/v1/{verb:[a-z_]+}", self._run_verb)
        self._pages.add_routes(app)
        return app

    def leave(self) -> None:
        """End all connections; verbs that write continue until the process ends."""
        self._is_leaving.set()
        for running in self._running.values():
            running.leave()
        for threads in (self._threads, self._staying):
            threads.shutdown(wait=False, cancel_futures=True)
        self._pages.close()
        self._lookups.close()
        self._context.close()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Check the token and protocol, and convert errors to JSON. Only paths are logged, never bodies or headers."""
        try:
            _check_open_body(request)
            if self._pages.has(request):
                if (refusal := await self._lookups.run(lambda: self._pages.check(request))) is not None:
                    return refusal
            elif request.path not in OPEN:
                token = await self._lookups.run(lambda: self._authenticate(request))
                if token is None:
                    return make_refusal(UNKNOWN_TOKEN, 401)
                request[TOKEN] = token
                _check_protocol(request)
            answer: web.StreamResponse = await handler(request)
        except BrokerError as error:
            answer = make_refusal(error)
        except web.HTTPException as error:
            answer = make_refusal(UsageError(f"{request.method} {request.path}: {error.reason.lower()}"), error.status)
        except (ConnectionResetError, asyncio.CancelledError):
            raise
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            answer = make_refusal(BrokerError("bug in the server", hints=["see the server's log"]), 500)
        if not answer.prepared:
            answer.headers["X-Content-Type-Options"] = "nosniff"
            answer.headers["Cache-Control"] = "no-store"
        return answer

    def _authenticate(self, request: web.Request) -> Token | None:
        proxy = self._policy.proxy
        if proxy is not None and len(request.headers.getall(proxy.header, ())) == 1:
            # Of several lines, some could be the client's.
            is_clear = len(request.headers.getall(proxy.projects.groups_header, ())) <= 1
            return proxy.find_user(request.remote, request.headers) if is_clear else None
        kind, _, value = request.headers.get("Authorization", "").partition(" ")
        return find_token(self._lookups.context.store, value.strip()) if kind.lower() == "bearer" else None

    async def _show_health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _show_readiness(self, request: web.Request) -> web.Response:
        """Respond with 200 if the store can be read, else 503."""
        await self._lookups.run(lambda: self._lookups.context.store.jobs.count())
        return web.json_response({"status": "ready"})

    async def _show_api(self, request: web.Request) -> web.Response:
        return web.json_response(describe_api())

    async def _shake_hands(self, request: web.Request) -> web.Response:
        token = request[TOKEN]
        return web.json_response(
            {"version": __version__, "protocol": PROTOCOL, "user": token.user, "role": token.role.value}
        )

    async def _begin_login(self, request: web.Request) -> web.Response:
        return web.json_response(encode(await self._login.begin()))

    async def _finish_login(self, request: web.Request) -> web.Response:
        try:
            identity, value = await self._login.finish(await _read_object(request))
        except AuthError as error:
            return make_refusal(error, 401)
        return web.json_response({"user": identity.user, "role": identity.role.value, "token": value})

    async def _find_files(self, request: web.Request) -> web.Response:
        return web.json_response({"is_known": self._files.has(request.match_info["digest"])})

    async def _receive_files(self, request: web.Request) -> web.Response:
        if not has_role(request[TOKEN], Role.USER):
            raise DeniedError("sending files requires the role `user`")
        digest = request.match_info["digest"]
        assert re.fullmatch(DIGEST, digest)
        await self._files.receive(digest, request.content.iter_chunked(2**20), name=secrets.token_hex(8))
        return web.json_response({"is_known": True})

    async def _answer(self, request: web.Request) -> web.Response:
        running = self._running.get(request.match_info["id"])
        if running is None:
            raise UsageError("this question is no longer open")
        if running.user != request[TOKEN].user:
            raise DeniedError("this request belongs to another user")
        running.answer(is_accepted=(await _read_object(request)).get("is_accepted") is True)
        return web.json_response({})

    async def _receive_input(self, request: web.Request) -> web.Response:
        """Pass keys and the size of a terminal to a shell; `is_accepted` is False if the shell does not read them."""
        running = self._running.get(request.match_info["id"])
        if not has_role(request[TOKEN], Role.USER):  # another token of the same user
            raise DeniedError("typing in a shell requires the role `user`")
        if running is None:
            raise UsageError("this shell has ended")
        if running.user != request[TOKEN].user:
            raise DeniedError("this request belongs to another user")
        given = decode(await _read_object(request), ShellInput)
        return web.json_response({"is_accepted": running.put_input(given.read(), given.size)})

    async def _cancel(self, request: web.Request) -> web.Response:
        """Interrupt a verb, as Ctrl-C would; `is_running` is False once it has ended."""
        running = self._running.get(request.match_info["id"])
        if running is not None:
            if running.user != request[TOKEN].user:
                raise DeniedError("this request belongs to another user")
            await running.cancel()
        return web.json_response({"is_running": running is not None and not running.has_ended})

    async def _run_verb(self, request: web.Request) -> web.StreamResponse:
        verb = VERBS.get(request.match_info["verb"])
        if verb is None:
            raise UsageError(f"unknown verb `{request.match_info['verb']}`", hints=["see `/openapi.json`"])
        check_role(request[TOKEN], verb)
        wanted = self._read_request(verb, await _read_object(request), request[TOKEN])
        async with self._start(wanted, is_agreeing=request.query.get("yes") == "true") as running:
            if LINES in request.headers.get("Accept", ""):
                return await self._stream(request, running)
            return await collect(request, running, beat_s=BEAT_S)

    @asynccontextmanager
    async def _start(self, wanted: VerbRequest, *, is_agreeing: bool) -> AsyncIterator[RunningVerb]:
        running = RunningVerb(wanted, home=self._home, policy=self._policy, is_agreeing=is_agreeing)
        self._running[wanted.id] = running
        threads = self._staying if wanted.verb.name in STAYING else self._threads
        asyncio.get_running_loop().run_in_executor(threads, running.run)
        try:
            yield running
        finally:
            running.leave()
            del self._running[wanted.id]

    async def _run_for_page(self, token: Token, name: str, arguments: Mapping[str, Any]) -> object:
        """Run a verb to completion for a user of the pages. Raises BrokerError."""
        verb = VERBS[name]
        signature = read_signature(verb.function)
        wanted = VerbRequest(id=secrets.token_hex(16), verb=verb, signature=signature, arguments=arguments, token=token)
        async with self._start(wanted, is_agreeing=False) as running:
            while True:
                frame = await running.next_frame(BEAT_S) or {}
                if "error" in frame:
                    raise decode_error(frame["error"])
                if "result" in frame:
                    return decode(frame["result"], signature.result)

    def _read_request(self, verb: Verb, body: dict[str, Any], token: Token) -> VerbRequest:
        """Decode the arguments. Raises InvalidRequestError for a missing, unknown or invalid argument."""
        signature = read_signature(verb.function)
        if unknown := sorted(set(body) - set(signature.arguments)):
            raise InvalidRequestError(f"`{verb.name}` has no argument `{unknown[0]}`")
        decoded = {name: decode(value, signature.arguments[name]) for name, value in body.items()}
        for name, value in decoded.items():
            check_fields(body[name], value, name)
        arguments = {name: self._localize(value) for name, value in decoded.items()}
        if missing := sorted(read_required(verb) - set(arguments)):
            raise InvalidRequestError(f"`{verb.name}` requires the argument `{missing[0]}`")
        return VerbRequest(id=secrets.token_hex(16), verb=verb, signature=signature, arguments=arguments, token=token)

    def _localize(self, value: Any) -> Any:
        """Check tasks like those from a file, and point them to the uploaded files."""
        from broker.task.checking import check_task

        if isinstance(value, Task):
            return self._files.localize(check_task(value))
        if isinstance(value, SweepRequest):
            return replace(value, task=self._localize(value.task))
        if isinstance(value, MapRequest):
            checked = replace(value, task=check_task(value.task))
            return self._files.localize_map(checked, may_use_files=self._policy.has_local_cloud)
        if isinstance(value, tuple) and value and isinstance(value[0], Task):
            return tuple(self._localize(each) for each in value)
        return value

    async def _stream(self, request: web.Request, running: RunningVerb) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": LINES, "Cache-Control": "no-store"})
        await answer.prepare(request)
        is_over = False
        while not is_over and not self._is_leaving.is_set():
            frame = await running.next_frame(BEAT_S)
            await answer.write(b"\n" if frame is None else json.dumps(frame).encode() + b"\n")
            is_over = frame is not None and ("result" in frame or "error" in frame)
        return answer


def read_required(verb: Verb) -> set[str]:
    """Return the arguments of a verb that have no default."""
    import inspect

    parameters = inspect.signature(verb.function).parameters.values()
    required = {each.name for each in parameters if each.default is inspect.Parameter.empty}
    return required & set(read_signature(verb.function).arguments)


def _check_open_body(request: web.Request) -> None:
    """Raise InvalidRequestError for a long login: it would be kept in memory before anyone is authenticated."""
    if request.path in (LOGIN, PAGE_LOGIN) and request.can_read_body:
        length = request.content_length
        if length is None or length > OPEN_BODY_MAX:
            raise InvalidRequestError(f"the body of a login has a stated length of at most {OPEN_BODY_MAX} bytes")


def _check_protocol(request: web.Request) -> None:
    """Raise UsageError for another protocol version; requests without the header are not from `broker`."""
    given = request.headers.get(HEADER, str(PROTOCOL))
    if given != str(PROTOCOL):
        older = "client" if re.fullmatch("[0-9]{1,9}", given) and int(given) < PROTOCOL else "server"
        raise UsageError(
            f"the client speaks protocol {given}, this server ({__version__}) speaks {PROTOCOL}",
            hints=[f"upgrade the {older}: `pip install .` in an up-to-date clone"],
        )


async def _read_object(request: web.Request) -> dict[str, Any]:
    text = await request.read()
    try:
        found = json.loads(text or b"{}", parse_int=_read_integer)
        json.dumps(found, ensure_ascii=False).encode()  # a lone surrogate can be neither stored nor shown
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise InvalidRequestError("the body must be a JSON object of valid Unicode text, with integers of 64 bits")
    return found


def _read_integer(text: str) -> int:
    """Read an integer that the store can hold. Raises ValueError."""
    value = int(text)
    if not -(2**63) <= value < 2**63:
        raise ValueError(text)
    return value
