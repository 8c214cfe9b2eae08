"""Measure responses: tokens, time to the first token, and time per token after it, over the last minute.

Tokens are counted by the engine's `usage`; for a stream without it, by the journal; otherwise, each event counts as
one. Times are those that the client observes, including the time in the balancer.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import msgspec

from broker.clock import Clock
from broker.frozen import frozen
from broker.serve.files import FIRST_TOKEN_BOUNDS_S, REQUEST_BOUNDS_S, DurationCounts, LoadTotals, LoadWindow
from broker.serve.journal import DONE, EventParser, EventTooLongError

WINDOW_S = 60.0
SAMPLES_MAX = 4_000
BODY_BYTES_MAX = 4 << 20  # the usage of a larger response is not read
CODES_MAX = 40  # status codes that are counted one by one; further ones are counted by class, such as `5xx`
CLIENT_GONE = 499  # as nginx logs a request whose client has left
SWITCHED = 101  # a WebSocket: its duration is not that of a response
TOKENS_MAX = 1_000_000_000  # of one response; more is an error of the engine, and would stay in the totals for good
PROMPT_BYTES_PER_TOKEN = 4  # assumed if a response states no usage: about that of English text


@frozen
class ResponseSample:
    """One response that ended. Times are None if it was not a stream, or had one token only."""

    end_s: float
    replica: int
    status: int
    prompt_tokens: int
    completion_tokens: int
    ttft_s: float | None
    tpot_s: float | None
    took_s: float = 0.0  # from the request to the end of the response


class ResponseMeter:
    """Follows one response as it passes."""

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._start_s = clock.now_s()
        self._first_s: float | None = None
        self._last_s = self._start_s
        self._events = 0
        self._is_json = False
        self._parser: EventParser | None = None
        self._body = bytearray()
        self._has_usage = self._is_left = False
        self.is_sent = False  # to a replica, which may have computed the prompt
        self.is_switched = False  # to a WebSocket
        self.replica = 0
        self.prompt_tokens = self.completion_tokens = 0

    def begin(self, replica: int, content_type: str) -> None:
        """Record which replica answers; called again when a response continues on another one."""
        self.replica = replica
        self._parser = EventParser() if content_type == "text/event-stream" else None
        self._body.clear()
        self._is_json = content_type == "application/json"

    def feed(self, data: bytes) -> None:
        """Read a part of the body."""
        if self._parser is not None:
            try:
                events = self._parser.feed(data)
            except EventTooLongError:
                self._parser = None
                return
            for event in events:
                self.take_event(event)
        elif self._is_json and len(self._body) <= BODY_BYTES_MAX:
            self._body += data

    def take_event(self, event: str) -> None:
        """Read an event of a stream."""
        if event == DONE:
            return
        if '"usage"' in event:
            self._read_usage(event)
            if '"choices":[]' in event.replace(" ", ""):
                return
        self._last_s = self._clock.now_s()
        self._first_s = self._last_s if self._first_s is None else self._first_s
        self._events += 1

    def leave(self) -> None:
        """Record that the client has left; a prompt that was sent still counts."""
        self._is_left = self.is_sent

    def settle(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Use the counts of a journal, which counts tokens across replicas if it knows the ids."""
        if prompt_tokens:
            self.prompt_tokens, self.completion_tokens = prompt_tokens, completion_tokens
            self._has_usage = True

    def end(self, *, status: int | None = None, prompt_bytes: int = 0) -> ResponseSample:
        """Return the sample; `prompt_bytes` is the size of the request.

        `status` is what the client got: without a replica, or after the last one failed, the balancer's own response.
        None: the client has left; one with an open WebSocket got all of its response before.
        """
        if self.is_switched:
            status = SWITCHED
        if self._body and len(self._body) <= BODY_BYTES_MAX:
            self._read_usage(bytes(self._body))
        if not self._has_usage and (self._events or self._is_left):
            self.completion_tokens = max(self.completion_tokens, self._events)
            self.prompt_tokens = self.prompt_tokens or math.ceil(prompt_bytes / PROMPT_BYTES_PER_TOKEN)
        is_timed = self._first_s is not None and self.completion_tokens > 1
        end_s = self._clock.now_s()
        return ResponseSample(
            end_s=end_s,
            replica=self.replica,
            status=CLIENT_GONE if status is None else status,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            ttft_s=None if self._first_s is None else self._first_s - self._start_s,
            tpot_s=(self._last_s - (self._first_s or 0.0)) / (self.completion_tokens - 1) if is_timed else None,
            took_s=end_s - self._start_s,
        )

    def _read_usage(self, text: str | bytes) -> None:
        usage = find_usage(text)
        if not isinstance(usage, dict):
            return
        # The Responses and Messages APIs have names of their own; later events of the latter may omit the prompt.
        known = self.prompt_tokens if self._has_usage else None
        prompt = usage.get("prompt_tokens", usage.get("input_tokens", known))
        completion = usage.get("completion_tokens", usage.get("output_tokens")) or 0
        if (
            isinstance(prompt, int)
            and isinstance(completion, int)
            and 0 <= min(prompt, completion) <= max(prompt, completion) <= TOKENS_MAX
        ):
            self.prompt_tokens, self.completion_tokens = prompt, completion
            self._has_usage = True


class UsageField(msgspec.Struct):
    """The fields that are read of a response. Events of the Responses and Messages APIs nest their usage."""

    usage: Any = None
    response: Any = None
    message: Any = None


