"""Numbers of parameters and tokens as users write them and `broker advise` parses them: `405B`, `15.6T`."""

from __future__ import annotations

UNITS = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3))


def show_amount(value: float) -> str:
    """Format three digits and a unit, without exponents below 1e15."""
    for unit, size in UNITS:
        if value >= size * 0.9995:  # a value that would round to 1,000 of the next smaller unit
            scaled = value / size
            return f"{scaled:,.0f}{unit}" if scaled >= 99.95 else f"{scaled:.3g}{unit}"
    return f"{value:.3g}"
