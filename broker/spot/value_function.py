"""State values of a job on a spot market: a Markov decision process, solved backwards into tables.

State: remaining work w, spare time u (how long the job may idle before on-demand must start), the market (open or
closed), the age of its period, and the running mode: spot, on-demand or nothing. Spot runs at the price c and on-demand
at 1, per hour of work; a start takes d hours that are billed and do no work. An open period of age a ends with the
hazard h(a), a closed one with g(a). The least expected cost V satisfies, for instance on spot,
    0 = min over actions of  c + h (V_closed - V) + dV/da - dV/dw,
and waiting uses up spare time, -dV/du, at the small price `wait_price`. Where spot is r times as fast as on-demand, h
and da are divided by r, and an hour of work there adds 1 - 1 / r hours of spare time. The equation is solved on a grid
by a semi-Lagrangian scheme, along the path from each node to the next one (M. Falcone and R. Ferretti, "Semi-Lagrangian
Approximation Schemes for Linear and Hamilton-Jacobi Equations", 2013): either no event happens on the path, or the
period ends or enters the next age class on it, where the value is interpolated linearly. Nodes are d / 2 apart where
spare time is scarce, and increasingly far apart elsewhere.
"""

from __future__ import annotations

from broker.spot.grid import find_node, grow_nodes
from broker.spot.node_solver import SECOND_CLASS, NodeSolver
from broker.spot.overlapped_starts import list_overlapped_starts
from broker.spot.starts import OLDEST, follow_starts
from broker.spot.value_tables import Point, ValueParameters, make_tables

WORK_GROWTH, SPARE_GROWTH = 1.2, 1.15  # of the grid steps: the value has less curvature in work than in spare time
SURVIVAL_WEIGHT = 4.0  # observed periods that weigh as much as the hazards, for the survival of a start
EVEN_NODES = 10  # nodes of spare time that are half a start apart
LEAPS, LEAP_HOURS = 3, 1e-4  # the value jumps at multiples of a start: a node just below each of the first


