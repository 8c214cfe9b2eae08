"""A job's recorded events as an OpenTelemetry trace in OTLP/JSON: the job, its attempts, and their parts are spans.

Ids are hashes of the job's unique name, so an export can be repeated and replaces the earlier one.
https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from broker.errors import BrokerError, UsageError
from broker.jobs.trace_ids import make_span_id, make_trace_id, name_run
from broker.types import JobStatus
from broker.wording import describe_outcome

if TYPE_CHECKING:
    from broker.state.events import EventRow
    from broker.types import Attempt, Job

PATH = "/v1/traces"  # of an OTLP/HTTP receiver
TIMEOUT_S = 30.0
EVENTS_MAX = 1000  # of one job, the newest
INTERNAL, STATUS_OK, STATUS_ERROR = 1, 1, 2  # numbers of the protocol

HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
HINT = (
    "set `OTEL_EXPORTER_OTLP_HEADERS` to the header that the receiver requires, such as `Authorization=Bearer%20TOKEN`"
)

Json = dict[str, object]


def make_trace(job: Job, events: Sequence[EventRow], *, now_s: float) -> Json:
    """Make the trace of a job; spans that have not ended end now."""
    end_s = job.ended_s if job.ended_s is not None else now_s
    root = _make_span(job, "job", f"job {job.name}", job.submitted_s, end_s, parent=None)
    root["attributes"] = list_attributes(
        {"broker.job.id": job.id, "broker.job.name": job.name, "broker.job.status": job.status.value}
    )
    root["events"] = [_make_event(each) for each in events[-EVENTS_MAX:]]
    root["status"] = _make_status(job)
    spans = [root]
    for attempt, after in zip_longest(job.attempts, job.attempts[1:]):
        spans += _list_attempt_spans(job, attempt, after, end_s=end_s)
    scope = {"scope": {"name": "intercloud-broker"}, "spans": spans}
    resource = {"attributes": list_attributes({"service.name": "broker", "service.instance.id": job.stem})}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]}


def _list_attempt_spans(job: Job, attempt: Attempt, after: Attempt | None, *, end_s: float) -> Iterator[Json]:
    """Yield the attempt with the start of its machines, its run, and its teardown; and the recovery after it."""
    offer, key = attempt.placement.offer, f"attempt {attempt.number}"
    stop_s = attempt.ended_s if attempt.ended_s is not None else end_s
    whole = _make_span(job, key, key, attempt.started_s, stop_s, parent="job")
    whole["attributes"] = list_attributes(
        {
            "cloud.provider": offer.cloud,
            "cloud.region": offer.region,
            "cloud.availability_zone": offer.zone,
            "host.type": offer.instance_type,
            "broker.attempt": attempt.number,
            "broker.is_spot": attempt.placement.is_spot,
            "broker.node_count": attempt.placement.node_count,
            "broker.usd_per_hour": attempt.placement.usd_hour,
            "broker.outcome": attempt.outcome.kind.value if attempt.outcome else None,
        }
    )
    if attempt.outcome is not None and attempt.outcome.kind.value != "succeeded":
        whole["status"] = {"code": STATUS_ERROR, "message": describe_outcome(attempt.outcome)}
    yield whole
    running_s, lost_s = attempt.running_s, attempt.lost_s
    yield _make_span(job, f"{key} start", "start", attempt.started_s, min(running_s or stop_s, stop_s), parent=key)
    if running_s is not None:
        yield _make_span(job, name_run(attempt.number), "run", running_s, min(lost_s or stop_s, stop_s), parent=key)
    if lost_s is not None:
        yield _make_span(job, f"{key} teardown", "teardown", lost_s, stop_s, parent=key)
        resumed_s = None if after is None else after.resumed_s or after.running_s
        if after is not None:
            yield _make_span(job, f"{key} recovery", "recovery", lost_s, resumed_s or end_s, parent="job")


def _make_span(job: Job, key: str, name: str, begin_s: float, end_s: float, *, parent: str | None) -> Json:
    span: Json = {
        "traceId": make_trace_id(job),
        "spanId": make_span_id(job, key),
        "name": name,
        "kind": INTERNAL,
        "startTimeUnixNano": _to_nanoseconds(begin_s),
        "endTimeUnixNano": _to_nanoseconds(max(begin_s, end_s)),
    }
    return span if parent is None else {**span, "parentSpanId": make_span_id(job, parent)}


def _make_event(event: EventRow) -> Json:
    values = {name: value for name, value in event.data.items() if value is not None}
    return {
        "timeUnixNano": _to_nanoseconds(event.time_s),
        "name": event.kind.value,
        "attributes": list_attributes({"message": event.message, **{f"broker.{k}": v for k, v in values.items()}}),
    }


def _make_status(job: Job) -> Json:
    if job.status is JobStatus.SUCCEEDED:
        return {"code": STATUS_OK}
    return {"code": STATUS_ERROR, "message": job.failure or job.status.value} if job.status.is_terminal else {}


def list_attributes(values: Mapping[str, object]) -> list[Json]:
    """List attributes in the protocol's form; None is left out, and lists and mappings become JSON text."""
    return [{"key": key, "value": _make_value(value)} for key, value in values.items() if value is not None]


def _make_value(value: object) -> Json:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}  # 64-bit integers are text in the protocol's JSON
        case float():
            return {"doubleValue": value}
        case str():
            return {"stringValue": value}
        case _:
            return {"stringValue": json.dumps(value, ensure_ascii=False, default=str)}


def _to_nanoseconds(time_s: float) -> str:
    return str(round(max(0.0, time_s) * 1e6) * 1000)


def parse_headers(text: str) -> Mapping[str, str]:
    """Parse `OTEL_EXPORTER_OTLP_HEADERS`, such as `api-key=abc,x-tenant=a%20b`. Raises UsageError.

    https://opentelemetry.io/docs/specs/otel/protocol/exporter/#specifying-headers-via-environment-variables
    """
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    headers = {name.strip(): unquote(value.strip()) for name, _, value in pairs}
    if not all(HEADER.fullmatch(name) and value.isascii() and value.isprintable() for name, value in headers.items()):
        raise UsageError("`OTEL_EXPORTER_OTLP_HEADERS` must be NAME=VALUE pairs, separated by commas")
    return headers


def send_trace(trace: Json, url: str, *, headers: Mapping[str, str]) -> None:
    """Send a trace to an OTLP/HTTP receiver at `url`; `headers` contain its login.

    Raises UsageError for an invalid URL, BrokerError on failure.
    """
    import http.client
    import urllib.error
    import urllib.request

    from broker.redirects import NoRedirect

    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"`--otlp` must be an http or https URL, not `{url}`", hints=["such as http://localhost:4318"])
    target = url if parts.path.endswith(PATH) else url.rstrip("/") + PATH
    own = {"Content-Type": "application/json", "User-Agent": "intercloud-broker"}
    request = urllib.request.Request(target, data=json.dumps(trace).encode(), headers={**headers, **own})
    try:
        with urllib.request.build_opener(NoRedirect).open(request, timeout=TIMEOUT_S) as answer:
            answer.read(65536)
    except urllib.error.HTTPError as error:
        raise BrokerError(
            f"{target} refused the trace: HTTP {error.code} {error.reason}",
            hints=[HINT if error.code in (401, 403) else "check the URL of the receiver"],
        ) from None
    except (urllib.error.URLError, TimeoutError, ConnectionError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise BrokerError(
            f"cannot reach {target}: {reason}", hints=["start the receiver, or write a file with `-o trace.json`"]
        ) from None
