"""Draw one rehearsal as an SVG timeline: steps, checkpoints, preemptions and cost over simulated time.

python docs/pictures/make_rehearsal.py          draw `rehearsal.svg` from the recorded run in `rehearsal.json`
python docs/pictures/make_rehearsal.py --run    rehearse `task_templates/ddp.yaml` first and record that run
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

FOLDER = Path(__file__).parent
RECORD, PICTURE = FOLDER / "rehearsal.json", FOLDER / "rehearsal.svg"
TASK = "task_templates/ddp.yaml"

WIDTH, HEIGHT = 860, 430
LEFT, RIGHT = 64, 24
STEPS_TOP, STEPS_BOTTOM = 84, 270
COST_TOP, COST_BOTTOM = 316, 384
INK, MUTED, GRID = "#1f2933", "#65707d", "#e6e9ee"
BLUE, RED, AMBER, GREEN = "#2f6fb5", "#c93a3a", "#b7791f", "#2f855a"

# `  3h 58m * preempted: ...`: simulated time, then `*` for an event, `!` for the market, two spaces for progress.
LINE = re.compile(r"^\s*(?P<hours>\d+)h (?P<minutes>\d+)m (?P<kind>[*! ]) +(?P<text>.*)$")
STEP = re.compile(r"\bstep (\d+)/(\d+)")
SAVED = re.compile(r"\bcheckpoint (\d+)")
LOST = re.compile(r"^preempted: .* after step (\d+)")
SPENT = re.compile(r"([\d,.]+) USD so far")


@dataclass(kw_only=True)
class Timeline:
    """Hours are simulated. A checkpoint is placed at the time when the run passed its step."""

    steps: list[list[tuple[float, int]]] = field(default_factory=list)  # one list for each attempt
    checkpoints: list[tuple[float, int]] = field(default_factory=list)
    preemptions: list[float] = field(default_factory=list)
    spent: list[tuple[float, float]] = field(default_factory=lambda: [(0.0, 0.0)])
    hours: float = 0.0
    steps_total: int = 0


def main() -> None:
    """Write the picture; with `--run`, rehearse first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="rehearse the task again and record the run")
    if parser.parse_args().run:
        RECORD.write_text(json.dumps(record_rehearsal(), indent=1) + "\n")
    PICTURE.write_text(draw(json.loads(RECORD.read_text())))


def record_rehearsal() -> dict[str, Any]:
    """Run the command that the picture shows; raise CalledProcessError if it fails."""
    command = ["-m", "broker", "rehearse", TASK, "--json"]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True)
    return {
        "command": f"broker rehearse {TASK}",
        "story": done.stderr.splitlines(),
        "result": json.loads(done.stdout),
    }


def read_timeline(story: Sequence[str]) -> Timeline:
    """Parse steps, checkpoints, preemptions and cost from the lines that a rehearsal prints."""
    found = Timeline()
    newest_saved, is_new_attempt = 0, True
    for line in story:
        match = LINE.match(line)
        if match is None:
            continue
        found.hours = int(match["hours"]) + int(match["minutes"]) / 60
        if match["kind"] == "!":
            found.preemptions.append(found.hours)
            is_new_attempt = True
        if lost := LOST.search(match["text"]):
            found.steps[-1].append((found.hours, int(lost[1])))
        step = STEP.search(match["text"])
        if match["kind"] != " " or step is None:
            continue
        if is_new_attempt:
            found.steps.append([])
            is_new_attempt = False
        found.steps[-1].append((found.hours, int(step[1])))
        found.steps_total = int(step[2])
        if (saved := SAVED.search(match["text"])) and int(saved[1]) > newest_saved:
            newest_saved = int(saved[1])
            found.checkpoints.append((find_hours(found.steps[-1], newest_saved), newest_saved))
        if spent := SPENT.search(match["text"]):
            found.spent.append((found.hours, float(spent[1].replace(",", ""))))
    return found


def find_hours(points: Sequence[tuple[float, int]], step: int) -> float:
    """Return the time at which an attempt passed a step, interpolated between its two nearest reports."""
    for (before, low), (after, high) in pairwise(points):
        if low <= step <= high and low < high:
            return before + (after - before) * (step - low) / (high - low)
    return points[-1][0]


def draw(record: dict[str, Any]) -> str:
    """Return the whole picture. Raise ValueError if the story shows no attempt."""
    timeline, result = read_timeline(record["story"]), record["result"]
    if not timeline.steps:
        raise ValueError("the recorded story has no progress lines")
    chart = _Chart(timeline, ondemand_usd=result["summary"]["ondemand_usd"])
    return "\n".join([*_draw_frame(record), *chart.draw_steps(result), *chart.draw_cost(result), "</svg>"]) + "\n"


def _draw_frame(record: dict[str, Any]) -> Iterator[str]:
    summary, repeats = record["result"]["summary"], record["result"]["repeats"]
    outcome = (
        f"{record['result']['status']}: {summary['steps']} of {summary['steps_total']} steps, "
        f"preemptions: {record['result']['preemptions']}, "
        f"{repeats['equal']} of {repeats['steps']} repeated losses are bit-identical, "
        f"{summary['paid_usd']:.2f} USD instead of {summary['ondemand_usd']:.2f} on demand"
    )
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="{INK}" role="img">'
    )
    yield f"<title>{escape(outcome)}</title>"
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff"/>'
    yield (
        f'<text x="{LEFT}" y="30" font-family="ui-monospace, Menlo, Consolas, monospace" font-size="15" '
        f'font-weight="600">$ {escape(record["command"])}</text>'
    )
    yield f'<text x="{LEFT}" y="52" font-size="11.5" fill="{MUTED}">{escape(outcome)}</text>'