class ValueFunction:
    """The solved decision process for one set of parameters, with its tables (see `Tables`)."""

    def __init__(self, parameters: ValueParameters) -> None:
        self.parameters = parameters
        self.work = grow_nodes(max(0.25, parameters.start_hours), parameters.work_hours, even=2, growth=WORK_GROWTH)
        self.spare = _list_spare(parameters)
        tables = make_tables(len(self.work), len(self.spare))
        self.run, self.idle_open, self.idle_closed = tables.run, tables.idle_open, tables.idle_closed
        self.wait_open, self.wait_closed = tables.wait_open, tables.wait_closed
        self.keep_open, self.keep_closed = tables.keep_open, tables.keep_closed
        self.ondemand_open, self.ondemand_closed = tables.ondemand_open, tables.ondemand_closed
        self.starts = follow_starts(parameters.open_hazards, parameters.start_hours)
        self.overlapped = list_overlapped_starts(parameters)
        self._solver = NodeSolver(parameters, tables, self.work, self.spare, self.starts)
        self.solved = [0] * len(self.work)  # by node of work: the number of solved nodes of spare time

    def locate(self, work: float, spare: float) -> Point:
        """Return the grid point for any remaining work and spare time, of which the tables then hold the values."""
        j, across = find_node(self.work, work)
        i, up = find_node(self.spare, spare)
        if self.solved[j + 1] < i + 2:
            self._solve(i + 2, j + 1)
        return i * len(self.work) + j, across, up

    def _solve(self, count: int, last: int) -> None:
        """Solve `count` nodes of spare time up to this node of work. Each depends on those with less of either only.

        Fast spot adds spare time: then more nodes are needed where less work is left.
        """
        counts = [count] * (last + 1)
        for j in range(last, 1, -1):
            counts[j - 1] = self._solver.count_needed(j, counts[j])
        for j in range(1, last + 1):
            for i in range(self.solved[j], counts[j]):
                self._solver.solve(i, j)
            self.solved[j] = max(self.solved[j], counts[j])

    def enter_usd(self, age_class: int, work: float, spare: float, *, seen: tuple[float, float] = (0.0, 0.0)) -> float:
        """Return the value of starting on spot: the start is either survived or lost on the way.

        `seen` counts the periods that reached this age, and those of them that outlived such a start.
        """
        price, start = self.parameters.spot_hour_price, self.parameters.start_hours
        way = self.starts[OLDEST - age_class]
        survive = (SURVIVAL_WEIGHT * way.survive + seen[1]) / (SURVIVAL_WEIGHT + seen[0])
        point = self.locate(work, spare - start)
        on = sum(chance * self.run.read(OLDEST - place, point) for place, chance in way.landings)
        on = start * price + on / max(way.survive, 1e-9)
        off = way.lost_hours * price + self.lost_usd(work, spare - way.lost_hours)
        return survive * on + (1 - survive) * off

    def enter_beside_usd(
        self, age_class: int, work: float, spare: float, *, seen: tuple[float, float] = (0.0, 0.0)
    ) -> float:
        """Return the value of starting on spot while on-demand runs, and works as long as the start overlaps.

        Equal to `enter_usd` if starts do not overlap.
        """
        if not self.overlapped:
            return self.enter_usd(age_class, work, spare, seen=seen)
        start, overlap = self.overlapped[OLDEST - age_class], min(self.parameters.overlap_hours, work)
        survive = (SURVIVAL_WEIGHT * start.survive + seen[1]) / (SURVIVAL_WEIGHT + seen[0])
        lost = (1 - survive) / max(start.kept + start.dropped, 1e-9)  # the observations scale both kinds of loss
        rest = self.parameters.start_hours - self.parameters.overlap_hours
        point = self.locate(work - overlap, spare - rest)
        places = self.starts[OLDEST - age_class].landings
        on = sum(chance * self.run.read(OLDEST - place, point) for place, chance in places) / max(start.survive, 1e-9)
        kept_hours = min(start.kept_hours, work)
        kept = self.ondemand_closed.read(0, self.locate(work - kept_hours, spare))
        dropped = self.lost_usd(work - overlap, spare - rest / 2)
        return survive * (start.survived_paid + on) + lost * (
            start.kept * (start.kept_paid + kept) + start.dropped * (start.dropped_paid + dropped)
        )

    def wait_usd(self, age_class: int, work: float, spare: float, *, is_open: bool) -> float:
        """Return the value of waiting without machines.

        Without work the tables hold 0, but a job that waits still has to start for the least of it. Below the first
        node of work, waiting is therefore as much better than a start on spot as at that node. Where no start is
        possible, it is extrapolated, and costs at least as much as a run without preemptions.
        """
        table, (first, second) = self.wait_open if is_open else self.wait_closed, self.work[1:3]
        if work >= first:
            return table.read(age_class, self.locate(work, spare))
        near, far = (table.read(age_class, self.locate(each, spare)) for each in (first, second))
        given = self.parameters
        if is_open and spare >= given.start_hours:
            return near + self.enter_usd(age_class, work, spare) - self.enter_usd(age_class, first, spare)
        on_spot = given.start_hours * given.spot_hour_price + work * given.spot_price
        return max(near - (first - work) * (far - near) / (second - first), min(on_spot, given.start_hours + work))

    def keep_usd(self, age_class: int, work: float, spare: float, *, is_open: bool) -> float:
        """Return the value of keeping running on-demand machines for now."""
        return (self.keep_open if is_open else self.keep_closed).read(age_class, self.locate(work, spare))

    def ondemand_usd(self, age_class: int, work: float, spare: float, *, is_open: bool) -> float:
        """Return the value of the best action while on-demand runs."""
        return (self.ondemand_open if is_open else self.ondemand_closed).read(age_class, self.locate(work, spare))

    def lost_usd(self, work: float, spare: float) -> float:
        """Return the value just after the loss of spot, when another place may be open."""
        rho, point = self.parameters.second_chance, self.locate(work, spare)
        closed = self.idle_closed.read(0, point)
        return rho * self.idle_open.read(SECOND_CLASS, point) + (1 - rho) * closed if rho else closed


def _list_spare(parameters: ValueParameters) -> tuple[float, ...]:
    """List nodes of spare time.

    The value jumps at whole multiples of a start, and at the rest of an overlapped start beyond them, where an action
    becomes infeasible.
    """
    nodes = grow_nodes(
        max(parameters.start_hours / 2, 0.01), max(parameters.spare_hours, 0.02), even=EVEN_NODES, growth=SPARE_GROWTH
    )
    leaps = [count * parameters.start_hours - LEAP_HOURS for count in range(1, LEAPS + 1)]
    if parameters.overlap_hours > 0:
        leaps += [hours - parameters.overlap_hours for hours in leaps]
    return tuple(sorted({*nodes, *(hours for hours in leaps if hours > LEAP_HOURS)}))
