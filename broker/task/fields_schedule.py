"""The field `schedule`: the recurring start times of a managed job."""

from __future__ import annotations

from broker.task.due_times import WORDS, list_faults
from broker.task.reading import Reader
from broker.task.shapes import Choice, Either, Text
from broker.task.tables import Field, Section, Table
from broker.task.yaml_reader import Marked
from broker.types.schedules import Overlap, ScheduleSpec

_FIELD = r"[0-9A-Za-z*,/#-]{1,100}"


class CronText(Text):
    """Five cron fields as one text; `explain_cron` checks them afterwards."""

    def hint(self, marked: Marked) -> str | None:
        """Return the fields that a word such as `@daily` means."""
        if isinstance(marked.value, str) and (found := WORDS.get(marked.value.strip().lower())):
            return f'write `"{found}"`'
        return "put all five in quotes"


_CRON = CronText(pattern=rf" *{_FIELD}(?: +{_FIELD}){{4}} *", expected='five cron fields like `"0 2 * * *"`')

SCHEDULE = Table(
    name="schedule",
    about="Due times of a managed job (broker extension).",
    fields={
        "cron": Field(
            shape=_CRON, is_required=True, about="Minute, hour, day of month, month and day of week, as in a crontab.",
            examples=("0 2 * * *", "*/30 8-18 * * MON-FRI"),
        ),
        "timezone": Field(
            shape=Text(pattern=r"[A-Za-z][A-Za-z0-9_+-]*(?:/[A-Za-z0-9_+-]+)*", expected="a name like `Europe/Paris`"),
            about="Time zone of `cron` and `until`, as named in the IANA database (default: UTC).",
            examples=("Europe/Paris",),
        ),
        "overlap": Field(
            shape=Choice(words=tuple(each.value for each in Overlap)),
            about="If the previous job has not ended at a due time, `skip` that due time (default) or `queue` it until "
            "the job ends; at most one due time waits.",
        ),
        "until": Field(
            shape=Text(
                pattern=r"[0-9]{4}-[0-9]{2}-[0-9]{2}(?:[T ][0-9]{2}:[0-9]{2}(?::[0-9]{2})?)?",
                expected="a date like `2026-12-31` or a time like `2026-12-31T18:00`",
            ),
            about="Last date or time at which a job may start; a date includes the whole day.",
            examples=("2026-12-31",),
        ),
    },
)  # fmt: skip
SCHEDULE_SHAPE = Either(shapes=(_CRON, SCHEDULE))


def read_schedule(reader: Reader, section: Section) -> ScheduleSpec | None:
    """Read `schedule` of a task, and report cron fields, time zones and dates that do not exist."""
    value = section.get("schedule")
    if value is None:
        return None
    marked = section.marks["schedule"]
    if not isinstance(value, Section):
        spec = ScheduleSpec(cron=" ".join(value.split()))
        marks = {"cron": marked}
    else:
        if value.get("cron") is None:
            return None  # reported
        spec = ScheduleSpec(
            cron=" ".join(value.get("cron").split()),
            timezone=value.get("timezone", ScheduleSpec.timezone),
            overlap=Overlap(value.get("overlap", ScheduleSpec.overlap)),
            until=value.get("until"),
        )
        marks = dict(value.marks)
    for field, message, hint in list_faults(spec):
        reader.fault(marks[field], message, hint)
    return spec