def find_usage(text: str | bytes) -> object:
    """Return the usage that a response states, as it is written there; None without one.

    Other fields are passed over: building the numbers of a few hundred embeddings would hold up all requests for 30 ms.
    """
    try:
        found = msgspec.json.decode(text, type=UsageField)
        places: Sequence[object] = found.usage, found.response, found.message
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        try:
            fields = json.loads(text)  # also takes NaN and infinity, which Python's servers write
        except (ValueError, RecursionError):
            return None
        places = [fields.get(name) for name in ("usage", "response", "message")] if isinstance(fields, dict) else [None]
    usage, *others = places
    return usage or next((each["usage"] for each in others if isinstance(each, dict) and each.get("usage")), None)


class WindowSums:
    """Sums over the responses of a window, kept up to date as they enter and leave it."""

    def __init__(self) -> None:
        self.requests = self.errors = self.prompt_tokens = self.completion_tokens = 0
        self._firsts: list[float] = []  # sorted
        self._laters: list[float] = []

    def add(self, sample: ResponseSample) -> None:
        """Count a response that ended."""
        self._count(sample, 1)
        if sample.ttft_s is not None:
            insort(self._firsts, sample.ttft_s)
        if sample.tpot_s is not None:
            insort(self._laters, sample.tpot_s)

    def remove(self, sample: ResponseSample) -> None:
        """Remove a response that was added."""
        self._count(sample, -1)
        if sample.ttft_s is not None:
            del self._firsts[bisect_left(self._firsts, sample.ttft_s)]
        if sample.tpot_s is not None:
            del self._laters[bisect_left(self._laters, sample.tpot_s)]

    def describe(self, span_s: float) -> LoadWindow:
        """Return rates over `span_s` seconds and percentiles of times in seconds."""
        span_s = max(span_s, 1.0)
        return LoadWindow(
            requests=self.requests,
            errors=self.errors,
            qps=self.requests / span_s,
            prompt_tokens_s=self.prompt_tokens / span_s,
            completion_tokens_s=self.completion_tokens / span_s,
            ttft_p50_s=find_percentile(self._firsts, 0.5),
            ttft_p95_s=find_percentile(self._firsts, 0.95),
            tpot_p50_s=find_percentile(self._laters, 0.5),
            tpot_p95_s=find_percentile(self._laters, 0.95),
        )

    def _count(self, sample: ResponseSample, step: int) -> None:
        self.requests += step
        self.errors += step * (sample.status >= 500)
        self.prompt_tokens += step * sample.prompt_tokens
        self.completion_tokens += step * sample.completion_tokens


class DurationTally:
    """Durations by ascending bounds."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def add(self, duration_s: float) -> None:
        """Count a duration; a clock that was set back makes it 0."""
        duration_s = max(0.0, duration_s)
        self._counts[bisect_left(self._bounds_s, duration_s)] += 1
        self._sum_s += duration_s

    def describe(self) -> DurationCounts:
        """Return what was counted."""
        return DurationCounts(counts=tuple(self._counts), sum_s=self._sum_s)


class TotalTally:
    """All responses since the balancer started."""

    def __init__(self) -> None:
        self._responses: Counter[str] = Counter()
        self._prompt_tokens = self._completion_tokens = 0
        self._first_token, self._request = DurationTally(FIRST_TOKEN_BOUNDS_S), DurationTally(REQUEST_BOUNDS_S)

    def add(self, sample: ResponseSample) -> None:
        """Count a response that ended."""
        code = str(sample.status)
        is_listed = code in self._responses or len(self._responses) < CODES_MAX
        self._responses[code if is_listed else f"{sample.status // 100}xx"] += 1
        self._prompt_tokens += sample.prompt_tokens
        self._completion_tokens += sample.completion_tokens
        if sample.ttft_s is not None:
            self._first_token.add(sample.ttft_s)
        if sample.status != SWITCHED:
            self._request.add(sample.took_s)

    def describe(self) -> LoadTotals:
        """Return what was counted."""
        return LoadTotals(
            responses=dict(self._responses),
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            first_token=self._first_token.describe(),
            request=self._request.describe(),
        )


class LoadMeter:
    """The responses of the last minute. Describing them costs the same for one response as for thousands."""

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._start_s = clock.now_s()
        self._samples: deque[ResponseSample] = deque()
        self._whole = WindowSums()
        self._by_replica: dict[int, WindowSums] = {}
        self.totals = TotalTally()

    def add(self, sample: ResponseSample) -> None:
        """Add the sample of an ended response."""
        if len(self._samples) == SAMPLES_MAX:
            self._remove_oldest()
        self.totals.add(sample)
        self._samples.append(sample)
        self._whole.add(sample)
        if sample.replica not in self._by_replica:
            self._by_replica[sample.replica] = WindowSums()
        self._by_replica[sample.replica].add(sample)

    def describe(self) -> tuple[LoadWindow, dict[int, LoadWindow]]:
        """Return the figures of all replicas together, and of each."""
        now_s = self._clock.now_s()
        while self._samples and not now_s - WINDOW_S <= self._samples[0].end_s <= now_s:  # later: a clock was set back
            self._remove_oldest()
        is_full = len(self._samples) == SAMPLES_MAX
        span_s = now_s - (self._samples[0].end_s if is_full else max(self._start_s, now_s - WINDOW_S))
        return self._whole.describe(span_s), {
            number: sums.describe(span_s) for number, sums in self._by_replica.items()
        }

    def _remove_oldest(self) -> None:
        sample = self._samples.popleft()
        self._whole.remove(sample)
        sums = self._by_replica[sample.replica]
        sums.remove(sample)
        if not sums.requests:
            del self._by_replica[sample.replica]


def find_percentile(ranked: Sequence[float], share: float) -> float | None:
    """Return the smallest value that this share of the ranked ones does not exceed; None without values."""
    return ranked[max(0, math.ceil(share * len(ranked)) - 1)] if ranked else None
