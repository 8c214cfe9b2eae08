"""Refusals by clouds, shared by all jobs: a circuit breaker per placement, and a retry budget per cloud."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence

from broker.errors import CapacityError, CloudError, QuotaError, ThrottledError, TransientError
from broker.provision.zones import split_zones
from broker.state.refusals import Refusal
from broker.state.store import Store
from broker.types import IntentEnd, Placement

CAPACITY_REFUSAL_S = 600.0
QUOTA_REFUSAL_S = 3600.0
REFUSAL_S_MAX = 4 * 3600.0  # regardless of the number of refusals
REFUSAL_S_SHORT = 60.0  # after an unclear answer
REASK_S = 30.0  # minimum interval, over all jobs, between last-resort requests to a full placement
REASK_S_MAX = 120.0
PROBE_S = 120.0  # other searches wait this long for the search that probes an expired refusal
# Modelled on the retry quota of AWS SDKs: it allows bursts, but not a storm of ten thousand jobs.
FAILURES_MAX = 60.0
FAILURE_REFILL_S = 2.0
DOUBLINGS_MAX = 64  # of a backoff: after a night of tries, the power would be too large for a float


class UnavailableOffers:
    """Circuit breaker per placement.

    Closed: no refusal is known. Open: refused, and not requested before the refusal expires. Half-open: one launch
    probes, and all others wait.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def list_active(self) -> tuple[Refusal, ...]:
        """List the refusals that have not expired."""
        return tuple(self._store.refusals.list_active(self._store.clock.now_s()))

    def list_covering(self, placement: Placement, active: Iterable[Refusal]) -> Sequence[Refusal]:
        """Return the refusals that currently block requests to this placement."""
        return [refusal for refusal in active if refusal.covers(placement)]

    def measure_reask_s(self, placement: Placement) -> float:
        """Return the seconds until this refused placement may be requested as a last resort; 0 means now."""
        active = self.list_active()
        covering = [refusal for zone in split_zones(placement) for refusal in self.list_covering(zone, active)]
        due_s = max((max(refusal.reask_s, refusal.probed_until_s) for refusal in covering), default=0.0)
        return max(0.0, due_s - self._store.clock.now_s())

    def begin(self, placement: Placement) -> None:
        """Record that a launch begins there: if a refusal has just expired, it is the probe for all searches."""
        for zone in split_zones(placement):
            self._store.refusals.begin_probe(zone, lasts_s=PROBE_S)

    def refuse(self, placement: Placement, error: CloudError, *, is_region_wide: bool = False) -> None:
        """Record a refusal, separately for each zone if several zones were requested as one.

        `is_region_wide`: calls failed repeatedly without a reason, so the region is at fault, not the zone.
        """
        with self._store.transaction():
            for zone in split_zones(placement):
                self._refuse_zone(zone, error, is_region_wide=is_region_wide)

    def _refuse_zone(self, placement: Placement, error: CloudError, *, is_region_wide: bool) -> None:
        offer = placement.offer
        region, zone, lasts_s, reask_s = offer.region, offer.zone, REFUSAL_S_SHORT, REASK_S
        if isinstance(error, QuotaError):
            zone, lasts_s, reask_s = None, QUOTA_REFUSAL_S, math.inf
        elif isinstance(error, ThrottledError) or (is_region_wide and isinstance(error, TransientError)):
            zone = None  # clouds limit calls per account and region, and services fail per region
        elif isinstance(error, CapacityError):
            lasts_s = CAPACITY_REFUSAL_S
            region = "" if error.scope == "cloud" else region
            zone = zone if error.scope == "zone" else None
        self._store.refusals.add(
            offer.cloud,
            region,
            zone,
            offer.instance_type,
            placement.is_spot,
            lasts_s,
            error.message,
            hints=error.hints,
            lasts_s_max=REFUSAL_S_MAX,
            reask_after_s=reask_s,
            reask_after_s_max=REASK_S_MAX if isinstance(error, CapacityError) else math.inf,
        )

    def clear(self, placement: Placement) -> None:
        """Delete the refusals that cover a placement, after it has provided nodes."""
        self._store.refusals.clear(placement)

    def note_failed_call(self, cloud: str) -> None:
        """Take one token from the retry budget that all jobs share: a call was refused, throttled or lost."""
        self._store.retries.take(cloud, tokens_max=FAILURES_MAX, refill_s=FAILURE_REFILL_S)

    def measure_wait_s(self, cloud: str) -> float:
        """Return seconds until this cloud may be called again; 0 while its retry budget lasts."""
        return self._store.retries.measure_wait_s(cloud, tokens_max=FAILURES_MAX, refill_s=FAILURE_REFILL_S)


def find_intent_end(error: CloudError) -> IntentEnd:
    """Return how this error ends an intent: by quota, without a clear answer, or by a refusal."""
    if isinstance(error, QuotaError):
        return IntentEnd.QUOTA_EXCEEDED
    return IntentEnd.UNCLEAR if isinstance(error, ThrottledError | TransientError) else IntentEnd.REFUSED


def draw_backoff_s(tries: int, *, base_s: float = 1.0, cap_s: float = 30.0) -> float:
    """Draw the wait before the next try: full jitter, from almost 0 to the base doubled with each try, up to the cap.

    Source: AWS Builders' Library, "Timeouts, retries, and backoff with jitter".
    """
    return random.uniform(0.05, min(cap_s, base_s * 2.0 ** min(tries, DOUBLINGS_MAX)))
