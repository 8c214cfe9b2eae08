"""Rows of refusals: places that clouds refused, with times for new requests."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from broker.frozen import frozen
from broker.state.base import Database
from broker.types import Placement

FORGIVEN_AFTER_S = 3600.0  # after this time without a refusal since the last one expired, the count restarts at 1
DOUBLINGS_MAX = 40  # a place that is full for days refuses thousands of times: the power would overflow
AHEAD_S_MAX = 300.0  # more than the length of a probe: clocks of controllers may differ


@frozen
class Refusal:
    """A location that must not be requested again before `expires_s`.

    An empty region, zone or instance type matches all.
    """

    cloud: str
    region: str
    zone: str
    instance_type: str
    is_spot: bool
    expires_s: float
    reason: str
    reask_s: float = 0.0  # after this, a launch without any other place may request it again
    probed_until_s: float = 0.0  # until then, one launch probes the placement and all others wait
    hints: tuple[str, ...] = ()  # how to resolve the refusal

    def covers(self, placement: Placement) -> bool:
        """Return whether the refusal applies to the placement; empty fields match any."""
        offer = placement.offer
        return (
            self.cloud == offer.cloud
            and self.is_spot == placement.is_spot
            and self.region in ("", offer.region)
            and self.zone in ("", offer.zone or "")
            and self.instance_type in ("", offer.instance_type)
        )


class RefusalRows:
    """The refusals of clouds, shared by all searches until they expire."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(
        self,
        cloud: str,
        region: str,
        zone: str | None,
        instance_type: str,
        is_spot: bool,
        lasts_s: float,
        reason: str,
        *,
        hints: Sequence[str] = (),
        lasts_s_max: float | None = None,
        reask_after_s: float = math.inf,
        reask_after_s_max: float = math.inf,
    ) -> None:
        """Record a refusal; an empty `region`, `zone` or `instance_type` matches all of them.

        After `reask_after_s`, which grows by half each time, a launch without any other place may request it again.
        This is a circuit breaker: a refusal soon after the previous one lasts twice as long, up to `lasts_s_max`; once
        it has expired, one launch is let through. A request sent before the previous refusal was known counts as part
        of that refusal.
        """
        key = (cloud, region, zone or "", instance_type, is_spot)
        where = "cloud = ? AND region = ? AND zone = ? AND instance_type = ? AND is_spot = ?"
        now_s = self._database.clock.now_s()
        with self._database.transaction():
            known = self._database.row(f"SELECT count, expires_s, reask_s FROM refusals WHERE {where}", key)
            count = 1
            if known is not None and now_s < known["expires_s"] + FORGIVEN_AFTER_S:
                count = known["count"] + int(now_s >= known["reask_s"])
            held_s = min(lasts_s * 2.0 ** min(count - 1, DOUBLINGS_MAX), max(lasts_s, lasts_s_max or lasts_s))
            pause_s = min(held_s, reask_after_s_max, reask_after_s * 1.5 ** min(count - 1, DOUBLINGS_MAX))
            self._database.execute(
                "INSERT INTO refusals (cloud, region, zone, instance_type, is_spot, expires_s, reason, "
                "count, reask_s, hints, refused_s) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
                "ON CONFLICT (cloud, region, zone, instance_type, is_spot) DO UPDATE SET "
                "expires_s = excluded.expires_s, reason = excluded.reason, count = excluded.count, "
                "reask_s = excluded.reask_s, hints = excluded.hints, refused_s = excluded.refused_s, "
                "probed_until_s = 0.0",
                (*key, now_s + held_s, reason, count, now_s + pause_s, json.dumps(list(hints)), now_s),
            )

    def clear(self, placement: Placement) -> None:
        """Delete the refusals that cover a placement because it provided a whole gang."""
        self._database.write(f"DELETE FROM refusals WHERE {_COVERING}", _read_place(placement))

    def begin_probe(self, placement: Placement, *, lasts_s: float) -> None:
        """Half-open the circuit breaker: during one probe, the place is refused for other launches, even after expiry.

        The probe ends with a call of `clear` or `add`; a process that dies in between blocks the others for at most
        `lasts_s`.
        """
        now_s = self._database.clock.now_s()
        where = f"{_COVERING} AND expires_s > ?"
        bounds = (*_read_place(placement), now_s - FORGIVEN_AFTER_S)
        if self._database.rows(f"SELECT 1 FROM refusals WHERE {where}", bounds):
            self._database.write(f"UPDATE refusals SET probed_until_s = ? WHERE {where}", (now_s + lasts_s, *bounds))

    def list_active(self, now_s: float) -> Sequence[Refusal]:
        """List refusals that are active or being probed at `now_s`, earliest expiry first.

        Refusals and probes from the future are omitted: the clock was set back since, which would prolong them.
        """
        latest_s = now_s + AHEAD_S_MAX
        rows = self._database.rows(
            "SELECT cloud, region, zone, instance_type, is_spot, expires_s, reason, reask_s, probed_until_s, hints "
            "FROM refusals WHERE refused_s <= ?2 AND (expires_s > ?1 OR probed_until_s > ?1 AND probed_until_s <= ?2) "
            "ORDER BY expires_s",
            (now_s, latest_s),
        )
        return [
            Refusal(
                cloud=row["cloud"], region=row["region"], zone=row["zone"], instance_type=row["instance_type"],
                is_spot=bool(row["is_spot"]), expires_s=row["expires_s"], reason=row["reason"],
                reask_s=row["reask_s"],
                probed_until_s=row["probed_until_s"] if row["probed_until_s"] <= latest_s else 0.0,
                hints=() if row["hints"] == "[]" else tuple(json.loads(row["hints"])),
            )
            for row in rows
        ]  # fmt: skip


# The same condition as `Refusal.covers`, in SQL.
_COVERING = "cloud = ? AND is_spot = ? AND region IN ('', ?) AND zone IN ('', ?) AND instance_type IN ('', ?)"


def _read_place(placement: Placement) -> tuple[object, ...]:
    offer = placement.offer
    return offer.cloud, placement.is_spot, offer.region, offer.zone or "", offer.instance_type
