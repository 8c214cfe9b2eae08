"""Answers of the API as one JSON object: the result of a verb, or an error with its status."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

from broker import errors
from broker.client.wire import LINES, MESSAGE_MAX, encode_error
from broker.errors import (
    BrokerError,
    DeniedError,
    InvalidRequestError,
    LimitError,
    NoOfferError,
    PolicyError,
    StateError,
    UsageError,
)
from broker.errors import TaskError as InvalidTaskError
from broker.server.running import Frame, RunningVerb

STATUSES: tuple[tuple[type[BrokerError], int], ...] = (
    (DeniedError, 403),
    (LimitError, 403),
    (PolicyError, 403),
    (InvalidRequestError, 400),
    (InvalidTaskError, 422),
    (UsageError, 422),
    (NoOfferError, 409),
    (StateError, 503),
)


async def collect(request: web.Request, running: RunningVerb, *, beat_s: float) -> web.Response:
    """Respond with one object: the result or the error, and the notes. Questions are refused without `?yes=true`.

    It ends when the client has disconnected, which is checked every `beat_s` seconds: a log may be followed for weeks.
    """
    notes: list[str] = []
    calls: dict[str, list[Any]] = {}
    size = 0
    while True:
        frame: Frame | None = await running.next_frame(beat_s)
        if request.transport is None or request.transport.is_closing():
            return web.Response()  # the client is gone; nothing is written before the end, so no write would fail
        if frame is None:
            continue
        if "note" in frame:
            notes.append(frame["note"])
        elif "call" in frame:
            calls.setdefault(frame["call"], []).append(frame["value"])
            size += len(json.dumps(frame["value"]))
            if size > MESSAGE_MAX:  # for example the log of a job that runs for weeks
                return make_refusal(
                    InvalidRequestError(
                        f"the answer is larger than {MESSAGE_MAX // 2**20} MiB",
                        hints=[f"request it in parts, with the header `Accept: {LINES}`"],
                    )
                )
        elif "ask" in frame:
            running.answer(is_accepted=False)
        elif "error" in frame:
            return web.json_response({**frame, "notes": notes}, status=find_status(str(frame["error"]["kind"])))
        elif "result" in frame:
            return web.json_response({**frame, "calls": calls, "notes": notes})


def find_status(kind: str) -> int:
    """Return the HTTP status of an error, by the name of its class."""
    found = getattr(errors, kind, BrokerError)
    return next((status for parent, status in STATUSES if issubclass(found, parent)), 502)


def make_refusal(error: BrokerError, status: int | None = None) -> web.Response:
    """Respond with an error as JSON, by default with the status of its class."""
    return web.json_response({"error": encode_error(error)}, status=status or find_status(type(error).__name__))
