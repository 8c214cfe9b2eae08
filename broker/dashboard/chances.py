"""Show the chance of meeting a job's deadline over time, as a chart and as a table of the same points."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from broker.app.deadline_chances import ChancePoint, Moment
from broker.dashboard.html import Markup, element, join, show_key, table
from broker.dashboard.progress import BOTTOM, HEIGHT, TICKS, TOP, draw_grid, make_chart, to_x, to_y
from broker.formatting import format_duration, format_hours, format_second
from broker.frozen import frozen
from broker.optimizer.explain import show_chance
from broker.types.forecasts import JobForecast

KEPT_S = 60.0  # for a live job: each reading takes the time of a plan
JOBS_MAX = 100
MEANING = {
    Moment.SUBMITTED: "submitted",
    Moment.STARTED: "attempt started",
    Moment.LOST: "attempt ended",
    Moment.DECIDED: "policy decided",
    Moment.NOW: "now",
}
KEY = {"on-demand": "under the policy", "spot": "staying on spot to the end", "lost": "an attempt ended"}
HEADS = ["Time", "Moment", "Work left", "Time left", "Chance", "On spot to the end"]


@frozen
class JobExpectation:
    """The chance of a job's deadline over time, and the forecast of its remainder."""

    chances: tuple[ChancePoint, ...] = ()
    forecast: JobForecast | None = None


class ExpectationCache:
    """The expectations of recently shown jobs. That of a live job is read again after `KEPT_S`, of an ended one not."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[float, bool, JobExpectation]] = {}

    def get(self, job_id: int, *, now_s: float, is_ended: bool) -> JobExpectation | None:
        """Return the expectation of a job; None if it must be read."""
        if (known := self._known.get(job_id)) is None:
            return None
        read_s, was_ended, expectation = known
        is_fresh = was_ended if is_ended else now_s - read_s < KEPT_S
        return expectation if is_fresh else None

    def put(self, job_id: int, expectation: JobExpectation, *, now_s: float, is_ended: bool) -> None:
        """Keep the expectation of a job; beyond `JOBS_MAX` jobs, the oldest entry is dropped."""
        self._known.pop(job_id, None)
        self._known[job_id] = (now_s, is_ended, expectation)
        if len(self._known) > JOBS_MAX:
            del self._known[next(iter(self._known))]


def show_chances(points: Sequence[ChancePoint]) -> Markup:
    """Show the chance of meeting the deadline, and that of staying on spot to the end; nothing without points."""
    if not points:
        return Markup("")
    rows = [
        [
            format_second(each.time_s), MEANING[each.moment],
            format_hours(each.work_left_hours), format_hours(each.time_left_hours), _show_share(each.chance),
            _show_share(each.spot_chance),
        ]
        for each in reversed(points)
    ]  # fmt: skip
    about = "Computed from the work left at each moment, at current prices. The policy switches to on-demand in time."
    shown = table(HEADS, rows, caption="Chance of the deadline", right=HEADS[2:])
    return join(
        [
            element("h2", "Chance of the deadline"),
            join([_draw(points), show_key(KEY)]) if len(points) > 1 else None,
            element(
                "details",
                element("summary", f"Table of {len(points)} points" if len(points) > 1 else "Table of one point"),
                shown,
            ),
            element("p", about, class_="faint"),
        ]
    )


def _show_share(share: float | None) -> str:
    return "-" if share is None else show_chance(share)


def _draw(points: Sequence[ChancePoint]) -> Markup:
    begin_s, end_s = points[0].time_s, max(points[-1].time_s, points[0].time_s + 1)
    span_s = end_s - begin_s
    parts = [
        *draw_grid(
            [(format_duration(span_s * tick / TICKS), tick / TICKS) for tick in range(TICKS + 1)],
            [(f"{share:.0%}", share) for share in (0.0, 0.5, 1.0)],
        )
    ]

    def curve(kind: str, tip: str, read: Callable[[ChancePoint], float | None]) -> None:
        places = [
            (to_x((each.time_s - begin_s) / span_s), to_y(share))
            for each in points
            if (share := read(each)) is not None
        ]
        if places:
            text = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(element("polyline", element("title", tip), points=text, class_=f"curve {kind}"))

    curve("spot", "staying on spot to the end", lambda each: each.spot_chance)
    curve("on-demand", "under the policy", lambda each: each.chance)
    for each in points:
        if each.moment is Moment.LOST:
            x = f"{to_x((each.time_s - begin_s) / span_s):.1f}"
            parts.append(element("line", x1=x, x2=x, y1=TOP, y2=HEIGHT - BOTTOM, class_="lost"))
    first, last = (_show_share(each.chance) for each in (points[0], points[-1]))
    return make_chart(
        f"Chance of the deadline over time: {first} at first, {last} at last", parts, hatch_id="hatch-chance"
    )
