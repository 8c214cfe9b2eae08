"""Which of many similar cases `make test` runs, which `make test-slow`, and which `make test-exhaustive` only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings

long = pytest.mark.long
exhaustive = pytest.mark.exhaustive


def spread(cases: Sequence[Any], *, every: int, more: int = 1) -> list[Any]:
    """Leave every `every`th case to `make test`, every `more`th of the others to `make test-slow`, and mark the rest.

    `cases` are values for `pytest.mark.parametrize`, or tuples of them. With `every` 0, none is left to `make test`.
    The first case is in the quickest of the commands that run any.
    """
    marked: list[Any] = []
    for place, case in enumerate(cases):
        if every and place % every == 0:
            marked.append(case)
        else:
            values = case if isinstance(case, tuple) else (case,)
            marked.append(pytest.param(*values, marks=long if place % more == 0 else exhaustive))
    return marked


def examples(number: int) -> int:
    """Return how many examples of a property to draw: `number` with `--hypothesis-profile explore`, else fewer."""
    return math.ceil(number * settings.default.max_examples / 100)
