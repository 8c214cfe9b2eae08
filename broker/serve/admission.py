"""Admit requests by API key, within the limits of each key. No I/O: the balancer passes in the contents of files.

A service that never had a key is open on the loopback address and closed elsewhere. Limits are token buckets of one
minute. The tokens of a response are known only when it ends: a key whose bucket is above zero may start a request,
which may then take it below zero, so requests in flight at the same time can exceed a limit once.

Several balancers of one service divide limits evenly, and each counts what the others used, as last reported, against
the budget of a key.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Mapping
from dataclasses import replace

from broker.clock import Clock
from broker.frozen import frozen
from broker.serve.keys import ApiKey, KeyRing, KeyUsage, UsageBook

MINUTE_S = 60.0
SCHEME = "bearer "
# Of clients of OpenAI's API, and of Anthropic's, which vLLM and others serve at `/v1/messages`.
KEY_HEADERS = ("authorization", "x-api-key")


@frozen
class KeyRefusal:
    """The answer to a request that is not admitted, with the error codes of OpenAI's API."""

    status: int
    message: str
    kind: str
    code: str
    retry_s: int | None = None


UNKNOWN = KeyRefusal(
    status=401, message="the API key is missing or invalid", kind="invalid_request_error", code="invalid_api_key"
)
EXPIRED = KeyRefusal(
    status=403, message="the API key has expired", kind="invalid_request_error", code="expired_api_key"
)
SPENT = KeyRefusal(
    status=403, message="the token budget of the API key is used up", kind="insufficient_quota",
    code="insufficient_quota",
)  # fmt: skip


class RateBucket:
    """A bucket that starts full at `limit` and fills by `limit` per minute; it may be overdrawn.

    It holds at least one unit, so that a limit below one per minute admits a request now and then.
    """

    def __init__(self, limit: float, *, now_s: float) -> None:
        self.limit = limit
        self.level = max(1.0, limit)
        self._at_s = now_s

    def resize(self, limit: float, *, now_s: float) -> None:
        """Change the limit; the amount missing from a full bucket stays the same."""
        self.find_wait_s(0, now_s=now_s)
        self.level += max(1.0, limit) - max(1.0, self.limit)
        self.limit = limit

    def find_wait_s(self, need: float, *, now_s: float) -> float:
        """Return the seconds until the bucket holds this much; 0 if it does."""
        self.level = min(max(1.0, self.limit), self.level + max(0.0, now_s - self._at_s) * self.limit / MINUTE_S)
        self._at_s = now_s
        return max(0.0, (need - self.level) * MINUTE_S / self.limit)


class Gate:
    """Decides on each request and counts the usage of each key, starting from the `usage` of the previous balancer."""

    def __init__(self, ring: KeyRing | None, usage: UsageBook, *, host: str, clock: Clock) -> None:
        self._ring = ring  # None: the file of keys cannot be read, so nothing is admitted
        self._clock = clock
        self._is_loopback = is_loopback(host)
        self._used = dict(usage.keys)
        self._elsewhere = UsageBook()  # at the other balancers
        self._balancers = 1
        self._buckets: dict[tuple[str, str], RateBucket] = {}

    @property
    def has_keys(self) -> bool:
        """Return whether requests require a key; unreadable keys count as keys."""
        return self._ring is None or bool(self._ring.keys)

    @property
    def usage(self) -> UsageBook:
        """Usage by key, including the usage that the gate started from."""
        return UsageBook(keys=dict(self._used))

    def adopt(self, ring: KeyRing) -> None:
        """Apply keys that were created or revoked; counts continue."""
        self._ring = ring

    def share(self, balancers: int) -> None:
        """Divide the limits per minute among this many balancers."""
        if balancers == self._balancers:
            return
        now_s = self._clock.now_s()
        for bucket in self._buckets.values():
            bucket.resize(bucket.limit * self._balancers / balancers, now_s=now_s)
        self._balancers = balancers

    def adopt_elsewhere(self, usage: UsageBook) -> None:
        """Count this usage at other balancers against budgets."""
        self._elsewhere = usage

    @property
    def passes_preflights(self) -> bool:
        """Return whether browsers may send CORS preflights without a key."""
        return self._ring is not None and bool(self._ring.keys)

    def admit(self, text: str) -> ApiKey | KeyRefusal | None:
        """Return the key with this text, or the reason why its request is refused; None on an open service."""
        if self._ring is None or (not self._ring.keys and not self._is_loopback):
            return UNKNOWN
        if not self._ring.keys:
            return None
        key = self._ring.find(text)
        if key is None or key.revoked_s is not None:
            return UNKNOWN
        now_s = self._clock.now_s()
        if key.expires_s is not None and now_s >= key.expires_s:
            return EXPIRED
        used = self._used.get(key.id, KeyUsage())
        elsewhere = self._elsewhere.keys.get(key.id, KeyUsage())
        if key.budget_tokens is not None and used.tokens + elsewhere.tokens >= key.budget_tokens:
            return SPENT
        return self._limit(key, now_s) or self._count(key, used)

    def charge(self, key: ApiKey, prompt_tokens: int, completion_tokens: int) -> None:
        """Count the tokens of a response."""
        if not prompt_tokens and not completion_tokens:
            return
        used = self._used.get(key.id, KeyUsage())
        self._used[key.id] = replace(
            used,
            prompt_tokens=used.prompt_tokens + prompt_tokens,
            completion_tokens=used.completion_tokens + completion_tokens,
        )
        if key.tokens_per_minute is not None:
            self._bucket(key.id, "tokens", key.tokens_per_minute).level -= prompt_tokens + completion_tokens

    def _count(self, key: ApiKey, used: KeyUsage) -> ApiKey:
        self._used[key.id] = replace(used, requests=used.requests + 1)
        if key.requests_per_minute is not None:
            self._bucket(key.id, "requests", key.requests_per_minute).level -= 1
        return key

    def _limit(self, key: ApiKey, now_s: float) -> KeyRefusal | None:
        for kind, limit in (("requests", key.requests_per_minute), ("tokens", key.tokens_per_minute)):
            if limit is None:
                continue
            wait_s = self._bucket(key.id, kind, limit).find_wait_s(1, now_s=now_s)
            if wait_s > 0:
                message = f"the API key is limited to {limit:,} {kind} per minute"
                return KeyRefusal(
                    status=429, message=message, kind=kind, code="rate_limit_exceeded", retry_s=math.ceil(wait_s)
                )
        return None

    def _bucket(self, key_id: str, kind: str, limit: int) -> RateBucket:
        found = self._buckets.get((key_id, kind))
        if found is None:
            found = self._buckets[key_id, kind] = RateBucket(limit / self._balancers, now_s=self._clock.now_s())
        return found


def find_key(headers: Mapping[str, str]) -> str:
    """Return the API key in the headers of a request; empty without one."""
    bearer, other = (headers.get(name, "") for name in KEY_HEADERS)
    return bearer[len(SCHEME) :].strip() if bearer.lower().startswith(SCHEME) else other.strip()


def is_loopback(host: str) -> bool:
    """Return whether an address to listen on can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
