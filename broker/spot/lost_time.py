"""Distributions of the number of preemptions of a run and of the total time they cost, for deadline and budget.

The process: work consists of `segments` stretches of s hours (work and the stall of its checkpoint). Preemptions strike
a running gang at the rate H. Each loses the time since the last checkpoint, an exponential time truncated at s, and
costs a recovery R, during which nothing runs that could be preempted. The number K of preemptions until `segments`
stretches have completed is therefore negative binomial, and the lost times are independent of K and of each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cached_property

from broker.nouns import noun

_TAIL = 1e-10  # total probability of the preemption counts that are left out
_COUNTS_MAX = 20_000
_FLAT = 1e-4  # below this H s, a lost time counts as uniform: H s / 8 bounds the error of its distribution


@noun
class LostTime:
    """The process of one run: `hazard` is that of the whole gang per hour, and positive; `stretch` is s in hours."""

    segments: float
    stretch: float
    hazard: float

    @property
    def mean_count(self) -> float:
        """Return E[K] = segments (exp(H s) - 1)."""
        return self.segments * math.expm1(min(self.hazard * self.stretch, 700.0))

    def finish_chance(self, slack: float, recovery: float) -> float:
        """Return P(the lost times and recoveries add up to at most `slack` hours)."""
        if slack < 0:
            return 0.0
        return self._fold(lambda count: self.within_chance(count, slack - count * recovery), slack, recovery)

    def expect_until(self, slack: float, recovery: float) -> tuple[float, float]:
        """Return the expected number of preemptions and the probability of leaving spot.

        The run leaves spot at the first preemption at which its losses exceed `slack`. With k* the first count
        whose losses exceed the slack, independent of K:
            E[min(K, k*)] = sum over i >= 1 of P(K >= i) P(losses of i - 1 <= slack),
            P(K >= k*) = sum over i >= 1 of P(K = i) P(losses of i > slack).
        """
        tail, stays = 1.0, 1.0
        expected = leaving = 0.0
        for count, chance in self._walk_counts():
            if count > 0:
                expected += tail * stays
                stays = self.within_chance(count, slack - count * recovery)
                leaving += chance * (1 - stays)
            tail = max(tail - chance, 0.0)
            if stays <= _TAIL or tail <= _TAIL:
                break
        return expected, min(leaving + tail * (1 - stays), 1.0)

    def within_chance(self, count: int, limit: float) -> float:
        """Return P(`count` lost times add up to at most `limit` hours): exact up to two, then an Edgeworth series."""
        if limit < 0:
            return 0.0
        if count == 0 or limit >= count * self.stretch:
            return 1.0
        if count == 1:
            return self._one_within(limit)
        if count == 2:
            return self._two_within(limit)
        return _edgeworth(count, limit, *self._moments)

    def _one_within(self, limit: float) -> float:
        if self.hazard * self.stretch < _FLAT:
            return limit / self.stretch
        return math.expm1(-self.hazard * limit) / math.expm1(-self.hazard * self.stretch)

    def _two_within(self, limit: float) -> float:
        """Integrate the density of the sum, (H / (1 - e^{-Hs}))^2 e^{-Hx} times the overlap min(x, 2s - x)."""
        s, h = self.stretch, self.hazard
        if h * s < _FLAT:
            x = limit / s
            return x * x / 2 if x <= 1 else 1 - (2 - x) ** 2 / 2
        scale = 1 / math.expm1(-h * s) ** 2

        def rising(x: float) -> float:  # H^2 times the integral of t e^{-Ht} up to x
            return -math.expm1(-h * x) - h * x * math.exp(-h * x)

        if limit <= s:
            return scale * rising(limit)
        flat = 2 * h * s * (math.exp(-h * s) - math.exp(-h * limit))
        return scale * (2 * rising(s) + flat - rising(limit))

    def _fold(self, weigh: Callable[[int], float], slack: float, recovery: float) -> float:
        """Return the sum of P(K = k) weigh(k), up to the count whose recoveries alone exceed the slack."""
        if self._is_crowded:
            return self._normal_chance(slack, recovery)
        total, left = 0.0, 1.0
        for count, chance in self._walk_counts():
            if count * recovery > slack or left <= _TAIL:
                break
            if chance > 0:
                total += chance * weigh(count)
                left -= chance
        return min(total, 1.0)

    def _normal_chance(self, slack: float, recovery: float) -> float:
        """Return the probability by the normal approximation of the compound sum, for thousands of preemptions."""
        mean, variance, _, _ = self._moments
        count = self.mean_count
        spread = count * math.exp(min(self.hazard * self.stretch, 700.0))  # variance of the negative binomial
        total_variance = count * variance + spread * (mean + recovery) ** 2
        if not math.isfinite(total_variance):
            return 0.0
        return 0.5 * math.erfc((count * (mean + recovery) - slack) / math.sqrt(2 * total_variance))

    @property
    def _is_crowded(self) -> bool:
        return self.mean_count > _COUNTS_MAX / 4

    @cached_property
    def _moments(self) -> tuple[float, float, float, float]:
        return _measure_loss(self.hazard, self.stretch)

    def _walk_counts(self) -> Iterator[tuple[int, float]]:
        """Yield (k, P(K = k)) for k = 0, 1, ...: negative binomial, for any positive real number of segments."""
        exponent = self.hazard * self.stretch
        if self._is_crowded:  # the count exceeds `_COUNTS_MAX` almost surely
            yield from ((count, 0.0) for count in range(_COUNTS_MAX))
            return
        log_chance, log_fail = -self.segments * exponent, math.log(-math.expm1(-exponent))
        for count in range(_COUNTS_MAX):
            yield count, math.exp(log_chance) if log_chance > -740 else 0.0
            log_chance += math.log((self.segments + count) / (count + 1)) + log_fail


def _measure_loss(hazard: float, stretch: float) -> tuple[float, float, float, float]:
    """Return mean, variance, skewness and excess kurtosis of an exponential time truncated at `stretch`.

    By ten-point Gauss-Legendre quadrature: closed forms suffer from cancellation for small H s, the common case.
    """
    longest = min(stretch, 60 / hazard)  # beyond that, e^{-Ht} is negligible
    times = [longest * (1 + x) / 2 for x in _NODES]
    weights = [w * math.exp(-hazard * t) for w, t in zip(_WEIGHTS, times, strict=True)]
    total = sum(weights)
    mean = sum(w * t for w, t in zip(weights, times, strict=True)) / total
    second, third, fourth = (
        sum(w * (t - mean) ** power for w, t in zip(weights, times, strict=True)) / total for power in (2, 3, 4)
    )
    return mean, second, third / second**1.5, fourth / second**2 - 3


def _edgeworth(count: int, limit: float, mean: float, variance: float, skew: float, excess: float) -> float:
    """Return P(sum of `count` independent terms <= `limit`) to the order 1 / count (W. Feller, volume 2, XVI.4)."""
    z = (limit - count * mean) / math.sqrt(count * variance)
    bell = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    cubic = skew / (6 * math.sqrt(count)) * (z * z - 1)
    quartic = excess / (24 * count) * (z**3 - 3 * z) + skew * skew / (72 * count) * (z**5 - 10 * z**3 + 15 * z)
    return min(max(0.5 * math.erfc(-z / math.sqrt(2)) - bell * (cubic + quartic), 0.0), 1.0)


# Gauss-Legendre, ten points on [-1, 1] (Abramowitz and Stegun, table 25.4)
_HALF = (
    (0.1488743389816312, 0.2955242247147529),
    (0.4333953941292472, 0.2692667193099963),
    (0.6794095682990244, 0.2190863625159821),
    (0.8650633666889845, 0.1494513491505806),
    (0.9739065285171717, 0.0666713443086881),
)
_NODES = tuple(sign * x for x, _ in _HALF for sign in (-1, 1))
_WEIGHTS = tuple(w for _, w in _HALF for _ in (-1, 1))
