"""A server on the loopback in a thread, with a token for each role."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from broker.app.container import Context
from broker.client.login import ServerLogin
from broker.client.remote import RemoteSession
from broker.server.context import Policy
from broker.server.serving import Certificate, Listening, serve
from broker.server.tokens import create_token
from broker.state.people import Role
from broker.types import Secret


class Hosted:
    """A running server; `tokens` are by user name: `viewer`, `user`, `other` (a user too) and `admin`."""

    def __init__(self, home: Path, certificate: Certificate | None = None, *, policy: Policy | None = None) -> None:
        self.home = home
        self.context = Context(home)
        roles = {"viewer": Role.VIEWER, "user": Role.USER, "other": Role.USER, "admin": Role.ADMIN}
        self.tokens = {
            user: create_token(self.context.store, user=user, role=role, days=1).value.value
            for user, role in roles.items()
        }
        self._certificate = certificate
        self._policy = policy or Policy(has_controller=False, has_local_cloud=True)
        self._ready = threading.Event()
        self._listening: Listening | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._ready.wait(300)

    def _run(self) -> None:
        async def work() -> None:
            self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
            await serve(
                self.home, host="127.0.0.1", port=0, policy=self._policy,
                certificate=self._certificate, on_ready=self._set_listening, until=self._stopped.wait,
            )  # fmt: skip

        asyncio.run(work())

    def _set_listening(self, listening: Listening) -> None:
        self._listening = listening
        self._ready.set()

    @property
    def listening(self) -> Listening:
        assert self._listening is not None
        return self._listening

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()
        self.context.close()

    def login(self, user: str) -> ServerLogin:
        return ServerLogin(
            url=self.listening.url, token=Secret(value=self.tokens[user]), fingerprint=self.listening.fingerprint
        )

    def open(self, user: str, *, on_note: Callable[[str], None] = lambda text: None) -> RemoteSession:
        return RemoteSession(self.login(user), on_note=on_note)

    def ask(
        self, path: str, body: object = None, *, token: str | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Send a request as any HTTP client would; return the status and the body, read as JSON if it is."""
        data = None if body is None else json.dumps(body).encode()
        sent = {**({"Authorization": f"Bearer {token}"} if token else {}), **(headers or {})}
        try:
            with urlopen(Request(self.listening.url + path, data=data, headers=sent), timeout=300) as answer:
                status, text = answer.status, answer.read().decode()
        except HTTPError as error:
            status, text = error.code, error.read().decode()
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text


@pytest.fixture(scope="module")
def hosted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    hosted = Hosted(tmp_path_factory.mktemp("server"))
    yield hosted
    hosted.stop()
