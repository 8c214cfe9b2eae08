"""Preemption history of our own spot machines: evidence about places, with recent evidence weighted more."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from broker.frozen import frozen
from broker.spot.durations import NOTHING_SEEN, Durations
from broker.spot.hazard import Observation
from broker.state.base import Database
from broker.types import OutcomeKind

HALF_LIFE_DAYS = 14.0  # older markets are poor evidence: recorded zones change their behavior within weeks
KEPT_DAYS_MAX = 90.0
STAYS_MAX = 5000
PERIOD_DAYS = 7.0  # periods fade much faster: periods older than a week are ignored
SHARED_S_MAX = 60.0  # maximum age of a result shared by many jobs; the evidence fades within weeks

# (cloud, region, zone, instance type), as in the planner's history
PlaceKey = tuple[str, str, str | None, str]


@frozen
class SpotStay:
    """The time of one gang on spot in one place.

    `is_preempted`: the market ended it, not broker. `is_over`: it is no longer running.
    """

    place: PlaceKey
    node_count: int
    begin_s: float
    end_s: float
    is_preempted: bool
    is_over: bool = True

    @property
    def hours(self) -> float:
        """The length of the stay in hours; 0 if the clock was set back."""
        return max(0.0, self.end_s - self.begin_s) / 3600


@frozen
class StaySum:
    """The stays of all gangs in one place."""

    place: PlaceKey
    stays: int
    hours: float
    preemptions: int


class StepRange(NamedTuple):
    """The steps that one attempt reported: the first, the newest, and the newest that was saved."""

    first_step: int
    last_step: int
    checkpoint_step: int | None


class AttemptWork(NamedTuple):
    """The times of an attempt that reported steps, in seconds since the epoch, and its steps."""

    running_s: float | None
    resumed_s: float | None
    lost_s: float | None
    ended_s: float | None
    saved_s: float | None
    steps: StepRange


# The newest stays; parameters: the earliest start, and the maximum number.
_STAYS = (
    "FROM attempts WHERE CASE WHEN json_valid(body) "
    "THEN CAST(json_extract(body, '$.placement.is_spot') AS TEXT) IN ('1', 'true') "
    "AND CAST(json_extract(body, '$.started_s') AS DOUBLE PRECISION) > ? END "
    "ORDER BY rowid DESC LIMIT ?"
)


class HistoryRows:
    """The stays of jobs on spot nodes: the user's own evidence about markets."""

    def __init__(self, database: Database) -> None:
        self._database = database

    _weighed: tuple[float, Mapping[PlaceKey, Observation]] | None = None  # time of the last read, and its result

    def list_stays(self) -> list[SpotStay]:
        """Return the spot stays of managed jobs' attempts, newest first; running ones end now."""
        now_s = self._database.clock.now_s()
        rows = self._database.rows(
            "SELECT json_extract(body, '$.placement.offer.cloud'), json_extract(body, '$.placement.offer.region'), "
            "json_extract(body, '$.placement.offer.zone'), json_extract(body, '$.placement.offer.instance_type'), "
            "json_extract(body, '$.placement.node_count'), json_extract(body, '$.started_s'), "
            "json_extract(body, '$.lost_s'), json_extract(body, '$.ended_s'), outcome_kind "
            f"{_STAYS}",
            (now_s - KEPT_DAYS_MAX * 86400, STAYS_MAX),
        )
        return [
            SpotStay(
                place=(row[0], row[1], row[2], row[3]),
                node_count=int(row[4]),
                begin_s=float(row[5]),
                end_s=_first(row[6], row[7], now_s),
                is_preempted=row[8] == OutcomeKind.PREEMPTED,
                is_over=row[6] is not None or row[7] is not None,
            )
            for row in rows
        ]

    def sum_stays(self) -> list[StaySum]:
        """Sum the stays of `list_stays` by place, in the database: thousands would take megabytes here."""
        now_s = self._database.clock.now_s()
        offer = "json_extract(body, '$.placement.offer.{}')"
        time_s = "CAST(json_extract(body, '$.{}') AS DOUBLE PRECISION)"
        begin_s, lost_s, ended_s = (time_s.format(name) for name in ("started_s", "lost_s", "ended_s"))
        rows = self._database.rows(
            "SELECT cloud, region, zone, instance_type, count(*), "
            "sum(CASE WHEN end_s > begin_s THEN end_s - begin_s ELSE 0.0 END) / 3600, "
            "sum(CASE WHEN outcome_kind = ? THEN 1 ELSE 0 END) FROM "
            f"(SELECT {offer.format('cloud')} AS cloud, {offer.format('region')} AS region, "
            f"{offer.format('zone')} AS zone, {offer.format('instance_type')} AS instance_type, "
            f"{begin_s} AS begin_s, coalesce({lost_s}, {ended_s}, ?) AS end_s, outcome_kind {_STAYS}) AS stays "
            "GROUP BY cloud, region, zone, instance_type",
            (OutcomeKind.PREEMPTED.value, now_s, now_s - KEPT_DAYS_MAX * 86400, STAYS_MAX),
        )
        return [
            StaySum(
                place=(row[0], row[1], row[2], row[3]), stays=int(row[4]), hours=float(row[5]), preemptions=int(row[6])
            )
            for row in rows
        ]

    def list_steps(self, job_ids: Sequence[int]) -> Mapping[int, Sequence[StepRange]]:
        """Return the ranges of steps that the attempts of these jobs have reported, in the order of attempts."""
        found: dict[int, list[StepRange]] = {}
        rows = self._database.rows(
            "SELECT job_id, first_step, last_step, checkpoint_step FROM attempt_steps "
            f"WHERE job_id IN ({', '.join('?' * len(job_ids))}) ORDER BY job_id, number",
            tuple(job_ids),
        )
        for job_id, *steps in rows if job_ids else ():
            found.setdefault(job_id, []).append(StepRange(*steps))
        return found

    def list_work(self, job_ids: Sequence[int]) -> Mapping[int, Sequence[AttemptWork]]:
        """Return the times and steps of the attempts of these jobs that reported steps, in the order of attempts."""
        found: dict[int, list[AttemptWork]] = {}
        times = ", ".join(
            f"CAST(CASE WHEN json_valid(body) THEN json_extract(body, '$.{name}') END AS DOUBLE PRECISION)"
            for name in ("running_s", "resumed_s", "lost_s", "ended_s", "saved_s")
        )
        rows = self._database.rows(
            f"SELECT reached.job_id, {times}, first_step, last_step, checkpoint_step FROM attempt_steps AS reached "
            "JOIN attempts ON attempts.job_id = reached.job_id AND attempts.number = reached.number "
            f"WHERE reached.job_id IN ({', '.join('?' * len(job_ids))}) ORDER BY reached.job_id, reached.number",
            tuple(job_ids),
        )
        for job_id, running_s, resumed_s, lost_s, ended_s, saved_s, *steps in rows if job_ids else ():
            work = AttemptWork(running_s, resumed_s, lost_s, ended_s, saved_s, StepRange(*steps))
            found.setdefault(job_id, []).append(work)
        return found

    def read(self, *, age_s_max: float = 0.0) -> Mapping[PlaceKey, Observation]:
        """Read the history in the planner's form, or return the last result if it is at most `age_s_max` old.

        A daemon that starts ten thousand jobs calls this for each job, and reading thousands of stays takes 20 ms.
        """
        now_s = self._database.clock.now_s()
        if self._weighed is None or not 0.0 <= now_s - self._weighed[0] < age_s_max:
            self._weighed = now_s, weigh_stays(self.list_stays(), now_s=now_s)
        return self._weighed[1]


