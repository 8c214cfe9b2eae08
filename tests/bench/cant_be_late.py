"""Our policies under the rules of the public evaluator of "Can't Be Late": `python -m tests.bench.cant_be_late`.

Not collected by pytest. The rules, written from their public description:

- Time passes in ticks of the recording. Spot that is open at a tick stays for all of it, and a tick is billed whole.
- Each step chooses none, spot or on-demand, and with several zones also the zone. A start costs the restart overhead.
  Here every move between zones is a start, too; the evaluator forgets some of them.
- If the rest, a restart included, fills all ticks to the deadline, the evaluator overrules the policy: on-demand, or
  spot while spot works (and none, one tick later, when that spot is lost). A policy that must not be late is asked to
  leave one tick free, and cannot wait for less than a tick.
- On-demand costs 3.06 USD an hour, spot 0.9731 or the recorded price. The score is the share of the difference between
  both that is saved: 100 for spot alone, 0 for on-demand. With several zones it is the mean over scenarios, and the
  evaluator bills all hours at the first price of the last zone (`--bill last`); here each tick has its own price.

`--traces` is a folder of either kind: the evaluator's (a folder for each zone, with 0.json, 1.json, ..., where 1 means
preempted), or our recordings (one file for each zone), which are cut into `--windows` parts.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from broker.lab.markets import Site, make_site
from broker.lab.replay import DECISIONS_MAX, Case, ReplayOutcome, ReplayState
from broker.lab.traces import Trace, parse_trace
from broker.spot.policies import load_policy
from broker.spot.policies.base import (
    EPSILON_HOURS,
    Candidate,
    Decision,
    Move,
    SpotPolicy,
    Stay,
    Wait,
    find_fallback,
    find_spare_hours,
)

ONDEMAND_USD, SPOT_USD = 3.06, 0.9731
ONE_ZONE = {"work": 48.0, "deadlines": (52.0, 70.0), "overheads": (0.02, 0.05, 0.1)}
SEVERAL_ZONES = {"work": 24.0, "deadlines": (36.0,), "overheads": (0.2,)}
# Of the zones of a scenario, those that the folder has are used, if they are at least two.
SCENARIOS = {
    "two zones of a region": ("us-east-1a", "us-east-1c"),
    "two regions": ("us-east-2a", "us-west-2a"),
    "three regions": ("us-east-1a", "us-east-2b", "us-west-2c"),
    "three zones of a region": ("us-east-1a", "us-east-1c", "us-east-1d"),
    "five zones": ("us-east-1a", "us-east-1f", "us-west-2a", "us-west-2b", "us-east-2b"),
    "all zones": (
        "us-east-2a", "us-west-2c", "us-east-1d", "us-east-2b", "us-west-2a", "us-east-1f", "us-east-1a", "us-west-2b",
        "us-east-1c",
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of one policy."""

    scenario: str
    policy: str
    traces: tuple[Trace, ...]  # of the zones
    from_hour: float
    work_hours: float
    deadline_hours: float
    overhead_hours: float
    bills_ticks: bool


@dataclass(frozen=True, kw_only=True)
class Result:
    scenario: str
    policy: str
    usd: float
    is_late: bool


