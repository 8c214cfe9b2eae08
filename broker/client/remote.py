"""The session of a logged-in user: each verb is a request to the server, and its callbacks run here.

A connection that breaks while output is followed is reopened, and continues at the last offset. One that only waits,
without a time limit, is reopened, too. Other verbs are not repeated, because the server may have done their work.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import IO, Any, Concatenate, ParamSpec, TypeVar, cast

from broker import __version__
from broker.app.clusters import LogChunk
from broker.app.container import Context
from broker.app.mapping import MapRequest
from broker.app.sweeping import SweepRequest
from broker.client.files import upload_files
from broker.client.login import TIMEOUT_S, ServerLogin, connect, read_login
from broker.client.wire import (
    HEADER,
    INTERRUPTIBLE,
    LINES,
    PROTOCOL,
    Signature,
    decode,
    decode_error,
    encode,
    find_verb,
    read_signature,
)
from broker.clock import Clock, SystemClock
from broker.errors import AuthError, BrokerError, TransientError, UnknownOutcomeError
from broker.frozen import frozen
from broker.state.people import Role
from broker.types import Task

P = ParamSpec("P")
T = TypeVar("T")
RETRIES_MAX = 5  # consecutive, after an error of the verb that follows output
RETRY_S = 1.0
LOST_S_MAX = 120.0  # for a server to come back: an upgrade stops it, perhaps migrates its state, and starts it
WAITING = ("wait_for_job", "wait_for_service")  # verbs that only wait, perhaps for days
UNPACK_S_MAX = 1800.0  # for the server to unpack files, during which it sends nothing


class RemoteSession:
    """Runs verbs on the server of a login.

    Raises the verb's own errors, AuthError, TransientError, UnknownOutcomeError.
    """

    clock: Clock

    def __init__(
        self, login: ServerLogin, *, on_note: Callable[[str], None] = lambda text: None, is_logged_in: bool = True
    ) -> None:
        self._login = login
        self._is_logged_in = is_logged_in  # `broker logout` would remove this login
        self._note = on_note
        self._is_lost = False  # the newest verb lost its connection, or never had one
        self.request_id = ""  # of the newest verb on the server; empty until it has begun
        self.clock = SystemClock()

    @classmethod
    def open(cls, path: Path, *, on_note: Callable[[str], None]) -> RemoteSession:
        """Read the login from a file. Raises StateError if it is damaged."""
        return cls(read_login(path), on_note=on_note)

    def call(self, verb: Callable[Concatenate[Context, P], T], *arguments: P.args, **named: P.kwargs) -> T:
        """Send the verb to the server, and run its callbacks here. Raises the server's error with its class."""
        assert not arguments, "verbs take their arguments by name"
        signature = read_signature(verb)
        callbacks = {name: cast("Callable[[Any], None]", named[name]) for name in signature.callbacks}
        values = {name: value for name, value in named.items() if name in signature.arguments}
        body = {name: encode(self._upload(value), is_argument=True) for name, value in values.items()}
        name = find_verb(verb).name
        if "on_chunk" in callbacks or (name in WAITING and not body.get("timeout_s")):
            return cast("T", self._follow(name, body, signature, callbacks))
        return cast("T", self._run(name, body, signature, callbacks))

    def _upload(self, value: object) -> object:
        """Send the files of tasks in advance, each only if the server lacks it."""
        if isinstance(value, Task):
            return upload_files(value, self.send_file, note=self._note)
        if isinstance(value, MapRequest | SweepRequest):
            return replace(value, task=upload_files(value.task, self.send_file, note=self._note))
        if isinstance(value, tuple) and value and isinstance(value[0], Task):
            return tuple(upload_files(each, self.send_file, note=self._note) for each in value)
        return value

    def send_file(self, digest: str, archive: IO[bytes]) -> None:
        """Send an archive of files unless the server has it. Raises BrokerError."""
        path = f"/v1/files/{digest}"
        if not self.request("GET", path)["is_known"]:
            self.request("PUT", path, archive, timeout_s=UNPACK_S_MAX)

    def _follow(
        self, name: str, body: dict[str, Any], signature: Signature, callbacks: Mapping[str, Callable[[Any], None]]
    ) -> object:
        """Follow output, or wait, over any number of connections; continue at the offset of the last received lines."""
        failures, has_begun = 0, False
        lost_s = self.clock.now_s()  # since when the server has been away

        def pass_on(chunk: LogChunk) -> None:
            nonlocal failures
            failures = 0
            body["offset"] = chunk.offset
            callbacks["on_chunk"](chunk)

        own = {**callbacks, "on_chunk": pass_on} if "on_chunk" in callbacks else callbacks
        while True:
            try:
                return self._run(name, body, signature, own)
            except (UnknownOutcomeError, TransientError):
                if not self._is_lost and name in WAITING:
                    raise
                failures += 1
                if self.request_id:
                    has_begun, lost_s = True, self.clock.now_s()
                is_coming_back = has_begun and self._is_lost and 0.0 <= self.clock.now_s() - lost_s < LOST_S_MAX
                if failures > RETRIES_MAX and not is_coming_back:
                    raise
                self._wait()

    def _wait(self) -> None:
        import asyncio

        asyncio.run(self.clock.sleep(RETRY_S))

    def _run(
        self, name: str, body: Mapping[str, Any], signature: Signature, callbacks: Mapping[str, Callable[[Any], None]]
    ) -> object:
        text = json.dumps(body).encode()
        self.request_id, self._is_lost = "", False
        try:
            connection = self._connect()
            try:
                with self._send(connection, "POST", f"/v1/{name}", text, accept=LINES) as answer:
                    for frame in _read_frames(answer):
                        if "error" in frame:
                            raise decode_error(frame["error"])
                        if "result" in frame:
                            return decode(frame["result"], signature.result)
                        self.request_id = str(frame.get("id") or self.request_id)
                        self._handle(frame, signature, callbacks)
            except KeyboardInterrupt:
                self._interrupt(self.request_id, name)
                raise
            finally:
                connection.close()
        except (OSError, HTTPException, ValueError) as error:
            raise self._explain_lost(error) from None
        raise self._explain_lost(HTTPException("the response is incomplete"))

    def _interrupt(self, request_id: str, name: str) -> None:
        """Forward Ctrl-C to a verb that starts something, and wait until it has ended there."""
        if name not in INTERRUPTIBLE or not request_id:
            return
        try:
            if self.request("POST", f"/v1/cancel/{request_id}", b"{}")["is_running"]:
                self._note("the server is still cancelling it; see `broker status`")
        except BrokerError as error:
            self._note(
                f"interrupted, but the server could not be notified ({error.message}) and continues; see "
                "`broker status` and `broker jobs queue`, terminate clusters with `broker down`"
            )

    def _handle(
        self, frame: Mapping[str, Any], signature: Signature, callbacks: Mapping[str, Callable[[Any], None]]
    ) -> None:
        if "note" in frame:
            self._note(str(frame["note"]))
        elif name := frame.get("call"):
            callbacks[name](decode(frame["value"], signature.callbacks[name]))
        elif name := frame.get("ask"):
            path = f"/v1/answers/{frame['id']}"
            try:
                callbacks[name](decode(frame["value"], signature.callbacks[name]))
            except BaseException:
                self.request("POST", path, json.dumps({"is_accepted": False}).encode())
                raise
            self.request("POST", path, json.dumps({"is_accepted": True}).encode())

    def request(
        self, method: str, path: str, body: bytes | IO[bytes] | None = None, *, timeout_s: float = TIMEOUT_S
    ) -> Any:
        """Send one request and return its JSON response. Raises BrokerError, also if it takes longer."""
        try:
            connection = self._connect()
            connection.sock.settimeout(timeout_s)
            try:
                with self._send(connection, method, path, body, accept="application/json") as answer:
                    return json.loads(answer.read())
            finally:
                connection.close()
        except (OSError, HTTPException, ValueError) as error:
            raise self._explain_lost(error) from None

    def post(self, path: str, body: bytes, connection: HTTPConnection | None) -> tuple[HTTPConnection, Any]:
        """POST over a connection, or a new one if it is closed, which stays open for the next request.

        Raises BrokerError.
        """
        try:
            if connection is None or connection.sock is None:
                connection = self._connect()
            answer = self._send(connection, "POST", path, body, accept="application/json")
            return connection, json.loads(answer.read())
        except (OSError, HTTPException, ValueError) as error:
            raise self._explain_lost(error) from None

    def _connect(self) -> HTTPConnection:
        try:
            return connect(self._login)
        except OSError as error:
            self._is_lost = True
            raise TransientError(
                f"the server at {self._login.url} does not respond: {error.strerror or error}",
                hints=[
                    "check that it is running and reachable",
                    *(["work without it: `broker logout`"] if self._is_logged_in else []),
                ],
            ) from None

    def _send(
        self, connection: HTTPConnection, method: str, path: str, body: bytes | IO[bytes] | None, *, accept: str
    ) -> HTTPResponse:
        headers = {
            "Authorization": f"Bearer {self._login.token.value}",
            "Accept": accept,
            "Content-Type": "application/json" if isinstance(body, bytes) else "application/octet-stream",
            HEADER: str(PROTOCOL),
            "User-Agent": f"broker/{__version__}",
        }
        connection.request(method, path, body=body, headers=headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise self._explain_refused(answer)
        return answer

    def _explain_refused(self, answer: HTTPResponse) -> BrokerError:
        try:
            error = json.loads(answer.read())["error"]
            if isinstance(error, Mapping):  # a proxy may answer `{"error": "Forbidden"}`
                return decode_error(error)
        except (ValueError, KeyError, TypeError):
            pass
        message = f"the server at {self._login.url} answered with status {answer.status}"
        if answer.status == 401:
            return AuthError(message, hints=("log in again: `broker login URL --token-file FILE`",))
        return BrokerError(message, hints=["check that the URL belongs to a broker server"])

    def _explain_lost(self, error: Exception) -> BrokerError:
        self._is_lost = True
        return UnknownOutcomeError(
            f"the connection to {self._login.url} was lost: {error}",
            hints=("everything started on the server continues: see `broker status` and `broker jobs queue`",),
        )


def _read_frames(answer: HTTPResponse) -> Iterator[Mapping[str, Any]]:
    while line := answer.readline():
        if line.strip():
            frame: Mapping[str, Any] = json.loads(line)
            yield frame


@frozen
class Handshake:
    """The server's version, and the user and role of the token."""

    version: str
    protocol: int
    user: str
    role: Role


def check_handshake(session: RemoteSession) -> Handshake:
    """Request the token's user from the server.

    Raises AuthError for an invalid token, UsageError for another protocol.
    """
    found: Handshake = decode(session.request("GET", "/v1/handshake"), Handshake)
    return found
