"""Find nodes that slow their gang down, and decide whether replacing one pays off. Pure.

Nodes of a synchronous program finish each step together, so only the time before they wait for each other distinguishes
them: `own_s` in the progress lines of each node. A node is slow if it takes 1.5 times as long as the others at each of
five steps in a row: of 0.8, 0.8 and 1.3 s, the last one is slow; of 0.8, 0.8 and 1.1 s, none is. It remains slow until
it takes less than 1.25 times as long at each of five steps in a row.

Replacing it costs the whole gang a restart, so it only pays off if the rest of the job would lose far more. With 10,000
steps remaining at 1.3 s instead of 0.8 s, the gang would lose 5,000 s. If a new node runs after 120 s, the program
starts in 60 s, and 100 steps since the checkpoint run again (130 s), the restart costs 310 s: the node is replaced.
With 1,000 steps remaining (500 s), it is not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from broker.frozen import frozen
from broker.types import OwnTime

RATIO_MIN = 1.5  # a gang that waits for such a node loses a third of its time
RATIO_END = 1.25
STEPS_MIN = 5  # a pause for a checkpoint or another program is not a property of the node
SLOW_S_MIN = 120.0  # before a replacement: a noisy neighbour or a throttled disk is often temporary; our choice
GAIN_RATIO_MIN = 2.0  # time saved over the time of a restart, neither of which is known exactly; our choice
HORIZON_S_MAX = 6 * 3600.0  # of time saved: nodes are rarely the same for longer; our choice
REPLACED_MAX = 3  # per job: beyond that, the program is uneven rather than its nodes
APART_S_MIN = 1800.0  # between two replacements of a job


@frozen
class Straggler:
    """A slow node; `own_s`, and `usual_s` (the median of the others), are medians over the last steps."""

    rank: int
    own_s: float
    usual_s: float


class StragglerWatch:
    """Track the slow nodes of one gang. Each node is reported once."""

    def __init__(self) -> None:
        self._streaks: dict[int, int] = {}  # steps in a row that contradict the current state of a rank
        self._last_step: dict[int, int] = {}
        self._times: dict[int, deque[tuple[float, float]]] = {}
        self._slow_since_s: dict[int, float] = {}
        self._reported: set[int] = set()

    def observe(self, times: Sequence[OwnTime], *, now_s: float = 0.0) -> Sequence[Straggler]:
        """Return nodes that are slow now and were not reported before; `times` has at most one entry per rank."""
        for each in times:
            others = [other.own_s for other in times if other.rank != each.rank]
            if others and self._last_step.get(each.rank) != each.step:
                self._last_step[each.rank] = each.step
                self._count(each, median(others), now_s)
        fresh = [each for each in self._slow_since_s if each not in self._reported]
        self._reported.update(fresh)
        return [self._describe(rank) for rank in fresh]

    def _count(self, each: OwnTime, usual_s: float, now_s: float) -> None:
        rank = each.rank
        self._times.setdefault(rank, deque(maxlen=STEPS_MIN)).append((each.own_s, usual_s))
        is_slow = rank in self._slow_since_s
        is_other = each.own_s < RATIO_END * usual_s if is_slow else each.own_s > RATIO_MIN * usual_s
        self._streaks[rank] = self._streaks.get(rank, 0) + 1 if is_other else 0
        if self._streaks[rank] < STEPS_MIN:
            return
        self._streaks[rank] = 0
        if is_slow:
            del self._slow_since_s[rank]
        else:
            self._slow_since_s[rank] = now_s

    def list_lasting(self, now_s: float) -> Sequence[Straggler]:
        """Return the nodes that have been slow for `SLOW_S_MIN`, the slowest first."""
        lasting = [rank for rank, since_s in self._slow_since_s.items() if now_s - since_s >= SLOW_S_MIN]
        return sorted(map(self._describe, lasting), key=lambda each: each.usual_s - each.own_s)

    def _describe(self, rank: int) -> Straggler:
        own_s, usual_s = zip(*self._times[rank], strict=True)
        return Straggler(rank=rank, own_s=median(own_s), usual_s=median(usual_s))


@frozen
class Rest:
    """The rest of a job at one moment. `total` and `checkpoint_step` are None if its program does not report them.

    `start_s`: seconds from the end of a node to the first step with its replacement.
    """

    step: int
    total: int | None
    checkpoint_step: int | None
    start_s: float


@frozen
class Replacement:
    """An earlier replacement of a slow node of the job."""

    rank: int
    time_s: float


@frozen
class Gain:
    """The time in seconds that the gang saves by replacing a node, and the time that the restart costs it."""

    saved_s: float
    cost_s: float

    @property
    def pays(self) -> bool:
        """Whether the gain is worth the risk of a wrong estimate."""
        return self.saved_s >= GAIN_RATIO_MIN * self.cost_s


def estimate_gain(slow: Straggler, rest: Rest) -> Gain:
    """Estimate the time that a replacement saves and costs. Nothing is saved if the end of the job is unknown.

    The gang takes as long as its slowest node, so each remaining step becomes shorter by the difference. Without a
    checkpoint, all steps run again.
    """
    left = max(0, (rest.total or 0) - rest.step)
    saved_s = min(left * slow.own_s, HORIZON_S_MAX) * (1 - slow.usual_s / slow.own_s)
    repeated = max(0, rest.step - (rest.checkpoint_step or 0))
    return Gain(saved_s=saved_s, cost_s=rest.start_s + repeated * slow.own_s)


def choose_replacement(
    lasting: Sequence[Straggler], rest: Rest, earlier: Sequence[Replacement], *, now_s: float
) -> tuple[Straggler, Gain] | None:
    """Return the node to replace now; None if no replacement pays off.

    A rank is replaced once: if the new node is slow too, the rank's share of the data is the cause.
    """
    if len(earlier) >= REPLACED_MAX or any(0 <= now_s - each.time_s < APART_S_MIN for each in earlier):
        return None
    for slow in lasting:
        gain = estimate_gain(slow, rest)
        if gain.pays and all(each.rank != slow.rank for each in earlier):
            return slow, gain
    return None
