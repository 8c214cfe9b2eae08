"""Count events for metrics: launches and their refusals by place, and the durations of starts and recoveries."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from broker.dashboard.families import Family, Histogram
from broker.state.events import EventRow, EventRows
from broker.types import EventKind

READ_MAX = 5000  # events of one read
BOUNDS_S = (15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0)
OUTCOMES = {
    EventKind.PLACE_WHOLE: "created",
    EventKind.PLACE_REFUSED: "refused",
    EventKind.CALL_FAILED: "failed",
    EventKind.CALL_UNCLEAR: "unclear",
}
PLACE_LABELS = ("cloud", "region", "instance_type")


class EventTally:
    """Sums over all recorded events. Each event is read once, because ids only grow, in the order of commits."""

    def __init__(self) -> None:
        self._newest = 0
        self._tries: Counter[tuple[str, str]] = Counter()  # (cloud, outcome)
        self._refusals: Counter[tuple[str, ...]] = Counter()  # by `PLACE_LABELS`
        self._notices: Counter[tuple[str, ...]] = Counter()  # likewise
        self._provision_s: dict[str, Histogram] = defaultdict(lambda: Histogram(BOUNDS_S))
        self._recovery_s = Histogram(BOUNDS_S)
        self._has_recoveries = False

    def update(self, events: EventRows) -> None:
        """Count the events since the last update. Raises StateError."""
        kinds, newest = (*OUTCOMES, EventKind.RECOVERED, EventKind.NOTICED), events.get_newest_id()
        while rows := events.list_after(kinds, after=self._newest, limit=READ_MAX):
            for row in rows:
                self._count(row)
            self._newest = rows[-1].id
        self._newest = max(self._newest, newest)  # so that events of other kinds are not searched again

    def _count(self, row: EventRow) -> None:
        took_s = row.data.get("took_s")
        if row.kind is EventKind.RECOVERED:
            if isinstance(took_s, (int, float)):
                self._recovery_s.add(took_s)
                self._has_recoveries = True
            return
        place = row.data.get("place")
        if not isinstance(place, Mapping):
            return
        labels = tuple(str(place.get(name)) for name in PLACE_LABELS)
        if row.kind is EventKind.NOTICED:
            self._notices[labels] += 1
            return
        cloud = labels[0]
        self._tries[cloud, OUTCOMES[row.kind]] += 1
        if row.kind is EventKind.PLACE_REFUSED:
            self._refusals[labels] += 1
        elif row.kind is EventKind.PLACE_WHOLE and isinstance(took_s, (int, float)):
            self._provision_s[cloud].add(took_s)

    def list_families(self) -> Iterator[Family]:
        """List the families about launches and recoveries."""
        tries = [
            ({"cloud": cloud, "outcome": outcome}, float(n)) for (cloud, outcome), n in sorted(self._tries.items())
        ]
        yield Family("broker_tries_total", "counter", "Requests for a gang of nodes by outcome.", tries)
        refusals = _list_samples(self._refusals)
        yield Family("broker_refusals_total", "counter", "Requests that a cloud refused.", refusals)
        text = "Preemptions of nodes that their cloud announced."
        yield Family("broker_notices_total", "counter", text, _list_samples(self._notices))
        provision = [({"cloud": cloud}, histogram) for cloud, histogram in sorted(self._provision_s.items())]
        text = "Time from the request for a gang until all its nodes ran."
        yield Family("broker_provision_seconds", "histogram", text, histograms=provision)
        if self._has_recoveries:
            text = "Time from the loss of an attempt to the next step."
            yield Family("broker_recovery_seconds", "histogram", text, histograms=[({}, self._recovery_s)])


def _list_samples(counts: Counter[tuple[str, ...]]) -> list[tuple[dict[str, str], float]]:
    return [(dict(zip(PLACE_LABELS, place, strict=True)), float(count)) for place, count in sorted(counts.items())]
