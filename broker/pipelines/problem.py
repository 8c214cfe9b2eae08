"""Express a pipeline in numbers: a few states for every task, costs of states, and costs of pairs along the edges.

Transfer costs depend on cloud and region only, so in each region only the cheapest estimate can be part of the cheapest
plan, or only the Pareto-optimal ones if time counts too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from broker.errors import NoOfferError
from broker.frozen import frozen
from broker.optimizer.egress import GB_PER_GIB, EgressTable, price_transfer
from broker.types import Estimate, Offer, Plan

Table = list[list[float]]  # by state of the edge's source, then of its target
ASSUMED_HOURS = 1.0  # of a task without work, as in SkyPilot


@frozen
class State:
    """One estimate that may be chosen. `time_usd` is the value of its hours, 0 if only money counts."""

    estimate: Estimate
    usd: float
    hours: float
    time_usd: float = 0.0

    @property
    def cost(self) -> float:
        """The USD to minimize: those paid, and the value of the time."""
        return self.usd + self.time_usd

    @property
    def place(self) -> tuple[str, str]:
        """Cloud and region, on which transfer costs depend."""
        offer = self.estimate.placement.offer
        return offer.cloud, offer.region


@frozen
class Problem:
    """Tasks by index in topological order: every edge (source, target, GiB) goes forwards.

    `greedy` is the state that each task would choose alone.
    """

    states: tuple[tuple[State, ...], ...]
    edges: tuple[tuple[int, int, float], ...]
    edge_usd: tuple[Table, ...]
    edge_hours: tuple[Table, ...]
    greedy: tuple[int, ...]

    def add_usd(self, choice: Sequence[int]) -> float:
        """Sum all tasks and transfers of a choice of one state for every task."""
        total = math.fsum(states[i].usd for states, i in zip(self.states, choice, strict=True))
        return total + math.fsum(
            table[choice[u]][choice[v]] for (u, v, _), table in zip(self.edges, self.edge_usd, strict=True)
        )

    def add_time_usd(self, choice: Sequence[int]) -> float:
        """Sum the value of the hours of all tasks."""
        return math.fsum(states[i].time_usd for states, i in zip(self.states, choice, strict=True))

    def add_cost(self, choice: Sequence[int]) -> float:
        """Sum what is minimized: USD, and the value of the time."""
        return self.add_usd(choice) + self.add_time_usd(choice)

    def measure_hours(self, choice: Sequence[int]) -> float:
        """Return the longest path: a task starts when all its inputs have arrived."""
        start = [0.0] * len(self.states)
        end = 0.0
        arrivals: list[list[tuple[int, Table]]] = [[] for _ in self.states]
        for (u, v, _), table in zip(self.edges, self.edge_hours, strict=True):
            arrivals[u].append((v, table))
        for u, targets in enumerate(arrivals):
            done = start[u] + self.states[u][choice[u]].hours
            end = max(end, done)
            for v, table in targets:
                start[v] = max(start[v], done + table[choice[u]][choice[v]])
        return end


def make_problem(
    names: Sequence[str],
    plans: Sequence[Plan],
    edges: Sequence[tuple[int, int, float]],
    egress: EgressTable,
    *,
    needs_time: bool,
    values_time: bool = True,
) -> Problem:
    """Make states and tables for plans in topological order. Raises NoOfferError.

    With `values_time`, the hours of each task cost what the task's own plan gives for an hour.
    """
    states = [
        _list_states(name, plan, needs_time=needs_time, values_time=values_time)
        for name, plan in zip(names, plans, strict=True)
    ]
    if not needs_time:
        states = _drop_far_too_expensive(states, [each.choice for each in plans], edges, egress)
    units = _Units(egress)
    tables = [units.make_tables(states[u], states[v], gib) for u, v, gib in edges]
    return Problem(
        states=tuple(tuple(each) for each in states),
        edges=tuple(edges),
        edge_usd=tuple(usd for usd, _ in tables),
        edge_hours=tuple(hours for _, hours in tables),
        greedy=tuple(
            next((i for i, state in enumerate(each) if state.estimate is plan.choice), 0)
            for each, plan in zip(states, plans, strict=True)
        ),
    )


def make_state(estimate: Estimate, hour_value_usd: float = 0.0) -> State:
    """Return the USD and hours to finish, or those of one assumed hour if no work is given: it has no value."""
    if estimate.expected_usd is None or estimate.expected_hours is None:
        return State(estimate=estimate, usd=estimate.placement.usd_hour * ASSUMED_HOURS, hours=ASSUMED_HOURS)
    hours = estimate.expected_hours
    return State(estimate=estimate, usd=estimate.expected_usd, hours=hours, time_usd=hour_value_usd * hours)


def _list_states(name: str, plan: Plan, *, needs_time: bool, values_time: bool) -> list[State]:
    """List the estimates that can be optimal. A task with an order of preference keeps its first choice."""
    hour_value_usd = (plan.hour_value_usd or 0.0) if values_time else 0.0
    estimates = plan.estimates[:1] if plan.task.is_ordered else plan.estimates
    by_place = dict[tuple[str, str], list[State]]()
    for estimate in estimates:
        state = make_state(estimate, hour_value_usd)
        if math.isfinite(state.usd) and math.isfinite(state.hours):
            by_place.setdefault(state.place, []).append(state)
    if not by_place:
        raise NoOfferError(
            f"no placement is expected to finish task `{name}`: preemptions are more frequent than checkpoints",
            hints=["allow on-demand, or reduce the cost of a `checkpoint`"],
        )
    choice = plan.choice
    kept = list[State]()
    for states in by_place.values():
        # sorted() is stable, so ties keep the plan's order
        ranked = sorted(states, key=lambda each: (each.cost, each.hours, each.estimate is not choice))
        kept.append(ranked[0])
        if needs_time:
            for state in ranked[1:]:
                if state.hours < kept[-1].hours:
                    kept.append(state)
    alone = make_state(choice, hour_value_usd)
    if all(state.estimate is not choice for state in kept) and math.isfinite(alone.usd) and math.isfinite(alone.hours):
        kept.append(alone)
    return kept


def _drop_far_too_expensive(
    states: Sequence[list[State]],
    choices: Sequence[Estimate],
    edges: Sequence[tuple[int, int, float]],
    egress: EgressTable,
) -> list[list[State]]:
    """Drop states that the cheapest one beats even if all its data moved at the highest price, and theirs for free.

    The states that tasks would choose alone are kept for comparison.
    """
    slack = [0.0] * len(states)
    leaving_usd_max = [max(_price_leaving(each.estimate, egress) for each in options) for options in states]
    cheapest = [min(options, key=lambda each: each.cost) for options in states]
    for u, v, gib in edges:
        slack[u] += gib * _price_leaving(cheapest[u].estimate, egress)
        slack[v] += gib * leaving_usd_max[u]
    return [
        [each for each in options if each is best or each.estimate is choice or each.cost < best.cost + extra]
        for options, best, choice, extra in zip(states, cheapest, choices, slack, strict=True)
    ]


def _price_leaving(estimate: Estimate, egress: EgressTable) -> float:
    """Return the highest price of a GiB that leaves this placement."""
    offer = estimate.placement.offer
    leaving = egress.find(offer.cloud, offer.region)
    return max(leaving.same_region, leaving.other_region, leaving.internet) * GB_PER_GIB


class _Units:
    """USD and hours to move one GiB between two places, cached by pair; places are numbered in order of appearance."""

    def __init__(self, egress: EgressTable) -> None:
        self._egress = egress
        self._numbers = dict[tuple[str, str], int]()
        self._offers = list[Offer]()
        self._usd = dict[int, dict[int, float]]()
        self._hours = dict[int, dict[int, float]]()

    def make_tables(self, sources: Sequence[State], targets: Sequence[State], gib: float) -> tuple[Table, Table]:
        columns = [self._number(each) for each in targets]
        usd, hours = list[list[float]](), list[list[float]]()
        for source in (self._number(each) for each in sources):
            usd_row, hours_row = self._usd.setdefault(source, {}), self._hours.setdefault(source, {})
            for target in set(columns).difference(usd_row):
                unit = price_transfer(self._offers[source], self._offers[target], 1.0, self._egress)
                usd_row[target], hours_row[target] = unit.usd, unit.hours
            usd.append([gib * usd_row[target] for target in columns])
            hours.append([gib * hours_row[target] for target in columns])
        return usd, hours

    def _number(self, state: State) -> int:
        number = self._numbers.setdefault(state.place, len(self._offers))
        if number == len(self._offers):
            self._offers.append(state.estimate.placement.offer)
        return number
