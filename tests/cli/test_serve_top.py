"""`broker serve top`: the text of its view, at 80 columns, and its figures."""

from __future__ import annotations

from broker.app.gateways import READY
from broker.app.service_figures import find_usd_per_million
from broker.app.services import ReplicaLine, ServiceLine
from broker.cli.serve_top import describe_service, list_lines
from broker.serve.files import Load, LoadWindow, ReplicaLoad
from broker.types import Replica, Service

WINDOW = LoadWindow(
    requests=120, errors=1, qps=2.0, prompt_tokens_s=400.0, completion_tokens_s=100.0,
    ttft_p50_s=0.12, ttft_p95_s=0.4, tpot_p50_s=0.021, tpot_p95_s=0.05,
)  # fmt: skip


def make_line(window: LoadWindow = WINDOW) -> ServiceLine:
    replica = Replica(service="llm", number=1, version=3, job_id=7, port=8000, created_s=0.0)
    load = Load(
        generation=1, time_s=0.0, pid=1, in_flight=5, window=window,
        replicas={1: ReplicaLoad(is_ready=True, in_flight=5, since_s=0.0, window=window)},
    )  # fmt: skip
    row = ReplicaLine(
        replica=replica, status=READY, place="aws/us-east-1a spot", usd_hour=1.8, in_flight=5, error=""
    )  # fmt: skip
    service = Service(name="llm", uid="u", version=3, host="127.0.0.1", port=30001, created_s=0.0, wanted=1)
    return ServiceLine(service=service, status=READY, replicas=(row,), load=load, paid_usd=0.0)


def test_view_fits_80_columns_and_states_rates_latency_and_cost() -> None:
    lines = list_lines([make_line()])
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 80, text
    for figure in (
        "2.0 requests/s",
        "5 in flight",
        "120ms (p95 400ms)",
        "21ms (p95 50ms)",
        "1.00 USD per million",
        "1 error",
    ):
        assert figure in text, text


def test_cost_per_million_tokens_is_undefined_without_tokens() -> None:
    assert find_usd_per_million(1.8, WINDOW) == 1.0
    assert describe_service(make_line(LoadWindow()))["usd_per_million_tokens"] is None
    assert "no tokens in the last minute" in "\n".join(list_lines([make_line(LoadWindow())]))
