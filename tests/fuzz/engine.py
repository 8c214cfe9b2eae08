"""Makes inputs by mutation: the engine of the default tests, and of `make fuzz` where atheris is not installed.

The same seed makes the same inputs. Coverage does not guide it: longer valid sequences
come only from the seeds of a target.
"""

from __future__ import annotations

import hashlib
import random
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from tests.fuzz.registry import Target

HANG_S = 120  # far more than any input needs, also on a busy machine
BYTES_MAX = 1 << 16
WORDS = (
    b"\0", b"\n", b"\xff", b"\xed\xa0\x80", b"\xf0\x9f\x98\x80", b"{", b"}", b"[", b"]", b'"', b": ", b"- ", b",",
    b"null", b"true", b"-1", b"0", b"1e999", b"NaN", b"9" * 30, b"../", b"--", b"${A}", b"&a", b"*a", b"<<: ", b"\x80",
    b"\xfe\xff", b"\xe2\x80\xa8", b"A" * 300, b'{"a":' * 200, b"[" * 2000,
)  # fmt: skip


class HangError(Exception):
    """An input that took longer than any should."""


def make_inputs(seeds: Sequence[bytes], seed: int) -> Iterator[bytes]:
    """Yield the seeds, then changed ones without end."""
    yield from seeds
    draw = random.Random(seed)
    while True:
        data = bytearray(draw.choice(seeds))
        for _ in range(draw.choice((1, 1, 2, 4, 16))):
            mutate(data, draw, seeds)
        yield bytes(data[:BYTES_MAX])


def mutate(data: bytearray, draw: random.Random, seeds: Sequence[bytes]) -> None:
    start = draw.randint(0, len(data))
    end = min(len(data), start + draw.choice((1, 2, 8, 64, 1024)))
    kind = draw.randrange(7)
    if kind == 0 and data:
        data[min(start, len(data) - 1)] ^= 1 << draw.randrange(8)
    elif kind == 1:
        data[start:start] = draw.randbytes(draw.choice((1, 4, 32)))
    elif kind == 2:
        data[start:end] = draw.choice(WORDS)
    elif kind == 3:
        del data[start:end]
    elif kind == 4:
        data[start:start] = data[start:end]
    elif kind == 5:
        other = draw.choice(seeds)
        cut = draw.randint(0, len(other))
        data[start:end] = other[cut : cut + draw.choice((4, 32, 256))]
    else:
        del data[start:]


@contextmanager
def limit_time() -> Iterator[None]:
    """Raise HangError in the main thread after the limit."""

    def expire(_signal: int, _frame: FrameType | None) -> None:
        raise HangError(f"no end after {HANG_S} s")

    old = signal.signal(signal.SIGALRM, expire)
    signal.alarm(HANG_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)


def try_input(target: Target, data: bytes) -> None:
    with limit_time():
        target(data)


def keep_input(name: str, data: bytes, folder: Path) -> Path:
    """Write a file that reproduces a crash."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{hashlib.sha256(data).hexdigest()[:12]}"
    path.write_bytes(data)
    return path
