"""A job's trace: what a collector receives, and that a repeated export is the same trace."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from broker.app.tracing import make_trace, parse_headers
from broker.cli.main import main
from broker.errors import UsageError
from broker.jobs.trace_ids import make_traceparent
from broker.types.outcomes import EventKind, make_event
from tests.dashboard.conftest import Story


class Collector(BaseHTTPRequestHandler):
    """Stands for an OTLP/HTTP receiver on the loopback; it refuses what the test says."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.server.received.append((self.path, self.headers["Content-Type"], json.loads(body or b"{}")))  # type: ignore[attr-defined]
        self.server.logins.append(self.headers["Authorization"])  # type: ignore[attr-defined]
        self.send_response(self.server.status)  # type: ignore[attr-defined]
        self.send_header("Location", "/elsewhere")  # of no effect unless the status is a redirect
        self.end_headers()
        self.wfile.write(b"{}")

    do_GET = do_POST  # as a redirected POST arrives

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Any]:
    server: Any = HTTPServer(("127.0.0.1", 0), Collector)
    server.received, server.logins, server.status = [], [], 200
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def list_spans(trace: Any) -> list[dict[str, Any]]:
    (resource,) = trace["resourceSpans"]
    (scope,) = resource["scopeSpans"]
    return list(scope["spans"])


def read_trace(story: Story, job_id: int) -> Any:
    job = story.store.jobs.get(job_id)
    assert job is not None
    return make_trace(job, story.store.events.list(job_id=job_id), now_s=story.now_s)


def test_spans_follow_the_attempts_and_lie_in_their_parents(story: Story) -> None:
    spans = list_spans(read_trace(story, 1))
    names = [span["name"] for span in spans]
    assert names == ["job train", "attempt 1", "start", "run", "teardown", "recovery", "attempt 2", "start", "run"]
    by_id = {span["spanId"]: span for span in spans}
    assert len(by_id) == len(spans) and len({span["traceId"] for span in spans}) == 1
    for span in spans:
        assert len(span["spanId"]) == 16 and len(span["traceId"]) == 32
        assert int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"])
    for span in spans[1:]:
        assert span["parentSpanId"] in by_id
    recovery = spans[5]
    lasted_s = (int(recovery["endTimeUnixNano"]) - int(recovery["startTimeUnixNano"])) / 1e9
    assert lasted_s == pytest.approx(100 + 60, abs=0.01)  # from the loss to the next attempt's program


def test_attributes_have_the_names_and_forms_of_the_standard(story: Story) -> None:
    story.add_event(1, make_event(EventKind.LATE))
    job, attempt, *_ = list_spans(read_trace(story, 1))
    values = {each["key"]: each["value"] for each in attempt["attributes"]}
    assert values["cloud.region"] == {"stringValue": story.store.jobs.list_attempts(1)[0].placement.offer.region}
    assert values["broker.attempt"] == {"intValue": "1"} and values["broker.is_spot"] == {"boolValue": True}
    assert attempt["status"]["code"] == 2 and "preempted" in attempt["status"]["message"]
    assert [each["name"] for each in job["events"]][-1] == "late"


def test_a_repeated_export_is_the_same_trace_and_other_jobs_have_others(story: Story) -> None:
    ids = [[span["spanId"] for span in list_spans(read_trace(story, 1))] for _ in range(2)]
    assert ids[0] == ids[1]
    assert list_spans(read_trace(story, 2))[0]["traceId"] != list_spans(read_trace(story, 1))[0]["traceId"]


def test_a_program_s_spans_hang_below_the_run_of_its_attempt(story: Story) -> None:
    job = story.store.jobs.get(1)
    assert job is not None
    spans = {span["spanId"]: span["name"] for span in list_spans(read_trace(story, 1))}
    _, trace_id, parent, _ = make_traceparent(job, 2).split("-")
    assert spans[parent] == "run" and trace_id == list_spans(read_trace(story, 1))[0]["traceId"]


def test_the_command_sends_and_writes_the_same_trace(
    story: Story, collector: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "Authorization=Bearer%20abc,x-tenant=a")
    file = tmp_path / "trace.json"
    url = f"http://127.0.0.1:{collector.server_address[1]}"
    with pytest.raises(SystemExit, match=r"^0$"):
        main(("jobs", "trace", "2", "--otlp", url, "-o", str(file)))
    ((path, kind, received),) = collector.received
    assert (path, kind) == ("/v1/traces", "application/json") and collector.logins == ["Bearer abc"]
    assert received == json.loads(file.read_text()) and list_spans(received)[0]["status"]["code"] == 2


def test_a_refusal_and_an_invalid_url_are_errors(
    story: Story, collector: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    collector.status = 400
    url = f"http://127.0.0.1:{collector.server_address[1]}/v1/traces"
    for given, reason in (
        (url, "HTTP 400"),
        ("localhost:4318", "http or https URL"),
        ("file:///tmp/x", "http or"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(("jobs", "trace", "1", "--otlp", given))
        assert ended.value.code not in (0, None) and reason in capsys.readouterr().err
    assert [path for path, _, _ in collector.received] == ["/v1/traces"]


def test_a_redirect_is_an_error_and_takes_the_login_nowhere(
    story: Story, collector: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    collector.status = 302
    with pytest.raises(SystemExit):
        main(("jobs", "trace", "1", "--otlp", f"http://127.0.0.1:{collector.server_address[1]}"))
    assert "HTTP 302" in capsys.readouterr().err
    assert [path for path, _, _ in collector.received] == ["/v1/traces"]


def test_a_refused_login_names_the_variable_and_invalid_headers_are_refused(
    story: Story, collector: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    collector.status = 401
    with pytest.raises(SystemExit):
        main(("jobs", "trace", "1", "--otlp", f"http://127.0.0.1:{collector.server_address[1]}"))
    assert "OTEL_EXPORTER_OTLP_HEADERS" in capsys.readouterr().err
    assert parse_headers("") == {} and parse_headers(" a = b=c ,") == {"a": "b=c"}
    for text in ("a b=c", "=c", "a=b%0d%0aInjected: c", "a=%E2%82%AC"):
        with pytest.raises(UsageError, match="OTEL_EXPORTER_OTLP_HEADERS"):
            parse_headers(text)
