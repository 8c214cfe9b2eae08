"""The responses of the last minute: running sums equal those computed from all responses."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.serve import metering
from broker.serve.files import FIRST_TOKEN_BOUNDS_S, LoadWindow
from broker.serve.metering import LoadMeter, ResponseMeter, ResponseSample


class HeldClock:
    def __init__(self) -> None:
        self.time_s = 1000.0

    def now_s(self) -> float:
        return self.time_s

    async def sleep(self, duration_s: float) -> None:
        raise AssertionError


def test_prompt_of_a_client_that_left_counts_if_a_replica_has_it() -> None:
    meter = ResponseMeter(clock=HeldClock())
    meter.leave()  # while it waited for a replica
    assert meter.end(prompt_bytes=400).prompt_tokens == 0
    meter.is_sent = True
    assert meter.end(prompt_bytes=400).prompt_tokens == 0, "the client stays"
    meter.leave()
    assert meter.end(prompt_bytes=400).prompt_tokens == 100


def stream(tokens: int, *, usage: bool = False) -> ResponseSample:
    """Send a token after half a second, and each further one after a quarter."""
    clock = HeldClock()
    meter = ResponseMeter(clock=clock)
    meter.begin(1, "text/event-stream")
    clock.time_s += 0.5
    for number in range(tokens):
        clock.time_s += 0.25 * (number > 0)
        meter.feed(b'data: {"choices":[{"text":"x"}]}\n\n')
    if usage:
        clock.time_s += 9.0  # it comes after the last token, and is none
        meter.feed(b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":5}}\n\n')
    meter.feed(b"data: [DONE]\n\n")
    return meter.end(status=200)


@pytest.mark.parametrize("usage", [False, True])
def test_time_per_token_is_between_the_tokens_and_the_first_has_its_own(usage: bool) -> None:
    sample = stream(5, usage=usage)
    assert (sample.ttft_s, sample.tpot_s, sample.completion_tokens) == (0.5, 0.25, 5)
    assert sample.prompt_tokens == (7 if usage else 0)
    assert sample.took_s == pytest.approx(1.5 + 9.0 * usage)


def test_one_token_has_no_time_between_tokens() -> None:
    assert (stream(1).ttft_s, stream(1).tpot_s) == (0.5, None)
    assert (stream(0).ttft_s, stream(0).tpot_s) == (None, None)


@pytest.mark.parametrize(("status", "is_error"), [(200, False), (404, False), (429, False), (500, True), (503, True)])
def test_errors_are_those_of_the_server(status: int, is_error: bool) -> None:
    clock = HeldClock()
    meter = LoadMeter(clock=clock)
    meter.add(ResponseMeter(clock=clock).end(status=status))
    assert meter.describe()[0].errors == int(is_error)
    assert meter.totals.describe().responses == {str(status): 1}


def test_client_that_leaves_is_no_error_and_an_open_websocket_got_its_response() -> None:
    meter = ResponseMeter(clock=HeldClock())
    assert meter.end().status == 499
    meter.is_switched = True
    assert meter.end().status == 101


def test_body_that_is_nested_without_an_end_has_no_usage() -> None:
    meter = ResponseMeter(clock=HeldClock())
    meter.begin(1, "application/json")
    meter.feed(b"[" * 50_000)
    assert meter.end(prompt_bytes=400).prompt_tokens == 0


def test_usage_of_a_long_response_is_found_without_its_other_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    """Building the numbers of embeddings held up all requests."""
    body = json.dumps({"data": [{"embedding": [0.25] * 1024}] * 20, "usage": {"prompt_tokens": 7}}).encode()
    with_nan = body.replace(b"0.25", b"NaN")
    assert metering.find_usage(with_nan) == {"prompt_tokens": 7}
    monkeypatch.setattr(metering, "json", None)
    assert metering.find_usage(body) == {"prompt_tokens": 7}


@pytest.mark.parametrize(
    "events",
    [
        ['{"usage": {"input_tokens": 7, "output_tokens": 3}}'],
        ['{"response": {"usage": null}}', '{"response": {"usage": {"input_tokens": 7, "output_tokens": 3}}}'],
        [
            '{"message": {"usage": {"input_tokens": 7, "output_tokens": 1}}}',
            '{"delta": {}}',
            '{"usage": {"output_tokens": 3}}',
        ],
    ],
    ids=["whole", "Responses API", "Messages API"],
)
@pytest.mark.parametrize("more", ["", ', "logprob": -Infinity'], ids=["", "infinite"])
def test_tokens_count_by_whatever_name_the_api_gives_them(events: list[str], more: str) -> None:
    """Otherwise, a key without tokens left could continue with another API of the same engine."""
    meter = ResponseMeter(clock=HeldClock())
    meter.begin(1, "text/event-stream" if len(events) > 1 else "application/json")
    for event in events:
        text = event[:-1] + more + "}"
        meter.feed(f"data: {text}\n\n".encode() if len(events) > 1 else text.encode())
    sample = meter.end(status=200, prompt_bytes=4000)
    assert (sample.prompt_tokens, sample.completion_tokens) == (7, 3)


def test_absurd_number_of_tokens_is_not_counted() -> None:
    """It would stay in the totals for good, and be too large for the numbers of `/metrics`."""
    meter = ResponseMeter(clock=HeldClock())
    meter.begin(1, "application/json")
    meter.feed(b'{"usage": {"prompt_tokens": 1%s, "completion_tokens": 1}}' % (b"0" * 400))
    sample = meter.end(status=200)
    assert (sample.prompt_tokens, sample.completion_tokens) == (0, 0)


times = st.none() | st.sampled_from([0.1, 0.2, 0.3])
samples = st.tuples(
    st.sampled_from([0.0, 1.0, 30.0, 61.0]),
    st.integers(1, 3),
    st.sampled_from([200, 502]),
    st.integers(0, 9),
    times,
    times,
)


def compute(kept: list[ResponseSample], span_s: float) -> LoadWindow:
    def rank(values: list[float], share: float) -> float | None:
        return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else None

    first = [each.ttft_s for each in kept if each.ttft_s is not None]
    later = [each.tpot_s for each in kept if each.tpot_s is not None]
    return LoadWindow(
        requests=len(kept),
        errors=sum(each.status >= 500 for each in kept),
        qps=len(kept) / span_s,
        prompt_tokens_s=sum(each.prompt_tokens for each in kept) / span_s,
        completion_tokens_s=sum(each.completion_tokens for each in kept) / span_s,
        ttft_p50_s=rank(first, 0.5), ttft_p95_s=rank(first, 0.95),
        tpot_p50_s=rank(later, 0.5), tpot_p95_s=rank(later, 0.95),
    )  # fmt: skip


@given(drawn=st.lists(samples, max_size=30))
def test_window_equals_the_figures_of_the_responses_of_its_last_minute(drawn: list[tuple[float, ...]]) -> None:
    clock = HeldClock()
    meter = LoadMeter(clock=clock)
    taken = []
    for pause_s, replica, status, tokens, ttft_s, tpot_s in drawn:
        clock.time_s += pause_s
        taken.append(
            ResponseSample(
                end_s=clock.time_s, replica=int(replica), status=int(status), prompt_tokens=int(tokens),
                completion_tokens=2 * int(tokens), ttft_s=ttft_s, tpot_s=tpot_s,
            )
        )  # fmt: skip
        meter.add(taken[-1])
    whole, by_replica = meter.describe()
    kept = [each for each in taken if each.end_s >= clock.time_s - metering.WINDOW_S]
    span_s = max(1.0, min(clock.time_s - 1000.0, metering.WINDOW_S))
    assert whole == compute(kept, span_s)
    numbers = {each.replica for each in kept}
    assert by_replica == {number: compute([e for e in kept if e.replica == number], span_s) for number in numbers}


def test_full_meter_forgets_its_oldest_response() -> None:
    clock = HeldClock()
    meter = LoadMeter(clock=clock)
    for number in range(metering.SAMPLES_MAX + 10):
        meter.add(
            ResponseSample(
                end_s=clock.time_s, replica=number, status=200, prompt_tokens=1, completion_tokens=1, ttft_s=None,
                tpot_s=None,
            )
        )  # fmt: skip
    whole, by_replica = meter.describe()
    assert whole.requests == metering.SAMPLES_MAX and min(by_replica) == 10


def test_response_from_before_the_clock_was_set_back_is_not_of_this_minute() -> None:
    clock = HeldClock()
    clock.time_s = 9_000.0
    meter = LoadMeter(clock=clock)
    for end_s in (9_000.0, 1_000.0):
        clock.time_s = end_s
        meter.add(replace(make_sample(ttft_s=1.0), end_s=end_s))
    assert meter.describe()[0].requests == 1


def make_sample(status: int = 200, **fields: float) -> ResponseSample:
    times: dict[str, float | None] = {"ttft_s": None, "tpot_s": None, **fields}
    return ResponseSample(end_s=0.0, replica=1, status=status, prompt_tokens=5, completion_tokens=2, **times)  # type: ignore[arg-type]


def test_totals_keep_what_has_left_the_window() -> None:
    clock = HeldClock()
    meter = LoadMeter(clock=clock)
    for sample in (make_sample(ttft_s=0.1, took_s=2.0), make_sample(502, took_s=400.0), make_sample(101, took_s=50.0)):
        meter.add(sample)
    clock.time_s += 1000
    assert meter.describe()[0].requests == 0
    totals = meter.totals.describe()
    assert totals.responses == {"200": 1, "502": 1, "101": 1}
    assert (totals.prompt_tokens, totals.completion_tokens) == (15, 6)
    assert dict(zip((*FIRST_TOKEN_BOUNDS_S, "more"), totals.first_token.counts, strict=True))[0.1] == 1
    assert (totals.request.counts[-1], sum(totals.request.counts)) == (1, 2)  # a WebSocket is no response
    assert (totals.first_token.sum_s, totals.request.sum_s) == (0.1, 402.0)


def test_replica_cannot_add_status_codes_without_a_limit() -> None:
    meter = LoadMeter(clock=HeldClock())
    for status in range(100, 1000):
        meter.add(make_sample(status))
    counted = meter.totals.describe().responses
    assert len(counted) <= metering.CODES_MAX + 10 and sum(counted.values()) == 900 and counted["9xx"] == 100
