"""The parameters of a value function, and the tables that hold its values at the nodes of a grid."""

from __future__ import annotations

from dataclasses import dataclass, fields

from broker.spot.rows import Row
from broker.spot.starts import CLASSES, OLDEST

# The price of an hour of waiting, in on-demand hours: of plans with equal cost, the faster one is better.
WAIT_PRICE = 0.02


@dataclass(frozen=True, kw_only=True)
class ValueParameters:
    """The parameters of a value function. Hazards per hour by age class; prices as multiples of on-demand.

    Work is counted in hours of on-demand; spot does `spot_speed` of them in an hour, at `spot_price` each.
    """

    open_hazards: tuple[float, ...]
    closed_hazards: tuple[float, ...]
    spot_price: float
    start_hours: float
    work_hours: float
    spare_hours: float
    second_chance: float = 0.0  # probability that another place is open when spot is lost
    overlap_hours: float = 0.0  # the first part of a start on spot, during which running on-demand machines continue
    spot_speed: float = 1.0
    wait_price: float = WAIT_PRICE

    @property
    def spot_hour_price(self) -> float:
        """Return the price of an hour on spot."""
        return self.spot_price * self.spot_speed


Point = tuple[int, float, float]  # a node, and the fractions of the steps to the next node of work and of spare time
_NOTHING: Row = [0.0] * CLASSES  # no work left: value 0; rows are replaced, never modified


class ValueTable:
    """The values of one state or action at every node."""

    def __init__(self, width: int, height: int) -> None:
        self.width = width  # nodes of work in a row of the grid
        self.rows: list[Row] = [_NOTHING] * (width * height)

    def read(self, age_class: int, point: Point) -> float:
        """Interpolate bilinearly at any point of the grid."""
        rows, k = self.rows, OLDEST - age_class
        at, across, up = point
        near = rows[at][k] + across * (rows[at + 1][k] - rows[at][k])
        at += self.width
        far = rows[at][k] + across * (rows[at + 1][k] - rows[at][k])
        return near + up * (far - near)


@dataclass(frozen=True, kw_only=True)
class Tables:
    """The values of all states, and of actions in them.

    `run`: spot runs; `wait_open`, `wait_closed`: nothing runs, and nothing is started yet; `idle_open`, `idle_closed`:
    nothing runs, and the best action is taken; `keep_open`, `keep_closed`: on-demand runs and is kept for now;
    `ondemand_open`, `ondemand_closed`: on-demand runs, and the best action is taken.
    """

    run: ValueTable
    wait_open: ValueTable
    wait_closed: ValueTable
    idle_open: ValueTable
    idle_closed: ValueTable
    keep_open: ValueTable
    keep_closed: ValueTable
    ondemand_open: ValueTable
    ondemand_closed: ValueTable


def make_tables(width: int, height: int) -> Tables:
    """Make empty tables for a grid of `width` nodes of work and `height` nodes of spare time."""
    return Tables(**{each.name: ValueTable(width, height) for each in fields(Tables)})
