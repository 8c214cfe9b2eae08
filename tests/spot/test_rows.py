"""Row arithmetic is written out for the nine age classes: each result is that of a plain loop, to the last bit."""

from __future__ import annotations

import math
import random
from functools import reduce
from operator import add, mul

from broker.spot.durations import AGES
from broker.spot.rows import Row, choose_less, expect_landing, interpolate
from broker.spot.starts import AGEING
from broker.spot.transitions import Transition, list_transitions

COUNT = len(AGES)
CASES = range(50)


def draw(seed: int, *, high: float = 40.0) -> Row:
    source = random.Random(seed)
    return [source.uniform(0.0, high) for _ in range(COUNT)]


def draw_transition(seed: int) -> Transition:
    source = random.Random(seed)
    hazards = tuple(source.choice((0.0, source.uniform(0.0, 20.0))) for _ in range(COUNT))
    (transition,) = list_transitions(hazards, (1.0, 1.0 + source.uniform(0.01, 4.0)), source.uniform(0.0, 1.0))
    return transition


def test_transition_leads_to_the_next_node_as_a_loop_over_the_classes_would() -> None:
    for seed in CASES:
        transition, following, ended = draw_transition(seed), draw(seed + 1000), draw(seed + 2000)[0]
        expected, older = [], 0.0
        for index, going in enumerate(following):
            paid, stay, end, age = transition.ahead[4 * index : 4 * index + 4]
            expected.append(paid + stay * going + end * ended + age * older)
            older = going
        assert transition.evaluate_next(following, ended) == expected


def test_way_goes_on_or_changes_as_a_loop_over_the_classes_would() -> None:
    changes = 0
    for seed in CASES:
        transition, ahead_values, others = draw_transition(seed), draw(seed + 1000), draw(seed + 2000, high=80.0)
        ended = draw(seed + 3000)[0]
        plain, bests, goes = list[float](), list[float](), list[float]()
        older = best = 0.0
        for index, base in enumerate(ahead_values):
            end, age = transition.here[2 * index : 2 * index + 2]
            older = base + end * ended + age * older
            plain.append(older)
            goes.append(base + end * ended + age * best)
            best = min(goes[-1], others[index])
            bests.append(best)
        assert transition.evaluate_continuing(ahead_values, ended) == plain
        assert transition.evaluate_best(ahead_values, ended, others) == (bests, goes)
        changes += bests != goes
    assert changes > len(CASES) / 2


def test_weights_of_a_way_and_the_chance_of_no_event_add_up_to_one() -> None:
    for seed in CASES:
        transition = draw_transition(seed)
        for index in range(COUNT):
            _, stay, end_next, age_next = transition.ahead[4 * index : 4 * index + 4]
            assert math.isclose(
                stay + end_next + age_next + sum(transition.here[2 * index : 2 * index + 2]), 1.0, abs_tol=1e-7
            )
        assert transition.ahead[3] == transition.here[1] == AGEING[-1] == 0.0  # the oldest class has no older one


def test_rows_are_interpolated_and_chosen_by_class() -> None:
    for seed in CASES:
        low, high, others = draw(seed), draw(seed + 1000), draw(seed + 2000)
        share, last = low[0] / 40.0, high[0]
        rest = 1 - share
        assert interpolate(low, high, share, 0.25) == [
            0.25 + share * less + rest * more for less, more in zip(low, high, strict=True)
        ]
        sums = [value + weight * last for value, weight in zip(low, high, strict=True)]
        assert choose_less(low, high, last, others) == [min(pair) for pair in zip(sums, others, strict=True)]
    never = [math.inf] * COUNT
    assert choose_less(never, [0.0] * COUNT, 1.0, others) == others


def test_landings_are_averaged_over_the_class_of_the_start_and_the_older_ones() -> None:
    for seed in CASES:
        values, source = draw(seed), random.Random(seed + 1000)
        rows = [
            [source.choice((0.0, source.uniform(0.0, 1.0))) for _ in range(own + 1)] for own in range(COUNT)
        ]  # the oldest first
        expected = [reduce(add, map(mul, row[::-1], values[own::-1])) for own, row in enumerate(rows)]
        assert expect_landing(tuple(chance for row in rows for chance in row), values) == expected
