"""Due times of a schedule: pure functions of its cron fields, its time zone and a point in time.

Cron fields have the same meaning as in Debian's cron, implemented by the library `cronsim`. When the clocks change:

- A due time with a fixed minute and hour (`30 2 * * *`) occurs once a day. If its local time does not exist, it occurs
  at the first time that does (03:00); if it exists twice, at the first of the two.
- With a wildcard in the minute or the hour (`0 * * * *`, `*/15 2 * * *`), it occurs at every matching minute that
  passes: at both of an hour that exists twice, and at none of an hour that does not exist.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from typing import TYPE_CHECKING

from broker.errors import UsageError
from broker.frozen import frozen
from broker.task.reading import suggest
from broker.types.schedules import ScheduleSpec

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

COUNT_MAX = 1000  # missed due times that are counted; more are recorded as this number
WINDOWS_S = (3600.0, 86400.0, 32 * 86400.0, 400 * 86400.0)  # windows searched for the newest due time
OFFSET_S_MIN = 43200.0  # no zone has an offset from UTC for a shorter time
FIELDS = 5
WORDS = {
    "@hourly": "0 * * * *", "@daily": "0 0 * * *", "@midnight": "0 0 * * *", "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *", "@yearly": "0 0 1 1 *", "@annually": "0 0 1 1 *",
}  # fmt: skip


@frozen
class DueNow:
    """The due times at one moment: the newest, the count of older ones since `first_s`, and the next one."""

    due_s: float
    first_s: float
    missed_count: int
    last_missed_s: float
    next_s: float | None


def explain_cron(cron: str) -> str | None:
    """Return the error in cron fields; None if they are valid and have a due time."""
    from cronsim import CronSim, CronSimError

    if len(cron.split()) != FIELDS:
        return f"it has {len(cron.split())} fields, not {FIELDS}: minute, hour, day of month, month, day of week"
    try:
        next(CronSim(cron, datetime(2000, 1, 1, tzinfo=UTC)))
    except CronSimError as error:
        return str(error).removeprefix("Bad ") + " is out of range or malformed"
    except StopIteration:
        return "it does not match any date"
    return None


def find_zone(name: str) -> ZoneInfo | None:
    """Return a time zone of the IANA database; None if it is unknown on this machine."""
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):  # OSError: the name of a folder, such as `Europe`
        return None


def list_faults(spec: ScheduleSpec) -> Iterator[tuple[str, str, str | None]]:
    """Yield the errors in a schedule: the field, a message and a hint."""
    if reason := explain_cron(spec.cron):
        yield "cron", f"invalid cron fields `{spec.cron}`: {reason}", None
    try:
        zone = get_zone(spec)
    except UsageError as error:
        yield "timezone", error.message, _suggest_zone(spec.timezone) or error.hints[-1]
        return
    try:
        read_until_s(spec.until or "2000-01-01", zone)
    except UsageError as error:
        yield "until", error.message, error.hints[0]


def _suggest_zone(name: str) -> str | None:
    from zoneinfo import available_timezones

    return suggest(name, available_timezones())


def find_next(spec: ScheduleSpec, after_s: float) -> float | None:
    """Return the first due time after `after_s`; None if there is none, or none before `until`. Raises UsageError."""
    return next(_list_due(spec, after_s), None)


def find_due(spec: ScheduleSpec, next_s: float, now_s: float) -> DueNow | None:
    """Return the due times at `now_s` if the next due time was `next_s`; None before it. Raises UsageError.

    Example: daily at 02:00, with `next_s` on Monday and `now_s` on Thursday noon: Thursday's due time is due, and the
    three from Monday to Wednesday were missed.
    """
    if now_s < next_s:
        return None
    due_s = _find_newest(spec, next_s, now_s)
    missed = 0 if due_s == next_s else 1
    last_s = next_s
    for each_s in _list_due(spec, next_s):
        if each_s >= due_s or missed >= COUNT_MAX:
            break
        missed, last_s = missed + 1, each_s
    return DueNow(due_s=due_s, first_s=next_s, missed_count=missed, last_missed_s=last_s, next_s=find_next(spec, now_s))


def _find_newest(spec: ScheduleSpec, first_s: float, now_s: float) -> float:
    """Return the newest due time up to `now_s`; `first_s` is one. Reads at most about a day of minutes."""
    for window_s in WINDOWS_S:
        newest_s = None
        for each_s in _list_due(spec, max(first_s, now_s - window_s)):
            if each_s > now_s:
                break
            newest_s = each_s
        if newest_s is not None:
            return newest_s
        if now_s - window_s <= first_s:
            break
    return first_s


def _list_due(spec: ScheduleSpec, after_s: float) -> Iterator[float]:
    zone = get_zone(spec)
    until_s = None if spec.until is None else read_until_s(spec.until, zone)
    before_s = -1.0
    has_wildcard = any(field.startswith("*") for field in spec.cron.split()[:2])
    # In an hour that exists twice, cronsim restarts with the first of the two: drop times that are not later.
    for due_s in (_list_minutes if has_wildcard else _list_moments)(spec.cron, zone, after_s):
        if until_s is not None and due_s > until_s:
            return
        if due_s > max(after_s, before_s):
            before_s = due_s
            yield due_s


def _list_moments(cron: str, zone: tzinfo, after_s: float) -> Iterator[float]:
    from cronsim import CronSim

    for moment in CronSim(cron, datetime.fromtimestamp(after_s, zone)):
        yield moment.timestamp()


def _list_minutes(cron: str, zone: tzinfo, after_s: float) -> Iterator[float]:
    """Yield every matching minute that passes: those of one offset from UTC after another.

    Within a zone, cronsim moves by whole hours, and misses minutes where clocks change by half an hour (Lord Howe).
    """
    begin_s, offset = after_s, _get_offset(zone, after_s)
    while True:
        change_s = None
        for due_s in _list_moments(cron, timezone(offset), begin_s):
            change_s = _find_change_s(zone, begin_s, due_s)
            if change_s is not None:
                break
            yield due_s
            begin_s = due_s
        if change_s is None:
            return  # no due times are left
        begin_s, offset = change_s - 1.0, _get_offset(zone, change_s)  # one may be at the change itself


def _get_offset(zone: tzinfo, time_s: float) -> timedelta:
    return datetime.fromtimestamp(time_s, zone).utcoffset() or timedelta()


def _find_change_s(zone: tzinfo, after_s: float, until_s: float) -> float | None:
    """Return the first second with another offset from UTC than at `after_s + 1`; None if there is none."""
    if zone is UTC:
        return None
    low_s = min(after_s // 1.0 + 1.0, until_s)  # both are whole seconds from here on
    offset = _get_offset(zone, low_s)
    while low_s < until_s:
        high_s = min(until_s, low_s + OFFSET_S_MIN)
        if _get_offset(zone, high_s) != offset:
            while high_s - low_s > 1.0:
                middle_s = (low_s + high_s) // 2
                low_s, high_s = (middle_s, high_s) if _get_offset(zone, middle_s) == offset else (low_s, middle_s)
            return high_s
        low_s = high_s
    return None


def get_zone(spec: ScheduleSpec) -> tzinfo:
    """Return the time zone of a schedule. Raises UsageError if this machine does not know it."""
    if spec.timezone == "UTC":
        return UTC
    zone = find_zone(spec.timezone)
    if zone is None:
        raise UsageError(
            f"unknown time zone `{spec.timezone}`",
            hints=[
                "write a name like `Europe/Paris`",
                "or install the time zones: `pip install tzdata`",
            ],
        )
    return zone


def read_until_s(until: str, zone: tzinfo) -> float:
    """Return the last moment of `2026-12-31`, a whole day, or of `2026-12-31T18:00`; raise UsageError for other text.

    A time with its own offset from UTC (`2026-12-31T18:00Z`) keeps it.
    """
    try:
        if "T" not in until and " " not in until:
            end = datetime.combine(date.fromisoformat(until) + timedelta(days=1), time(), tzinfo=zone)
            return end.timestamp() - 1.0  # due times are whole minutes
        moment = datetime.fromisoformat(until)
        return (moment if moment.tzinfo else moment.replace(tzinfo=zone, fold=1)).timestamp()
    except (ValueError, OverflowError):
        raise UsageError(f"invalid date `{until}`", hints=["write `2026-12-31` or `2026-12-31T18:00`"]) from None
