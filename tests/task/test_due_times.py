"""Due times: later than asked, in order, within `until`, and once where the clocks change."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.errors import TaskError, UsageError
from broker.task.checking import check_task
from broker.task.due_times import COUNT_MAX, explain_cron, find_due, find_next, read_until_s
from broker.task.loader import load_tasks_text
from broker.types import Overlap, ScheduleSpec, Task
from tests.tiers import examples

ZONES = ("UTC", "Europe/Paris", "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata", "America/St_Johns")
CRONS = st.builds(
    lambda minute, hour, day: f"{minute} {hour} {day}",
    st.sampled_from(("0", "30", "*/15", "59", "*")),
    st.sampled_from(("*", "2", "1-3", "0", "23", "*/6")),
    st.sampled_from(("* * *", "* * SUN", "1 * *", "L * *", "* 3,10 *")),
)
SPECS = st.builds(ScheduleSpec, cron=CRONS, timezone=st.sampled_from(ZONES))
TIMES = st.integers(1_700_000_000, 1_900_000_000).map(float)
QUIET = settings(max_examples=examples(60), deadline=None, derandomize=True, database=None)


def at(text: str, zone: str = "UTC", *, fold: int = 0) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone), fold=fold).timestamp()


def list_due(spec: ScheduleSpec, after_s: float, count: int) -> list[float]:
    found: list[float] = []
    while len(found) < count and (next_s := find_next(spec, found[-1] if found else after_s)) is not None:
        found.append(next_s)
    return found


@QUIET
@given(spec=SPECS, after_s=TIMES)
def test_due_times_are_whole_minutes_later_than_asked_and_match_the_cron_fields(
    spec: ScheduleSpec, after_s: float
) -> None:
    found = list_due(spec, after_s, 4)
    assert len(found) == 4 and found[0] > after_s and all(first < second for first, second in pairwise(found))
    for due_s in found:
        local = datetime.fromtimestamp(due_s, ZoneInfo(spec.timezone))
        assert local.second == 0 and due_s % 60 == 0
        hour = spec.cron.split()[1]
        if hour.isdigit() and local.utcoffset() == datetime.fromtimestamp(due_s - 7200, local.tzinfo).utcoffset():
            assert local.hour == int(hour)


@QUIET
@given(spec=SPECS, after_s=TIMES, later_s=st.floats(0, 1e6))
def test_the_next_due_time_is_the_same_from_any_moment_before_it(
    spec: ScheduleSpec, after_s: float, later_s: float
) -> None:
    next_s = find_next(spec, after_s)
    assert next_s is not None
    moment_s = after_s + later_s % (next_s - after_s)
    assert find_next(spec, moment_s) == next_s


@QUIET
@given(spec=SPECS, after_s=TIMES, away_s=st.floats(0, 3e5))
def test_newest_is_due_and_all_others_are_missed(spec: ScheduleSpec, after_s: float, away_s: float) -> None:
    first_s = find_next(spec, after_s)
    assert first_s is not None
    now_s = first_s + away_s
    passed = [first_s]
    while (next_s := find_next(spec, passed[-1])) is not None and next_s <= now_s:
        passed.append(next_s)
    due = find_due(spec, first_s, now_s)
    assert due is not None and due.next_s == next_s
    assert (due.due_s, due.first_s) == (passed[-1], first_s)
    assert due.missed_count == min(len(passed) - 1, COUNT_MAX)
    if 1 < len(passed) <= COUNT_MAX:
        assert due.last_missed_s == passed[-2]


def test_nothing_is_due_before_its_time() -> None:
    spec = ScheduleSpec(cron="0 2 * * *")
    assert find_due(spec, at("2026-11-27T02:00"), at("2026-11-27T01:59:59")) is None


def test_years_of_minutes_are_counted_up_to_the_limit() -> None:
    due = find_due(ScheduleSpec(cron="* * * * *"), at("2020-01-01T00:00"), at("2026-01-01T00:00:30"))
    assert due is not None
    assert (due.missed_count, due.due_s, due.next_s) == (COUNT_MAX, at("2026-01-01T00:00"), at("2026-01-01T00:01"))


def test_rare_due_time_of_long_ago_is_found() -> None:
    spec = ScheduleSpec(cron="0 0 29 2 *")
    due = find_due(spec, at("2024-02-29T00:00"), at("2027-06-01T00:00"))
    assert due is not None and (due.due_s, due.missed_count) == (at("2024-02-29T00:00"), 0)
    assert due.next_s == at("2028-02-29T00:00")


def test_local_time_that_does_not_exist_is_due_once_at_the_first_that_does() -> None:
    """In Paris, 2026-03-29 has no 02:30: clocks go from 02:00 to 03:00."""
    spec = ScheduleSpec(cron="30 2 * * *", timezone="Europe/Paris")
    assert list_due(spec, at("2026-03-28T12:00", "Europe/Paris"), 2) == [
        at("2026-03-29T03:00", "Europe/Paris"), at("2026-03-30T02:30", "Europe/Paris"),
    ]  # fmt: skip


def test_local_time_that_exists_twice_is_due_once_at_the_first() -> None:
    """In Paris, 2026-10-25 has 02:30 twice: clocks go from 03:00 back to 02:00."""
    spec = ScheduleSpec(cron="30 2 * * *", timezone="Europe/Paris")
    first_s = at("2026-10-25T02:30", "Europe/Paris")
    tomorrow_s = at("2026-10-26T02:30", "Europe/Paris")
    assert list_due(spec, at("2026-10-24T12:00", "Europe/Paris"), 2) == [first_s, tomorrow_s]
    for minute in (0, 15, 45):  # also for one who asks in the second of both hours
        again_s = at(f"2026-10-25T02:{minute:02}", "Europe/Paris", fold=1)
        assert again_s > first_s and find_next(spec, again_s) == tomorrow_s


def test_hourly_due_times_follow_the_hours_that_pass() -> None:
    spec = ScheduleSpec(cron="0 * * * *", timezone="Europe/Paris")
    for day in ("2026-03-29", "2026-10-25"):
        found = list_due(spec, at(f"{day}T00:00", "Europe/Paris"), 5)
        assert {second - first for first, second in pairwise(found)} == {3600.0}


def test_wildcard_minutes_of_an_hour_are_due_in_none_or_in_both() -> None:
    spec = ScheduleSpec(cron="*/30 2 * * *", timezone="Europe/Paris")
    spring = list_due(spec, at("2026-03-29T00:00", "Europe/Paris"), 1)
    assert spring == [at("2026-03-30T02:00", "Europe/Paris")]
    autumn = list_due(spec, at("2026-10-25T00:00", "Europe/Paris"), 4)
    assert [each - autumn[0] for each in autumn] == [0.0, 1800.0, 3600.0, 5400.0]


@pytest.mark.parametrize("cron", ["30 * * * *", "*/20 2 * * *", "5 */3 * * *"])
@pytest.mark.parametrize(
    ("zone", "day"),
    [
        ("Australia/Lord_Howe", "2026-04-05"),  # half an hour, back and forth
        ("Australia/Lord_Howe", "2026-10-04"),
        ("Europe/Paris", "2026-03-29"),
        ("America/New_York", "2026-11-01"),
    ],
)
def test_every_matching_minute_is_due_when_the_clocks_change(cron: str, zone: str, day: str) -> None:
    begin_s = at(day, zone) - 7200.0
    minute, hour = cron.split()[:2]

    def matches(field: str, value: int) -> bool:
        return field == "*" or (value % int(field[2:]) == 0 if field.startswith("*/") else value == int(field))

    moments = [datetime.fromtimestamp(begin_s + 60 * number, ZoneInfo(zone)) for number in range(1, 36 * 60)]
    wanted = [each.timestamp() for each in moments if matches(minute, each.minute) and matches(hour, each.hour)]
    assert list_due(ScheduleSpec(cron=cron, timezone=zone), begin_s, len(wanted)) == wanted
    for offset_s in (0.5, 1799.5, 3600.0, 7200.25, 9000.0):  # asked at another time, the answer is the same
        expected = next(each for each in wanted if each > begin_s + offset_s)
        assert find_next(ScheduleSpec(cron=cron, timezone=zone), begin_s + offset_s) == expected


@pytest.mark.parametrize(
    ("until", "last"),
    [
        ("2026-11-27", "2026-11-27T02:00"),
        ("2026-11-28T01:59", "2026-11-27T02:00"),
        ("2026-11-28 02:00", "2026-11-28T02:00"),
        ("20261127", "2026-11-27T02:00"),  # ISO dates without dashes are whole days, too
        ("2026-11-28T01:00Z", "2026-11-28T02:00"),  # in Paris, 02:00
        ("2026-11-28T02:00+09:00", "2026-11-27T02:00"),
    ],
)
def test_until_includes_its_day_or_its_minute(until: str, last: str) -> None:
    spec = ScheduleSpec(cron="0 2 * * *", timezone="Europe/Paris", until=until)
    found = list_due(spec, at("2026-11-25T12:00", "Europe/Paris"), 9)
    assert found[-1] == at(last, "Europe/Paris")
    due = find_due(spec, found[0], at("2027-01-01T00:00"))
    assert due is not None and (due.due_s, due.next_s) == (found[-1], None)


def test_unknown_zone_and_date_are_refused() -> None:
    with pytest.raises(UsageError, match="unknown time zone"):
        find_next(ScheduleSpec(cron="0 2 * * *", timezone="Europe"), 0.0)
    with pytest.raises(UsageError, match="invalid date"):
        read_until_s("2026-02-30", UTC)


def load(text: str) -> Task:
    (task,) = load_tasks_text(f"name: x\nrun: x\n{text}", "task.yaml")
    return task


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('schedule: "0 2 * * *"', ScheduleSpec(cron="0 2 * * *")),
        ("schedule: 0 2 * * mon-fri", ScheduleSpec(cron="0 2 * * mon-fri")),
        ('schedule: {cron: "0  2 L * *", timezone: Asia/Kolkata, overlap: QUEUE, until: 2027-01-31}',
         ScheduleSpec(cron="0 2 L * *", timezone="Asia/Kolkata", overlap=Overlap.QUEUE, until="2027-01-31")),
    ],
)  # fmt: skip
def test_schedule_is_read_from_a_task_file(text: str, expected: ScheduleSpec) -> None:
    assert load(text).schedule == expected


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ('schedule: "61 2 * * *"', "minute is out of range", None),
        ('schedule: "0 0 30 2 *"', "invalid cron fields", None),
        ('schedule: "0 2 * * * *"', "must be five cron fields", "quotes"),
        ('schedule: "@daily"', "must be five cron fields", '"0 0 * * *"'),
        ('schedule: {cron: "0 2 * * *", timezone: Europe/Pariss}', "unknown time zone", "`Europe/Paris`"),
        ('schedule: {cron: "0 2 * * *", until: 2026-02-30}', "invalid date", "2026-12-31"),
        ('schedule: {cron: "0 2 * * *", overlap: kill}', "must be one of skip, queue", None),
        ("schedule: {timezone: UTC}", "requires `cron`", None),
        ("schedule: hourly", "must be five cron fields", None),
    ],
)
def test_invalid_schedule_is_a_fault_with_its_position(text: str, message: str, hint: str | None) -> None:
    with pytest.raises(TaskError) as caught:
        load(text)
    (issue,) = caught.value.issues
    assert issue.line == 3 and message in issue.message
    assert hint is None or hint in (issue.hint or "")


def test_schedule_of_one_task_among_several_is_a_fault() -> None:
    with pytest.raises(TaskError, match="must be the only one in its file"):
        load_tasks_text('name: a\nrun: x\nschedule: "0 2 * * *"\n---\nname: b\nrun: x\n', "task.yaml")


def test_schedule_of_a_task_from_python_is_checked() -> None:
    check_task(Task(run="x", schedule=ScheduleSpec(cron="0 2 * * *")))
    for spec in (ScheduleSpec(cron="x"), ScheduleSpec(cron="0 2 * * *", timezone="../UTC")):
        with pytest.raises(TaskError, match="`schedule"):
            check_task(Task(run="x", schedule=spec))


def test_reason_for_an_invalid_cron_names_the_field() -> None:
    assert explain_cron("0 2 * * *") is None
    assert explain_cron("0 25 * * *") == "hour is out of range or malformed"
    assert "6 fields" in (explain_cron("0 0 2 * * *") or "")


def test_due_times_at_and_around_each_of_them() -> None:
    spec, day_s = ScheduleSpec(cron="0 2 * * *"), 86400.0
    monday_s = at("2026-01-05T02:00")
    assert find_due(spec, monday_s, monday_s - 1.0) is None
    now = find_due(spec, monday_s, monday_s)
    assert now is not None and (now.due_s, now.missed_count, now.next_s) == (monday_s, 0, monday_s + day_s)
    later = find_due(spec, monday_s, monday_s + day_s)
    assert later is not None and (later.due_s, later.missed_count) == (monday_s + day_s, 1)
    thursday = find_due(spec, monday_s, monday_s + 3 * day_s + 36000.0)
    assert thursday is not None and (thursday.due_s, thursday.missed_count) == (monday_s + 3 * day_s, 3)
    assert (thursday.first_s, thursday.last_missed_s) == (monday_s, monday_s + 2 * day_s)
    assert thursday.next_s == monday_s + 4 * day_s


def test_time_that_exists_twice_ends_with_its_second_occurrence() -> None:
    """On 25 October 2026, clocks in Berlin go from 03:00 back to 02:00."""
    assert read_until_s("2026-10-25T02:30", ZoneInfo("Europe/Berlin")) == at("2026-10-25T01:30")
