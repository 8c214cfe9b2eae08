"""Fifty times kill -9 at a moment of chance, under every strategy whose resume is exact: fifty equal losses."""

import random
from pathlib import Path

import pytest

from .conftest import TOTAL, Worlds, read_lines

pytestmark = pytest.mark.long

SEED = 20261121
KILLS = 50
SETUPS: list[tuple[int, str, list[str]]] = [
    (1, "ddp", []),
    (2, "ddp", []),
    (3, "ddp", []),
    (2, "allreduce", ["--allreduce.algorithm", "ring"]),
    (3, "allreduce", []),
    (2, "fsdp", []),
    (3, "fsdp", []),
    (4, "hsdp", ["--mesh", "2x2"]),
    (2, "tensor", []),
    (2, "pipeline", []),
    (3, "parameter_server", []),
    (2, "diloco", ["--diloco.every_steps", "3"]),
    (3, "gossip", []),
    (4, "fsdp+tensor", ["--mesh", "2x2"]),
    (4, "pipeline+fsdp", ["--mesh", "2x2"]),
]


def test_every_killed_run_resumes_bit_identically(worlds: Worlds, tmp_path: Path) -> None:
    draw = random.Random(SEED)
    wholes: dict[int, dict[int, list[float]]] = {}
    equal, from_start = 0, 0
    for kill in range(KILLS):
        place = kill % len(SETUPS)
        ranks, strategy, flags = SETUPS[place]
        flags = [*flags, "--model.dropout", "0.1"]
        if place not in wholes:
            wholes[place] = worlds.train(tmp_path / f"whole-{place}", strategy, *flags, ranks=ranks)
        folder = tmp_path / f"kill-{kill}"
        step = draw.randint(1, TOTAL - 2)
        worlds.train(folder, strategy, *flags, ranks=ranks, kill_after=step)
        broken = worlds.train(folder, strategy, *flags, ranks=ranks, attempt=2)
        # Before the first commit there is nothing to resume from: the run begins anew, and is equal all the same.
        from_start += not any(line["event"] == "resumed" for line in read_lines(folder))
        assert sorted(broken) == list(range(1, TOTAL + 1)), (strategy, step)
        for key, losses in broken.items():
            expected = wholes[place][key][0].hex()
            assert [each.hex() for each in losses] == [expected] * len(losses), (strategy, ranks, step, key)
        equal += 1
    print(f"{equal} of {KILLS} kills resumed bit-identically, {from_start} of them from the start; seed {SEED}")
    assert from_start < KILLS // 2