class TickedLife(ReplayState):
    """A replay in which decisions, changes and bills fall on ticks, and the evaluator may overrule the policy."""

    def __init__(self, case: Case, from_hour: float, gap_hours: float) -> None:
        super().__init__(case, from_hour)
        self.gap_hours = gap_hours

    def follow(self, decision: Decision, candidates: Sequence[Candidate]) -> None:
        """Carry the decision out tick by tick, until it no longer holds or anything changes."""
        until = self.hour + max(decision.hours, self.gap_hours) + 1e-9
        change = self._next_event()
        while not self.is_over and self.hour + self.gap_hours <= until:
            forced = self._overrule(candidates)
            super().follow(replace(forced or decision, hours=self.gap_hours), candidates)
            if forced or self.hour >= change - 1e-9:
                return
            decision = Stay()

    def _overrule(self, candidates: Sequence[Candidate]) -> Decision | None:
        """Return what the evaluator does when the rest, a restart included, takes all ticks to the deadline."""
        start = self.case.sites[self.data].start_hours
        left = math.floor((self.case.deadline_hours - self.hour) / self.gap_hours + 1e-9)
        rest = self.case.work_hours - self.saved - self.unsaved + start
        if math.ceil(rest / self.gap_hours - 1e-9) < left:
            return None
        is_spot = self.current is not None and self.current % 2 == 0
        if (is_spot and self.starting <= 0) or self._is_on_demand:
            return Stay()
        return Move(target=candidates[1 + 2 * self.data])

    def bill(self, *, bills_ticks: bool) -> float:
        """Return USD, the last tick as a whole."""
        if bills_ticks:
            rest = math.ceil(self.hour / self.gap_hours - 1e-9) * self.gap_hours - self.hour
            assert self.current is not None
            site = self.case.sites[self.current // 2]
            here = site.ondemand if self.current % 2 else self.now[self.current // 2][1]
            return self.usd + rest * here.usd_hour
        rest = math.ceil(self.hour / self.gap_hours - 1e-9) * self.gap_hours - self.hour
        spot, ondemand = self.hours
        if self._is_on_demand:
            ondemand += rest
        else:
            spot += rest
        last = self.case.sites[self.data]
        first_price = last.read_step(last.find_step(self.from_hour))[2]
        return spot * first_price.usd_hour + ondemand * last.ondemand.usd_hour


def play(run: Run) -> Result:
    """Play one run."""
    sites = tuple(place(trace, run.overhead_hours) for trace in run.traces)
    gap_hours = run.traces[0].gap_hours
    case = Case(
        sites=sites, work_hours=run.work_hours, deadline_hours=run.deadline_hours,
        look_hours=gap_hours,
    )  # fmt: skip
    life, policy = TickedLife(case, run.from_hour, gap_hours), load_policy(run.policy)
    outcome = finish(life, policy)
    return Result(
        scenario=run.scenario, policy=run.policy, usd=life.bill(bills_ticks=run.bills_ticks), is_late=outcome.is_late
    )


def finish(life: TickedLife, policy: SpotPolicy) -> ReplayOutcome:
    for _ in range(DECISIONS_MAX):
        if life.is_over:
            return life.sum_up()
        view, candidates = life.observe()
        decision, fallback = policy(view, candidates), find_fallback(view, candidates)
        if (
            isinstance(decision, Wait)
            and fallback
            and find_spare_hours(view, fallback) < life.gap_hours - EPSILON_HOURS
        ):
            decision = Move(target=fallback)
        life.follow(decision, candidates)
    raise AssertionError("the policy exceeds the limit of decisions")


def place(trace: Trace, overhead_hours: float) -> Site:
    spot_usd = trace.prices[0] if trace.prices else SPOT_USD
    return make_site(trace, ondemand_usd_hour=ONDEMAND_USD, spot_usd_hour=spot_usd, start_hours=overhead_hours)


def read_zones(folder: Path, windows: int, hours: float) -> dict[str, list[tuple[Trace, float]]]:
    """Read zones as lists of (trace, hour of the submission)."""
    zones = dict[str, list[tuple[Trace, float]]]()
    subfolders = sorted({file.parent for file in folder.rglob("*.json") if file.stem.isdigit()})
    for subfolder in subfolders:
        name = next(part for part in reversed(subfolder.parts) if part not in ("traces", "random_start"))
        files = sorted(subfolder.glob("*.json"), key=lambda file: int(file.stem))
        traces = [parse_trace(file.read_bytes(), name) for file in files]
        inverted = [replace(trace, counts=tuple(int(not count) for count in trace.counts)) for trace in traces]
        if found := [(trace, 0.0) for trace in inverted if trace.hours >= hours][:windows]:
            zones[name] = found
    if subfolders:
        return zones
    for file in sorted(folder.rglob("*.json")):
        trace = parse_trace(file.read_bytes(), file.stem)
        room = int((trace.hours - hours) / trace.gap_hours)
        if room > 0:
            starts = [room * index // max(windows - 1, 1) * trace.gap_hours for index in range(windows)]
            zones[trace.name] = [(trace, start) for start in starts]
    return zones


def list_scenarios(names: Sequence[str], *, is_single: bool) -> dict[str, tuple[str, ...]]:
    if is_single:
        return {name: (name,) for name in names}
    found = {}
    for scenario, zones in SCENARIOS.items():
        present = tuple(name for zone in zones for name in names if name.startswith(zone))
        if len(present) > 1 and present not in found.values():
            found[scenario] = present
    return found


def score(usd: float, work_hours: float) -> float:
    """Return the share of the saving of spot over on-demand, as a percentage."""
    return 100 * (ONDEMAND_USD * work_hours - usd) / ((ONDEMAND_USD - SPOT_USD) * work_hours)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--traces", type=Path, required=True)
    arguments.add_argument("--several", action="store_true", help="the scenarios of several zones")
    arguments.add_argument("--windows", type=int, default=30, help="submissions a zone or scenario")
    arguments.add_argument("--work", type=float, help="hours")
    arguments.add_argument("--deadlines", type=float, nargs="+", help="hours")
    arguments.add_argument("--overheads", type=float, nargs="+", help="hours of a start")
    arguments.add_argument("--bill", choices=("last", "ticks"), default="ticks")
    arguments.add_argument("--policies", nargs="+", default=["adaptive", "uniform-progress", "greedy"])
    arguments.add_argument("--jobs", type=int, default=1, help="processes")
    given = arguments.parse_args()
    defaults = SEVERAL_ZONES if given.several else ONE_ZONE
    work = given.work or defaults["work"]
    deadlines, overheads = given.deadlines or defaults["deadlines"], given.overheads or defaults["overheads"]
    zones = read_zones(given.traces, given.windows, max(deadlines))
    scenarios = list_scenarios(list(zones), is_single=not given.several)
    runs = [
        Run(
            scenario=scenario, policy=policy, traces=tuple(zones[name][index][0] for name in names),
            from_hour=zones[names[0]][index][1], work_hours=work, deadline_hours=deadline, overhead_hours=overhead,
            bills_ticks=given.bill == "ticks",
        )
        for policy in given.policies
        for scenario, names in scenarios.items()
        for index in range(min(len(zones[name]) for name in names))
        for deadline in deadlines
        for overhead in overheads
    ]  # fmt: skip
    with multiprocessing.Pool(given.jobs) as pool:
        results = pool.map(play, runs, chunksize=8)
    show(results, work)


def show(results: Sequence[Result], work: float) -> None:
    usd, late = defaultdict[tuple[str, str], list[float]](list), defaultdict[str, int](int)
    for result in results:
        usd[result.policy, result.scenario].append(result.usd)
        late[result.policy] += result.is_late
    for policy in late:
        means = {scenario: sum(found) / len(found) for (name, scenario), found in usd.items() if name == policy}
        count = sum(len(found) for (name, _), found in usd.items() if name == policy)
        total = score(sum(means.values()) / len(means), work)
        sys.stdout.write(f"{policy}: score {total:.2f}, {late[policy]} of {count} late\n")
        for scenario, mean in means.items():
            sys.stdout.write(f"    {scenario:<44}{score(mean, work):>8.2f}\n")


if __name__ == "__main__":
    main()
