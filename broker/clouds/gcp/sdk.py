"""Google's client library: imported in a background thread, called in a bounded number of threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, TypeVar
from urllib.parse import urlsplit

from broker.clouds.gcp.errors import translate
from broker.clouds.gcp.login import Login
from broker.clouds.tape import Exchange, Listener

THREADS_MAX = 16
TIMEOUT_S = 30.0  # per response; an operation's `wait` holds the connection for up to two minutes
WAIT_TIMEOUT_S = 150.0
UNREACHABLE = "UNREACHABLE"  # warning for a zone that did not respond to an aggregated list

Result = TypeVar("Result")


def listen(session: Any, listener: Listener) -> None:
    """Report each response of a `requests` session to `listener`."""

    def note(response: Any, **_: Any) -> None:
        request, url = response.request, urlsplit(response.request.url)
        body = request.body.decode(errors="replace") if isinstance(request.body, bytes) else request.body or ""
        listener(
            Exchange(
                service=url.hostname or "",
                operation=f"{request.method} {url.path}{f'?{url.query}' if url.query else ''}",
                request=body,
                status=response.status_code,
                answer=response.text,
                took_s=response.elapsed.total_seconds(),
            )
        )

    session.hooks["response"].append(lambda response, *_, **more: note(response))


def allow_partial_lists(session: Any) -> None:
    """Ask for partial success of lists over all zones: without it, one zone without an answer fails the whole list.

    Google recommends the parameter in the description of each such method, which the library's messages lack (1.57).
    """
    send = session.send

    def send_allowing(request: Any, **settings: Any) -> Any:
        if "/aggregated/" in urlsplit(request.url).path:
            request.prepare_url(request.url, {"returnPartialSuccess": "true"})
        return send(request, **settings)

    session.send = send_allowing


def read_scopes(pages: Iterable[Any]) -> tuple[list[tuple[str, Any]], frozenset[str]]:
    """Return the scopes of an aggregated list with their items, and the names of those that did not respond."""
    scopes: list[tuple[str, Any]] = []
    unseen: set[str] = set()
    for page in pages:
        unseen.update(page.unreachables)
        scopes += page.items.items()
    unseen.update(scope for scope, scoped in scopes if scoped.warning.code == UNREACHABLE)
    return scopes, frozenset(scope.rpartition("/")[2] for scope in unseen)


class Clients:
    """One client per resource, created on first use. `types` is the module with the messages."""

    def __init__(self, login: Login, listener: Listener | None = None) -> None:
        from google.cloud import compute_v1

        self.types: Any = compute_v1
        self.login = login
        self._listener = listener
        self._lock = threading.Lock()
        self._made: dict[str, Any] = {}

    @cached_property
    def credentials(self) -> Any:
        """Credentials of the login, loaded once; anonymous for a fake endpoint."""
        import google.auth
        from google.auth.credentials import AnonymousCredentials

        if self.login.endpoint is not None:
            return AnonymousCredentials()  # type: ignore[no-untyped-call]
        return google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"])[0]

    def get(self, resource: str) -> Any:
        """Return the client of a resource, by the first half of its class name: "Instances"."""
        from google.api_core.client_options import ClientOptions

        with self._lock:
            if resource not in self._made:
                make = getattr(self.types, f"{resource}Client")
                options = ClientOptions(api_endpoint=self.login.compute_url.removeprefix("https://"))
                made = self._made[resource] = make(credentials=self.credentials, client_options=options)
                allow_partial_lists(made.transport._session)
                if self._listener is not None:
                    listen(made.transport._session, self._listener)
            return self._made[resource]

    @cached_property
    def session(self) -> Any:
        """Return a session for the few calls that Compute Engine itself does not serve."""
        from google.auth.transport.requests import AuthorizedSession

        session = AuthorizedSession(self.credentials)  # type: ignore[no-untyped-call]
        if self._listener is not None:
            listen(session, self._listener)
        return session


class Sdk:
    """The library as this folder uses it: `await sdk.call(work)` runs `work(clients)` in a thread."""

    def __init__(self, login: Login) -> None:
        self.login = login
        self._pool = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="gcp")
        self._lock = threading.Lock()
        self._clients: Clients | None = None
        self._listener: Listener | None = None

    def observe(self, listener: Listener) -> None:
        """Report all requests and responses to `listener` from now on."""
        with self._lock:
            self._listener = listener
            self._clients = None  # existing clients would not report

    def prepare(self) -> None:
        """Start importing; return at once. The thread is a daemon: it ends with the process."""
        threading.Thread(target=self._load, name="gcp-import", daemon=True).start()

    async def call(self, work: Callable[[Clients], Result], *, does_change: bool = False) -> Result:
        """Call the library. Raises CloudError only; `does_change` makes a lost response an UnknownOutcomeError."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._act, work, does_change)

    def _act(self, work: Callable[[Clients], Result], does_change: bool) -> Result:
        clients = self._load()
        from google.auth.exceptions import GoogleAuthError

        try:
            return work(clients)
        except Exception as error:  # the edge of Google's library: all its exceptions are translated or re-raised
            cloud_error = translate(error, does_change=does_change)
            if cloud_error is None:
                raise
            if isinstance(error, GoogleAuthError):
                self._forget(clients)
            raise cloud_error from error

    def _forget(self, clients: Clients) -> None:
        """Read the login again for the next call: the user may have renewed it, and the library reads it once."""
        with self._lock:
            if self._clients is clients:
                self._clients = None

    def _load(self) -> Clients:
        with self._lock:
            if self._clients is None:
                self._clients = Clients(self.login, self._listener)
            return self._clients
