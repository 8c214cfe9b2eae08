"""Pair botocore's events into exchanges: the request just before it is sent and its response, in the same thread."""

from __future__ import annotations

import threading
import time
from typing import Any

from broker.clouds.tape import Exchange, Listener


def listen(session: Any, listener: Listener) -> None:
    """Report each response of any client of this session to `listener`; calls without a response are not reported."""
    sent = threading.local()

    def note_region(context: Any, **_: Any) -> None:
        sent.region = context.get("client_region") or ""

    def note_request(request: Any, event_name: str, **_: Any) -> None:
        service, operation = event_name.split(".")[1:]
        sent.what = (service, operation, _read(request.body), time.monotonic())

    def note_answer(response_dict: Any, **_: Any) -> None:
        service, operation, body, begun_s = sent.what
        listener(
            Exchange(
                service=service,
                operation=operation,
                region=sent.region,
                request=body,
                status=response_dict["status_code"],
                answer=_read(response_dict["body"]),
                took_s=time.monotonic() - begun_s,
            )
        )

    session.events.register("before-call", note_region)
    session.events.register("before-send", note_request)
    session.events.register("before-parse", note_answer)


def _read(body: Any) -> str:
    return body.decode(errors="replace") if isinstance(body, bytes) else str(body or "")
