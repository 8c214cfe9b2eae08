"""Replays of jobs over recorded markets under the production policy, written as the table that `plan` reads.

    python -m broker.lab.recorded_runs DIR broker/spot/data/recorded_runs.json

A *scenario* is a market (one recording, or several aligned recordings of one family as places that the job may move
between) and an hour of submission. Each is replayed over one grid of work, deadline and start-up time, so that the same
scenario can be interpolated between the nodes of the grid. A folder below DIR that holds recordings is one family.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from broker.lab.markets import make_site
from broker.lab.replay import Case, ReplayOutcome, replay
from broker.lab.trace_files import read_traces
from broker.lab.traces import Trace
from broker.spot.policies import load_policy
from broker.spot.recorded_runs import DEADLINES, STARTS_HOURS, WORKS_HOURS

HOURS_A_MARKET = 4  # hours of submission in each market
GROUPS = {3: 2, 6: 1}  # places in a group -> groups drawn from each family
ENDLESS = 20.0  # deadline of a job that runs on spot alone, as a multiple of its work


@dataclass(frozen=True, kw_only=True)
class RecordedMarket:
    """Recordings of the places where a job may run."""

    family: str
    traces: tuple[Trace, ...]
    is_assembled: bool = False  # its places were not recorded at the same time

    @property
    def name(self) -> str:
        """Name of the family and of its zones."""
        return self.family + "/" + "+".join(trace.name for trace in self.traces)


@dataclass(frozen=True, kw_only=True)
class ScenarioRuns:
    """One scenario: its market and hour of submission, and one run for each cell.

    `runs` holds (spot hours, on-demand hours, hours, preemptions), in the order of `list_cells`.
    """

    market: str
    family: str
    places: int
    from_hour: float
    is_open: bool
    is_assembled: bool
    runs: tuple[tuple[float, float, float, int], ...]


def list_cells() -> Iterator[tuple[float, float | None, float]]:
    """Yield (work hours, deadline over work or None for spot alone, start-up hours) of each cell."""
    yield from itertools.product(WORKS_HOURS, (*DEADLINES, None), STARTS_HOURS)


def read_families(folder: Path) -> dict[str, list[Trace]]:
    """Read the recordings below a folder by family; of several folders with one name, the last is taken."""
    found = {place.name: read_traces(place) for place in sorted({file.parent for file in folder.rglob("*.json")})}
    return dict(sorted(found.items()))


def list_markets(families: dict[str, list[Trace]], *, seed: int = 1) -> list[RecordedMarket]:
    """List each recording alone, and groups of places from each family.

    Groups are drawn from the recordings of a family that has enough. Of the others, a group is *assembled*: copies of
    their recordings, which begin at other hours, as places that open and close independently. Example: two recordings
    A and B make the groups `A + B + A@0.5` and `A + B@0.5 + A@0.5`, where A@0.5 begins in the middle of A.
    """
    found = list[RecordedMarket]()
    for family, traces in families.items():
        found += [RecordedMarket(family=family, traces=(trace,)) for trace in traces]
        chance = random.Random(f"{family}/{seed}")
        for size, count in GROUPS.items():
            if len(traces) >= size:
                groups = {tuple(sorted(chance.sample(range(len(traces)), size))) for _ in range(count)}
                found += [
                    RecordedMarket(family=family, traces=tuple(traces[index] for index in group))
                    for group in sorted(groups)
                ]
            else:
                found += [
                    RecordedMarket(family=family, traces=_assemble(traces, size, number), is_assembled=True)
                    for number in range(count)
                ]
    return found


def _assemble(traces: Sequence[Trace], size: int, number: int) -> tuple[Trace, ...]:
    """Return `size` places, each a recording that begins at another hour than the other copies of it.

    The copies of one recording are spread evenly over its length. `number` moves them within their distances.
    """
    copies = math.ceil(size / len(traces))
    found = list[Trace]()
    for index in range(size):
        trace, copy = traces[index % len(traces)], index // len(traces)
        share = (copy + number * (index % len(traces) + 1) / (2 * len(traces) + 1)) / copies % 1.0
        found.append(trace.begin_at(share, name=f"{trace.name}@{share:.2g}") if share else trace)
    return tuple(found)


def replay_markets(markets: Sequence[RecordedMarket], *, hours: int, processes: int = 1) -> list[ScenarioRuns]:
    """Replay every cell in every market at `hours` evenly spaced hours of submission."""
    works = [(tuple(markets), cell, hours) for cell in list_cells()]
    if processes == 1:
        cells = [_replay_cell(*each) for each in works]
    else:
        with multiprocessing.Pool(processes) as pool:
            cells = pool.starmap(_replay_cell, works, chunksize=1)
    scenarios = [(market, hour) for market in markets for hour in _spread_hours(market, hours)]
    return [
        _make_scenario(market, hour, tuple(cell[index] for cell in cells))
        for index, (market, hour) in enumerate(scenarios)
    ]


def _spread_hours(market: RecordedMarket, count: int) -> list[float]:
    longest = max(trace.hours for trace in market.traces)
    return [longest * (index + 0.5) / count for index in range(count)]


def _replay_cell(
    markets: Sequence[RecordedMarket], cell: tuple[float, float | None, float], hours: int
) -> list[tuple[float, float, float, int]]:
    """Replay one cell in all markets, so that the policy's tables are computed once for all of them."""
    work, deadline, start = cell
    policy, found = load_policy("failover" if deadline is None else "adaptive"), []
    for market in markets:
        sites = tuple(make_site(trace, start_hours=start) for trace in market.traces)
        case = Case(sites=sites, work_hours=work, deadline_hours=work * (deadline or ENDLESS) + start)
        found += [_sum_up(replay(case, policy, hour)) for hour in _spread_hours(market, hours)]
    return found


