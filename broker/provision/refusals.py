"""What clouds said no to, for all jobs: a circuit breaker for each place, and one budget of failed calls a cloud."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from broker.errors import CapacityError, CloudError, QuotaError, ThrottledError, TransientError
from broker.provision.zones import split_zones
from broker.state.store import Refusal, Store
from broker.types import IntentEnd, Placement

CAPACITY_REFUSAL_S = 600.0
QUOTA_REFUSAL_S = 3600.0
REFUSAL_S_MAX = 4 * 3600.0  # however often a place refuses
REFUSAL_S_SHORT = 60.0  # a place that answered nothing clear
REASK_S = 30.0  # all jobs together ask a full place no more often, when there is no other
REASK_S_MAX = 120.0
PROBE_S = 120.0  # others wait so long for the one that looks whether a place gives again
# As the retry quota of AWS SDKs: bursts are free, a storm of ten thousand jobs is not.
FAILURES_MAX = 60.0
FAILURE_REFILL_S = 2.0


class UnavailableOffers:
    """Closed: nothing is known. Open: refused, not asked before its end. Half-open: one try looks, all others wait."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def list_active(self) -> tuple[Refusal, ...]:
        return tuple(self._store.refusals.list_active(self._store.clock.now_s()))

    def list_covering(self, placement: Placement, active: Iterable[Refusal]) -> Sequence[Refusal]:
        """Why this place is not asked now; empty: it may be."""
        return [refusal for refusal in active if refusal.covers(placement)]

    def measure_reask_s(self, placement: Placement) -> float:
        """Seconds until one who has nowhere else to go may ask it all the same; 0: now, nobody did so lately."""
        active = self.list_active()
        covering = [refusal for each in split_zones(placement) for refusal in self.list_covering(each, active)]
        due_s = max((max(refusal.reask_s, refusal.probed_until_s) for refusal in covering), default=0.0)
        return max(0.0, due_s - self._store.clock.now_s())

    def begin(self, placement: Placement) -> None:
        """A try begins there: where an earlier refusal has just run out, it is everybody's probe."""
        for each in split_zones(placement):
            self._store.refusals.begin_probe(each, lasts_s=PROBE_S)

    def refuse(self, placement: Placement, error: CloudError, *, is_region_wide: bool = False) -> None:
        """Where several zones were asked as one, what holds for a zone holds for each of them. `is_region_wide`: calls
        failed again and again without a reason, so it is no matter of the zone."""
        with self._store.transaction():
            for each in split_zones(placement):
                self._refuse_one(each, error, is_region_wide=is_region_wide)

    def _refuse_one(self, placement: Placement, error: CloudError, *, is_region_wide: bool) -> None:
        offer = placement.offer
        region, zone, lasts_s, reask_s = offer.region, offer.zone, REFUSAL_S_SHORT, REASK_S
        if isinstance(error, QuotaError):
            zone, lasts_s, reask_s = None, QUOTA_REFUSAL_S, math.inf
        elif isinstance(error, ThrottledError) or (is_region_wide and isinstance(error, TransientError)):
            zone = None  # clouds count calls by account and region, and it is a region's service that fails
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

    def forgive(self, placement: Placement) -> None:
        self._store.refusals.forgive(placement)

    def note_failed_call(self, cloud: str) -> None:
        """A call was refused, throttled or lost: the budget that all jobs share has one less."""
        self._store.retries.take(cloud, tokens_max=FAILURES_MAX, refill_s=FAILURE_REFILL_S)

    def measure_wait_s(self, cloud: str) -> float:
        """Seconds until this cloud may be asked again; 0 while its budget of failures lasts."""
        return self._store.retries.measure_wait_s(cloud, tokens_max=FAILURES_MAX, refill_s=FAILURE_REFILL_S)


def find_intent_end(error: CloudError) -> IntentEnd:
    if isinstance(error, QuotaError):
        return IntentEnd.QUOTA_EXCEEDED
    return IntentEnd.UNCLEAR if isinstance(error, ThrottledError | TransientError) else IntentEnd.REFUSED
