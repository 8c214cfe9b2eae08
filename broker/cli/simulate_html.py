"""The report of `broker simulate --html`: one HTML file without scripts or external links."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path

from broker.dashboard.html import Markup, element, make_scrollable, table
from broker.dashboard.paper import save_paper, write_paper
from broker.formatting import format_hours, format_usd
from broker.lab.benchmark import Benchmark, pick_evenly
from broker.lab.parts import Scene
from broker.lab.replay import ReplayOutcome, replay
from broker.spot.policies import ORACLES, load_policy

SCENES_SHOWN = 3
WIDTH, LEFT, ROW = 960, 150, 22
LINE = 14  # height of a label, in pixels
# class of a bar -> its meaning
KEYS = {
    "spot": "on spot", "on-demand": "on-demand", "start": "starting, billed", "lost": "preempted",
    "open": "spot available",
}  # fmt: skip


def write_report(file: Path, study: Benchmark, *, title: str, facts: Sequence[tuple[str, str]]) -> None:
    """Write the report. Raises UsageError if the file cannot be written."""
    save_paper(file, draw_report(study, title=title, facts=facts))


def draw_report(study: Benchmark, *, title: str, facts: Sequence[tuple[str, str]]) -> str:
    """Draw the report of a simulation as one HTML page in the style of `broker report`."""
    rows = [element("div", element("dt", name), element("dd", text)) for name, text in facts]
    keys = [element("span", element("i", class_=kind), f" {words}") for kind, words in KEYS.items()]
    scenes = [study.scenes[index] for index in pick_evenly(len(study.scenes), SCENES_SHOWN)]
    return write_paper(
        title,
        element("dl", *rows, class_="terms"),
        *_draw_table(study),
        element("h2", "Cost of every replay, in ascending order"),
        make_scrollable(Markup("".join(_draw_costs(study))), "Costs"),
        element("h2", "Timelines"),
        element("p", *keys, class_="key"),
        *(make_scrollable(Markup("".join(_draw_scene(study, scene))), "Timeline") for scene in scenes),
    )


def _draw_table(study: Benchmark) -> Iterator[Markup]:
    heads = ["Policy", "USD, mean", "USD, p95", "Over the optimum", "Time, mean", "Time, p95", "Preemptions", "Late"]
    rows = [
        [
            each.policy + (" (knows the future)" if each.policy in ORACLES else ""), format_usd(each.usd_mean),
            format_usd(each.usd_p95), "-" if each.over_optimum is None else f"{each.over_optimum:+.1%}",
            format_hours(each.hours_mean), format_hours(each.hours_p95), f"{each.preemptions_mean:.1f}", str(each.late),
        ]
        for each in study.scores
    ]  # fmt: skip
    yield element("h2", f"{len(study.scenes)} replays per policy")
    yield table(heads, rows, caption="Policies", right=heads[1:])


def _draw_costs(study: Benchmark) -> Iterator[str]:
    """Draw one line per policy: the sorted costs of its replays."""
    height, right, bottom = 300, 170, 34
    most = max(each.usd for found in study.outcomes for each in found) * 1.05
    room = WIDTH - 60 - right

    def y(usd: float) -> float:
        return round((height - bottom) * (1 - usd / most) + 4, 1)

    yield f'<svg viewBox="0 0 {WIDTH} {height}" class="chart bars" role="img" aria-label="costs">'
    for part in range(5):
        usd = most * part / 4.2
        yield f'<line x1="60" x2="{WIDTH - right}" y1="{y(usd)}" y2="{y(usd)}" class="grid"/>'
        yield f'<text x="54" y="{y(usd) + 4}" text-anchor="end">{format_usd(usd)}</text>'
    labels = spread_labels([y(max(each.usd for each in found)) for found in study.outcomes], height - 6)
    for number, (score, found, label) in enumerate(zip(study.scores, study.outcomes, labels, strict=True)):
        ranked = sorted(each.usd for each in found)
        step = room / max(len(ranked) - 1, 1)
        points = " ".join(f"{60 + step * index:.1f},{y(usd)}" for index, usd in enumerate(ranked))
        colour = f"hsl({number * 360 // len(study.scores)} 55% 42%)"
        yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        yield f'<text x="{WIDTH - right + 8}" y="{label}" fill="{colour}">{escape(score.policy)}</text>'
    yield "</svg>"


def spread_labels(heights: Sequence[float], lowest: float) -> list[float]:
    """Move overlapping labels apart by a line: first down, then up from `lowest`."""
    placed, last = [0.0] * len(heights), -100.0
    ranked = sorted(range(len(heights)), key=lambda each: heights[each])
    for index in ranked:
        last = placed[index] = max(heights[index] + 4, last + LINE)
    last = lowest + LINE
    for index in reversed(ranked):
        last = placed[index] = round(min(placed[index], last - LINE), 1)
    return placed


def _draw_scene(study: Benchmark, scene: Scene) -> Iterator[str]:
    """Draw the markets above and one line per policy below, from submission to the last end or the deadline."""
    case = scene.case
    names = [score.policy for score in study.scores]
    lives = [
        replay(case, load_policy(name), scene.from_hour, is_oracle=name in ORACLES, keeps_timeline=True)
        for name in names
    ]
    span = max(case.deadline_hours, *(live.hours for live in lives)) * 1.01
    height = ROW * (len(case.sites) + len(names)) + 40
    scale = (WIDTH - LEFT - 90) / span

    def x(hours: float) -> float:
        return round(LEFT + hours * scale, 1)

    yield f"<h3>Submitted at hour {scene.from_hour:.1f} of the traces</h3>"
    yield f'<svg viewBox="0 0 {WIDTH} {height}" class="chart bars" role="img" aria-label="timelines">'
    top = 0
    for site in case.sites:
        yield f'<text x="{LEFT - 8}" y="{top + 15}" text-anchor="end">{escape(site.trace.name[-22:])}</text>'
        step, begin = site.find_step(scene.from_hour), 0.0
        while begin < span:
            _, is_open, _ = site.read_step(step)
            end = min(site.read_step(step + 1)[0] - scene.from_hour, span)
            if is_open and end > begin:
                yield _box(x(begin), top + 5, x(end), 12, "open", "spot available")
            begin, step = end, step + 1
        top += ROW
    for name, life in zip(names, lives, strict=True):
        yield f'<text x="{LEFT - 8}" y="{top + 15}" text-anchor="end">{escape(name)}</text>'
        yield from _draw_life(life, top, x, scene)
        yield f'<text x="{x(life.hours) + 5}" y="{top + 15}">{format_usd(life.usd)}</text>'
        top += ROW
    line = x(case.deadline_hours)
    yield f'<line x1="{line}" x2="{line}" y1="0" y2="{top + 6}" class="lost"/>'
    yield f'<text x="{line}" y="{top + 22}" class="bad" text-anchor="middle">deadline</text>'
    yield f'<text x="{LEFT}" y="{top + 22}">0</text></svg>'


def _draw_life(life: ReplayOutcome, top: int, x: Callable[[float], float], scene: Scene) -> Iterator[str]:
    for each in life.timeline:
        if each.mode == "waiting":
            continue
        where = scene.case.sites[each.site].trace.name if each.site is not None else ""
        tip = f"{each.mode} at {where}, {format_hours(each.to_hours - each.from_hours)}"
        yield _box(x(each.from_hours), top + 3, x(each.to_hours), 16, each.mode, tip)
        if each.start_hours:
            started = x(each.from_hours + each.start_hours)
            yield _box(x(each.from_hours), top + 3, started, 16, "start", "starting")
        if each.is_lost:
            yield _box(x(each.to_hours) - 2, top, x(each.to_hours), ROW, "lost", "preempted")


def _box(left: float, top: float, right: float, height: float, kind: str, tip: str) -> str:
    wide = max(round(right - left, 1), 0.5)
    shape = f'x="{left}" y="{top}" width="{wide}" height="{height}" class="{kind}"'
    return f"<rect {shape}><title>{escape(tip)}</title></rect>"