def _make_scenario(
    market: RecordedMarket, hour: float, runs: tuple[tuple[float, float, float, int], ...]
) -> ScenarioRuns:
    return ScenarioRuns(
        market=market.name,
        family=market.family,
        places=len(market.traces),
        from_hour=hour,
        is_open=any(trace.is_open_at(hour % trace.hours) for trace in market.traces),
        is_assembled=market.is_assembled,
        runs=runs,
    )


def _sum_up(outcome: ReplayOutcome) -> tuple[float, float, float, int]:
    return outcome.spot_hours, outcome.ondemand_hours, outcome.hours, outcome.preemptions


def write_table(scenarios: Sequence[ScenarioRuns], source: str) -> str:
    """Return the text that `broker.spot.recorded_runs` reads: hours as whole thousandths of the work."""
    works = [work for work, _, _ in list_cells()]
    alone = list(list_cells()).index((WORKS_HOURS[-1], None, STARTS_HOURS[0]))
    preempted, spot_hours = Counter[str](), dict[str, float]()
    for each in scenarios:
        preempted[each.market] += each.runs[alone][3]
        spot_hours[each.market] = spot_hours.get(each.market, 0.0) + each.runs[alone][0]
    rows = [
        {
            "family": each.family,
            "market": each.market,
            "places": each.places,
            "is_open": each.is_open,
            "is_assembled": each.is_assembled,
            "preempted": preempted[each.market],
            "spot_hours": round(spot_hours[each.market], 1),
            "spot": [round(run[0] / work * 1000) for run, work in zip(each.runs, works, strict=True)],
            "ondemand": [round(run[1] / work * 1000) for run, work in zip(each.runs, works, strict=True)],
            "hours": [round(run[2] / work * 1000) for run, work in zip(each.runs, works, strict=True)],
            "preemptions": [run[3] for run in each.runs],
        }
        for each in scenarios
    ]
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    return f'{{"source": {json.dumps(source)},\n"scenarios": [\n{lines}\n]}}\n'


def main() -> None:
    """Replay the recordings named on the command line, and write the table."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("folder", type=Path, help="one folder of recordings for each family")
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--source", default="", help="where the recordings come from")
    arguments.add_argument("--hours", type=int, default=HOURS_A_MARKET, help="hours of submission in each market")
    arguments.add_argument("--jobs", type=int, default=2, help="processes")
    given = arguments.parse_args()
    markets = list_markets(read_families(given.folder))
    found = replay_markets(markets, hours=given.hours, processes=given.jobs)
    given.out.write_text(write_table(found, given.source))


if __name__ == "__main__":
    main()
