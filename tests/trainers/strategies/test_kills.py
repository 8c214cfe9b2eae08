"""Kill -9 at random moments under every strategy whose resume is exact: a resumed run has equal losses."""

import random
from pathlib import Path

import pytest

from tests.tiers import exhaustive, long

from .conftest import Worlds, read_lines, write_documents

SEED = 20261121
KILLS = (8, 100)  # of `make test-slow` and of `make test-exhaustive`
KILLS_OF_A_RUN = 2  # each resumes the one before it, so that a run of 16 steps is broken twice
STEPS = 16
# Saved every second step, each save waiting for the one before: from here on there is a checkpoint to resume from.
KILL_FIRST = 5
# Between two kills of a run, and after the last one: a step may end before the kill that comes within it.
STEPS_APART = 3
SETUPS: list[tuple[int, str, list[str]]] = [
    (1, "ddp", []),
    (2, "ddp", []),
    (3, "ddp", []),
    (2, "allreduce", ["--allreduce.algorithm", "ring"]),
    (3, "allreduce", []),
    (2, "fsdp", []),
    (3, "fsdp", []),
    (4, "hsdp", ["--mesh", "2x2"]),
    (2, "zero1", []),
    (3, "zero2", []),
    (2, "tensor", []),
    (2, "context", []),
    (2, "expert", ["--model.experts", "4", "--model.expert_capacity", "1.25"]),
    (2, "pipeline", []),
    (3, "parameter_server", []),
    (2, "diloco", ["--diloco.every_steps", "3"]),
    (3, "gossip", []),
    (4, "fsdp+tensor", ["--mesh", "2x2"]),
    (4, "pipeline+fsdp", ["--mesh", "2x2"]),
    # Streamed data, masks between documents and the fused loss.
    (2, "ddp", ["documents"]),
    (3, "fsdp", ["documents"]),
    (2, "diloco", ["documents", "--model.kind", "llama"]),
]


@pytest.mark.parametrize("kills", [pytest.param(KILLS[0], marks=long), pytest.param(KILLS[1], marks=exhaustive)])
def test_every_killed_run_resumes_bit_identically(worlds: Worlds, tmp_path: Path, kills: int) -> None:
    draw = random.Random(SEED)
    wholes: dict[int, dict[int, list[float]]] = {}
    equal, resumed_at = 0, []
    documents = write_documents(tmp_path / "tokens")
    for run in range(kills // KILLS_OF_A_RUN):
        place = run % len(SETUPS)
        ranks, strategy, own = SETUPS[place]
        flags = ["--model.dropout", "0" if "llama" in own else "0.1"]
        flags += [*(part for flag in own for part in (documents if flag == "documents" else [flag]))]
        flags += ["--train.steps", str(STEPS)]
        if place not in wholes:
            wholes[place] = worlds.train(tmp_path / f"whole-{place}", strategy, *flags, ranks=ranks)
        folder = tmp_path / f"run-{run}"
        first = draw.randrange(KILL_FIRST, STEPS - 2 * STEPS_APART)
        steps = [first, draw.randrange(first + STEPS_APART, STEPS - STEPS_APART)]
        for attempt, step in enumerate(steps, start=1):
            share = draw.random()
            worlds.train(folder, strategy, *flags, ranks=ranks, kill_after=step, kill_share=share, attempt=attempt)
        broken = worlds.train(folder, strategy, *flags, ranks=ranks, attempt=KILLS_OF_A_RUN + 1)
        starts = [line["step"] for line in read_lines(folder) if line["event"] == "resumed"]
        assert len(starts) == KILLS_OF_A_RUN, (strategy, steps)
        resumed_at += starts
        assert sorted(broken) == list(range(1, STEPS + 1)), (strategy, steps)
        for key, losses in broken.items():
            expected = wholes[place][key][0].hex()
            assert [each.hex() for each in losses] == [expected] * len(losses), (strategy, ranks, steps, key)
        equal += KILLS_OF_A_RUN
    print(f"{equal} of {kills} kills resumed bit-identically, at steps {resumed_at}; seed {SEED}")
    assert equal == kills and all(resumed_at)
