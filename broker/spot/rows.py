"""Arithmetic on rows: the values at one node of a grid by age class, the oldest first.

A value function has about 900 nodes of some twenty rows, and `adaptive` solves a new one whenever its estimates change.
The loops over the nine age classes are therefore written out, which takes less than half the time of loops. Terms are
added in the order in which loops would add them, so the results are the same to the last bit.
"""

from __future__ import annotations

Row = list[float]
Chances = tuple[float, ...]  # probabilities and prices of all age classes, in one tuple


def interpolate(low: Row, high: Row, share: float, base: float = 0.0) -> Row:
    """Return `base` plus the mean of two rows, of which the lower weighs `share`."""
    l0, l1, l2, l3, l4, l5, l6, l7, l8 = low
    h0, h1, h2, h3, h4, h5, h6, h7, h8 = high
    rest = 1 - share
    return [
        base + share * l0 + rest * h0,
        base + share * l1 + rest * h1,
        base + share * l2 + rest * h2,
        base + share * l3 + rest * h3,
        base + share * l4 + rest * h4,
        base + share * l5 + rest * h5,
        base + share * l6 + rest * h6,
        base + share * l7 + rest * h7,
        base + share * l8 + rest * h8,
    ]


def choose_less(values: Row, weights: Row, last: float, others: Row) -> Row:
    """Return by class the lesser of `value + weight * last` and the other value."""
    v0, v1, v2, v3, v4, v5, v6, v7, v8 = values
    w0, w1, w2, w3, w4, w5, w6, w7, w8 = weights
    o0, o1, o2, o3, o4, o5, o6, o7, o8 = others
    return [
        v0 if (v0 := v0 + w0 * last) < o0 else o0,
        v1 if (v1 := v1 + w1 * last) < o1 else o1,
        v2 if (v2 := v2 + w2 * last) < o2 else o2,
        v3 if (v3 := v3 + w3 * last) < o3 else o3,
        v4 if (v4 := v4 + w4 * last) < o4 else o4,
        v5 if (v5 := v5 + w5 * last) < o5 else o5,
        v6 if (v6 := v6 + w6 * last) < o6 else o6,
        v7 if (v7 := v7 + w7 * last) < o7 else o7,
        v8 if (v8 := v8 + w8 * last) < o8 else o8,
    ]


def expect_landing(chances: Chances, values: Row) -> Row:
    """Return the mean of the values in the classes that a start leads to, which are its own and older ones.

    `chances` has for each class those of the classes up to its own, the oldest first, all in one tuple.
    """
    (
        c00, c10, c11, c20, c21, c22, c30, c31, c32, c33, c40, c41, c42, c43, c44, c50, c51, c52, c53, c54, c55,
        c60, c61, c62, c63, c64, c65, c66, c70, c71, c72, c73, c74, c75, c76, c77,
        c80, c81, c82, c83, c84, c85, c86, c87, c88,
    ) = chances  # fmt: skip
    v0, v1, v2, v3, v4, v5, v6, v7, v8 = values
    return [
        c00 * v0,
        c11 * v1 + c10 * v0,
        c22 * v2 + c21 * v1 + c20 * v0,
        c33 * v3 + c32 * v2 + c31 * v1 + c30 * v0,
        c44 * v4 + c43 * v3 + c42 * v2 + c41 * v1 + c40 * v0,
        c55 * v5 + c54 * v4 + c53 * v3 + c52 * v2 + c51 * v1 + c50 * v0,
        c66 * v6 + c65 * v5 + c64 * v4 + c63 * v3 + c62 * v2 + c61 * v1 + c60 * v0,
        c77 * v7 + c76 * v6 + c75 * v5 + c74 * v4 + c73 * v3 + c72 * v2 + c71 * v1 + c70 * v0,
        c88 * v8 + c87 * v7 + c86 * v6 + c85 * v5 + c84 * v4 + c83 * v3 + c82 * v2 + c81 * v1 + c80 * v0,
    ]
