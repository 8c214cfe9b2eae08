"""A mixture of experts under every strategy: losses of one process, kill -9, checkpoints read by other strategies."""

from pathlib import Path

import pytest

from .conftest import TOTAL, Worlds, read_lines
from .test_worlds import ROUNDING

long = pytest.mark.long

SWITCH = ["--model.experts", "4", "--model.experts_per_token", "1", "--model.router_z_weight", "1e-3"]
MIXTRAL = [
    "--model.kind",
    "llama",
    "--model.experts",
    "4",
    "--model.key_value_heads",
    "2",
    "--model.hidden_width",
    "32",
]


@pytest.fixture(scope="module")
def mixtral_alone(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of one process."""
    losses = worlds.train(tmp_path_factory.mktemp("mixtral"), "ddp", *MIXTRAL, ranks=1)
    return {step: each[0] for step, each in losses.items()}


WORLDS = [
    pytest.param(2, "ddp", [], marks=long),
    (2, "expert", []),
    pytest.param(4, "fsdp+expert", ["--mesh", "2x2"], marks=long),
    pytest.param(4, "allreduce+expert", ["--mesh", "2x2"], marks=long),
    pytest.param(4, "pipeline+expert", ["--mesh", "2x2"], marks=long),
    pytest.param(4, "expert+tensor", ["--mesh", "2x2"], marks=long),
    pytest.param(2, "expert", ["--recompute", "full"], marks=long),
]


@pytest.mark.parametrize(("ranks", "strategy", "flags"), WORLDS, ids=str)
def test_losses_of_a_mixture_are_those_of_one_process(
    worlds: Worlds, mixtral_alone: dict[int, float], tmp_path: Path, ranks: int, strategy: str, flags: list[str]
) -> None:
    losses = worlds.train(tmp_path, strategy, *MIXTRAL, *flags, ranks=ranks)
    assert {step: each[0] for step, each in losses.items()} == pytest.approx(mixtral_alone, abs=ROUNDING)
    assert losses[TOTAL][0] < losses[1][0] - 0.1


RESUMED = [
    pytest.param(2, "expert", SWITCH, marks=long),
    pytest.param(2, "expert", [*SWITCH, "--model.expert_capacity", "1.0"], marks=long),
]


@pytest.mark.parametrize(("ranks", "strategy", "flags"), RESUMED, ids=str)
def test_killed_mixture_resumes_bit_identically(
    worlds: Worlds, tmp_path: Path, ranks: int, strategy: str, flags: list[str]
) -> None:
    flags = [*flags, "--model.dropout", "0.1"]
    whole = worlds.train(tmp_path / "whole", strategy, *flags, ranks=ranks)
    worlds.train(tmp_path / "broken", strategy, *flags, ranks=ranks, kill_after=6)
    broken = worlds.train(tmp_path / "broken", strategy, *flags, ranks=ranks, attempt=2)
    assert any(line["event"] == "resumed" for line in read_lines(tmp_path / "broken"))
    for step, losses in broken.items():
        assert [each.hex() for each in losses] == [whole[step][0].hex()] * len(losses), f"step {step}"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, "expert"), (1, "ddp")),
        pytest.param((1, "ddp"), (4, "expert"), marks=long),
    ],
    ids=str,
)
def test_checkpoint_of_a_mixture_is_read_by_other_ranks_and_strategies(
    worlds: Worlds, mixtral_alone: dict[int, float], tmp_path: Path, before: tuple[int, str], after: tuple[int, str]
) -> None:
    worlds.train(tmp_path, before[1], *MIXTRAL, ranks=before[0], kill_after=6)
    losses = worlds.train(tmp_path, after[1], *MIXTRAL, ranks=after[0], attempt=2)
    assert any(line["event"] == "resumed" for line in read_lines(tmp_path))
    assert {step: each[-1] for step, each in losses.items()} == pytest.approx(mixtral_alone, abs=ROUNDING)


@pytest.mark.parametrize(
    ("strategy", "flags", "reason"),
    [
        ("expert", [], "this model has no experts"),
        ("expert", ["--model.experts", "3"], "3 experts cannot be divided evenly by 2 ranks"),
    ],
)
def test_experts_that_cannot_be_spread_are_a_one_line_error(
    worlds: Worlds, tmp_path: Path, strategy: str, flags: list[str], reason: str
) -> None:
    ended = worlds.call(tmp_path, "trainers.lm:main", ["--strategy", strategy, *flags], ranks=2)
    assert ended.codes == [1, 1], ended.errors
    assert reason in ended.errors and "Traceback" not in ended.errors
