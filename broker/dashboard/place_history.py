"""Define the read model of the places where broker used spot: time there, preemptions, refusals and current prices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from broker.app.container import Context
from broker.dashboard.model import PlaceRow, list_places
from broker.errors import BrokerError
from broker.frozen import frozen
from broker.state.history import PlaceKey
from broker.types import EventKind

SHOWN_DAYS = 14.0
PRICED = 100  # places whose prices are looked up


@frozen
class Span:
    """Time of a gang at a place, in seconds since the epoch; `is_preempted`: the market ended it."""

    begin_s: float
    end_s: float
    is_preempted: bool


@frozen
class PlaceHistory:
    """One place: sums of all recorded stays, those of the last `SHOWN_DAYS`, and when spot was refused there.

    Prices are USD per hour of one machine in the price book; None if it has none.
    """

    row: PlaceRow
    spans: tuple[Span, ...]
    refused_s: tuple[float, ...]
    spot_usd_hour: float | None = None
    ondemand_usd_hour: float | None = None


def read_places(context: Context) -> Sequence[PlaceHistory]:
    """List the places with stays or refusals, the most preempted first, then the most refused."""
    store, since_s = context.store, context.clock.now_s() - SHOWN_DAYS * 86400
    spans: dict[PlaceKey, list[Span]] = defaultdict(list)
    for stay in store.history.list_stays():
        if stay.end_s > since_s:
            spans[stay.place].append(Span(begin_s=stay.begin_s, end_s=stay.end_s, is_preempted=stay.is_preempted))
    refused: dict[PlaceKey, list[float]] = defaultdict(list)
    for event in store.events.list_kind(kind=EventKind.PLACE_REFUSED, since_s=since_s):
        for key in _list_keys(event.data.get("place")):
            refused[key].append(event.time_s)
    rows = {(row.cloud, row.region, row.zone, row.instance_type): row for row in list_places(store)}
    for key in refused:
        if key not in rows:
            cloud, region, zone, instance_type = key
            rows[key] = PlaceRow(
                cloud=cloud, region=region, zone=zone, instance_type=instance_type, stays=0, hours=0.0, preemptions=0
            )
    keys = sorted(rows, key=lambda key: (-rows[key].preemptions, -len(refused[key]), -rows[key].hours))
    prices = _find_prices(context, keys[:PRICED])
    return [
        PlaceHistory(
            row=rows[key], spans=tuple(spans[key]), refused_s=tuple(refused[key]),
            spot_usd_hour=prices.get(key, (None, None))[0], ondemand_usd_hour=prices.get(key, (None, None))[1],
        )
        for key in keys
    ]  # fmt: skip


def _list_keys(place: object) -> Sequence[PlaceKey]:
    """List the zones of a refused spot placement; a zone that is the region's name stands for the region."""
    if not isinstance(place, Mapping) or not place.get("is_spot"):
        return []
    cloud, region, instance_type = (str(place.get(name)) for name in ("cloud", "region", "instance_type"))
    zones = place.get("zones")
    return [
        (cloud, region, None if zone == region else str(zone), instance_type)
        for zone in (zones if isinstance(zones, list) else [])
    ]


def _find_prices(context: Context, keys: Sequence[PlaceKey]) -> Mapping[PlaceKey, tuple[float | None, float | None]]:
    found: dict[PlaceKey, tuple[float | None, float | None]] = {}
    for instance_type in {key[3] for key in keys}:
        try:
            offers = context.market.book.find_prices(instance_type)
        except BrokerError:
            continue  # a machine of this user, or one that is no longer sold
        for offer in offers:
            prices = offer.spot_usd_hour, offer.ondemand_usd_hour
            found[offer.cloud, offer.region, offer.zone, instance_type] = prices
            found.setdefault((offer.cloud, offer.region, None, instance_type), prices)
    return found