class _Chart:
    def __init__(self, timeline: Timeline, *, ondemand_usd: float) -> None:
        self.timeline = timeline
        self.ondemand_usd = ondemand_usd

    def x(self, hours: float) -> float:
        return round(LEFT + hours / self.timeline.hours * (WIDTH - LEFT - RIGHT), 1)

    def y_step(self, step: float) -> float:
        return round(STEPS_BOTTOM - step / self.timeline.steps_total * (STEPS_BOTTOM - STEPS_TOP), 1)

    def y_usd(self, usd: float) -> float:
        """Return the position of an amount; both lines share one axis, whose top is the on-demand bill."""
        return round(COST_BOTTOM - usd / self.ondemand_usd * (COST_BOTTOM - COST_TOP), 1)

    def draw_steps(self, result: dict[str, Any]) -> Iterator[str]:
        """Draw one line for each attempt, a dot for each checkpoint, and a red line for each preemption."""
        for part in range(5):
            step = self.timeline.steps_total * part // 4
            y = self.y_step(step)
            yield f'<line x1="{LEFT}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}" stroke="{GRID}"/>'
            yield f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end" fill="{MUTED}">{step}</text>'
        yield f'<text x="{LEFT - 8}" y="{STEPS_TOP - 14}" text-anchor="end" fill="{MUTED}">step</text>'
        for number, (points, place) in enumerate(zip(self.timeline.steps, result["places"], strict=False), start=1):
            yield self._draw_line([(self.x(hours), self.y_step(step)) for hours, step in points], BLUE)
            label = escape(f"attempt {number}: {place}")
            at = (points[0][0] + points[-1][0]) / 2
            yield f'<text x="{self.x(at)}" y="{STEPS_BOTTOM + 18}" text-anchor="middle">{label}</text>'
        for hours, step in self.timeline.checkpoints:
            yield f'<circle cx="{self.x(hours)}" cy="{self.y_step(step)}" r="3.5" fill="{GREEN}"/>'
        yield f'<circle cx="{WIDTH - RIGHT - 74}" cy="{STEPS_TOP - 18}" r="3.5" fill="{GREEN}"/>'
        yield f'<text x="{WIDTH - RIGHT}" y="{STEPS_TOP - 14}" text-anchor="end">checkpoint</text>'
        for hours, resume in zip(self.timeline.preemptions, result["resumes"], strict=False):
            x = self.x(hours)
            yield f'<line x1="{x}" y1="{STEPS_TOP}" x2="{x}" y2="{COST_BOTTOM}" stroke="{RED}" stroke-dasharray="4 3"/>'
            label = f"preempted at step {resume['last_step']}, resumed from {resume['begin_step']}"
            yield f'<text x="{x + 6}" y="{STEPS_TOP + 12}" fill="{RED}">{label}</text>'

    def draw_cost(self, result: dict[str, Any]) -> Iterator[str]:
        """Draw the cost so far on spot, and the cost of the same hours on-demand."""
        paid_usd, hours = result["summary"]["paid_usd"], self.timeline.hours
        for usd in (0.0, self.ondemand_usd):
            y = self.y_usd(usd)
            yield f'<line x1="{LEFT}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}" stroke="{GRID}"/>'
            yield f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end" fill="{MUTED}">{usd:.0f}</text>'
        yield f'<text x="{LEFT - 8}" y="{COST_TOP - 14}" text-anchor="end" fill="{MUTED}">USD</text>'
        ends = [(self.x(0), self.y_usd(0)), (self.x(hours), self.y_usd(self.ondemand_usd))]
        yield self._draw_line(ends, MUTED, dashes="2 4")
        yield self._draw_line([(self.x(at), self.y_usd(usd)) for at, usd in self.timeline.spent], AMBER)
        yield f'<text x="{self.x(hours * 0.72)}" y="{COST_TOP + 14}" text-anchor="end" fill="{MUTED}">on demand</text>'
        y = self.y_usd(paid_usd) - 6
        yield f'<text x="{WIDTH - RIGHT}" y="{y}" text-anchor="end" fill="{AMBER}">spot: {paid_usd:.2f}</text>'
        for tick in range(0, int(hours) + 1, 2):
            yield (
                f'<text x="{self.x(tick)}" y="{COST_BOTTOM + 18}" text-anchor="middle" fill="{MUTED}">{tick} h</text>'
            )
        words = "simulated time; the training processes are real"
        yield f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end" fill="{MUTED}">{words}</text>'

    @staticmethod
    def _draw_line(points: Sequence[tuple[float, float]], colour: str, *, dashes: str = "") -> str:
        path = " ".join(f"{x},{y}" for x, y in points)
        style = f' stroke-dasharray="{dashes}"' if dashes else ""
        return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{style}/>'


if __name__ == "__main__":
    main()
