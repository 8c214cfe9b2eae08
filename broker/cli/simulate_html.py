"""The report of `broker simulate --html`: one HTML file without scripts or external links."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path

from broker.errors import UsageError
from broker.formatting import format_hours, format_usd
from broker.lab.benchmark import Benchmark, pick_evenly
from broker.lab.parts import Scene
from broker.lab.replay import ReplayOutcome, replay
from broker.spot.policies import ORACLES, load_policy

SCENES_SHOWN = 3
WIDTH, LEFT, ROW = 960, 150, 22
LINE = 14  # of a label, in pixels
COLOURS = {"spot": "#3b82c4", "on-demand": "#c98a2b", "start": "#1f2933", "lost": "#d64545", "open": "#cfe3f3"}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; max-width: 1000px; margin: 32px auto; padding: 0 16px; }
h1 { font-size: 24px; margin: 0 0 8px; } h2 { font-size: 17px; margin: 32px 0 8px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: 4px 12px 4px 0; text-align: right; border-bottom: 1px solid #e6e9ee; }
td:first-child, th:first-child { text-align: left; } .facts td { border: 0; text-align: left; padding: 1px 16px 1px 0; }
svg { max-width: 100%; height: auto; } .key span { margin-right: 18px; white-space: nowrap; }
.key i { display: inline-block; width: 12px; height: 12px; margin-right: 5px; }
"""


def write_report(file: Path, study: Benchmark, *, title: str, facts: Sequence[tuple[str, str]]) -> None:
    """Write the report. Raises UsageError where the file cannot be written."""
    text = "\n".join(draw_report(study, title=title, facts=facts)) + "\n"
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}") from None


def draw_report(study: Benchmark, *, title: str, facts: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield the report of a simulation as parts of one HTML page."""
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><h1>{escape(title)}</h1>"
    yield '<table class="facts">'
    yield from (f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in facts)
    yield "</table>"
    yield from _draw_table(study)
    yield "<h2>Cost of every replay, in ascending order</h2>"
    yield from _draw_costs(study)
    yield "<h2>Timelines</h2>"
    yield '<p class="key">'
    for name, words in (
        ("spot", "on spot"), ("on-demand", "on-demand"), ("start", "starting, billed"),
        ("lost", "preempted"), ("open", "spot available"),
    ):  # fmt: skip
        yield f'<span><i style="background:{COLOURS[name]}"></i>{words}</span>'
    yield "</p>"
    for index in pick_evenly(len(study.scenes), SCENES_SHOWN):
        yield from _draw_scene(study, study.scenes[index])
    yield "</body></html>"


def _draw_table(study: Benchmark) -> Iterator[str]:
    names = ("policy", "USD, mean", "USD, p95", "over the optimum", "time, mean", "time, p95", "preemptions", "late")
    yield f"<h2>{len(study.scenes)} replays per policy</h2><table><tr>"
    yield "".join(f"<th>{name}</th>" for name in names) + "</tr>"
    for each in study.scores:
        over = "-" if each.over_optimum is None else f"{each.over_optimum:+.1%}"
        cells = (
            escape(each.policy) + (" (knows the future)" if each.policy in ORACLES else ""), format_usd(each.usd_mean),
            format_usd(each.usd_p95), over, format_hours(each.hours_mean), format_hours(each.hours_p95),
            f"{each.preemptions_mean:.1f}", str(each.late),
        )  # fmt: skip
        yield "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    yield "</table>"


def _draw_costs(study: Benchmark) -> Iterator[str]:
    """Draw one line a policy: the sorted costs of its replays."""
    height, right, bottom = 300, 170, 34
    most = max(each.usd for found in study.outcomes for each in found) * 1.05
    room = WIDTH - 60 - right

    def y(usd: float) -> float:
        return round((height - bottom) * (1 - usd / most) + 4, 1)

    yield f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" font-size="12" role="img" aria-label="costs">'
    for part in range(5):
        usd = most * part / 4.2
        yield f'<line x1="60" x2="{WIDTH - right}" y1="{y(usd)}" y2="{y(usd)}" stroke="#e6e9ee"/>'
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
    """Draw the markets above and one line a policy below, from submission to the last end or the deadline."""
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
    yield f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" font-size="12" role="img" aria-label="timelines">'
    top = 0
    for site in case.sites:
        yield f'<text x="{LEFT - 8}" y="{top + 15}" text-anchor="end">{escape(site.trace.name[-22:])}</text>'
        step, begin = site.find_step(scene.from_hour), 0.0
        while begin < span:
            _, is_open, _ = site.read_step(step)
            end = min(site.read_step(step + 1)[0] - scene.from_hour, span)
            if is_open and end > begin:
                yield _box(x(begin), top + 5, x(end), 12, COLOURS["open"], "spot available")
            begin, step = end, step + 1
        top += ROW
    for name, life in zip(names, lives, strict=True):
        yield f'<text x="{LEFT - 8}" y="{top + 15}" text-anchor="end">{escape(name)}</text>'
        yield from _draw_life(life, top, x, scene)
        yield f'<text x="{x(life.hours) + 5}" y="{top + 15}">{format_usd(life.usd)}</text>'
        top += ROW
    line = x(case.deadline_hours)
    yield f'<line x1="{line}" x2="{line}" y1="0" y2="{top + 6}" stroke="#d64545" stroke-dasharray="4 3"/>'
    yield f'<text x="{line}" y="{top + 22}" text-anchor="middle" fill="#d64545">deadline</text>'
    yield f'<text x="{LEFT}" y="{top + 22}">0</text></svg>'


def _draw_life(life: ReplayOutcome, top: int, x: Callable[[float], float], scene: Scene) -> Iterator[str]:
    for each in life.timeline:
        if each.mode == "waiting":
            continue
        where = scene.case.sites[each.site].trace.name if each.site is not None else ""
        tip = f"{each.mode} at {where}, {format_hours(each.to_hours - each.from_hours)}"
        yield _box(x(each.from_hours), top + 3, x(each.to_hours), 16, COLOURS[each.mode], tip)
        if each.start_hours:
            started = x(each.from_hours + each.start_hours)
            yield _box(x(each.from_hours), top + 3, started, 16, COLOURS["start"], "starting")
        if each.is_lost:
            yield _box(x(each.to_hours) - 2, top, x(each.to_hours), ROW, COLOURS["lost"], "preempted")


def _box(left: float, top: float, right: float, height: float, colour: str, tip: str) -> str:
    wide = max(round(right - left, 1), 0.5)
    shape = f'x="{left}" y="{top}" width="{wide}" height="{height}" fill="{colour}"'
    return f"<rect {shape}><title>{escape(tip)}</title></rect>"
