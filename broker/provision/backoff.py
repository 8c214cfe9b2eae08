"""How long to wait before the next try."""

from __future__ import annotations

import random


def draw_backoff_s(tries: int, *, base_s: float = 1.0, cap_s: float = 30.0) -> float:
    """Full jitter: anywhere between nothing and the doubled cap (AWS builders' library)."""
    return random.uniform(0.05, min(cap_s, base_s * 2.0**tries))