def weigh_stays(stays: Iterable[SpotStay], *, now_s: float) -> dict[PlaceKey, Observation]:
    """Sum the preemptions and node-hours of each place; a stay's weight halves every two weeks."""
    found: dict[PlaceKey, tuple[float, float]] = {}
    for stay in stays:
        weight = math.exp2(-max(0.0, now_s - stay.end_s) / 86400 / HALF_LIFE_DAYS)
        count, hours = found.get(stay.place, (0.0, 0.0))
        found[stay.place] = (count + weight * stay.is_preempted, hours + weight * stay.hours * stay.node_count)
    return {place: Observation(preemptions=count, node_hours=hours) for place, (count, hours) in found.items()}


def gather_durations(stays: Iterable[SpotStay], *, now_s: float) -> dict[PlaceKey, Durations]:
    """Gather the durations for which each place stayed open for our gangs, until they were preempted or ended.

    The periods fade like those of an observed market.
    """
    found: dict[PlaceKey, Durations] = {}
    for stay in stays:
        age_s = now_s - stay.end_s
        if stay.is_over and stay.hours > 0 and age_s <= PERIOD_DAYS * 86400:
            period = NOTHING_SEEN.with_period(stay.hours, is_open=True, is_ended=stay.is_preempted)
            found[stay.place] = found.get(stay.place, NOTHING_SEEN) + period.discount(max(age_s, 0.0) / 3600)
    return found


def _first(*times_s: float | str | None) -> float:
    return float(next(each for each in times_s if each is not None))
