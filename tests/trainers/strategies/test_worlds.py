"""Every strategy trains as one process does, survives kill -9, and hands its checkpoints to the others."""

from pathlib import Path

import pytest

from tests.tiers import exhaustive, long, spread

from .conftest import TOTAL, Worlds, read_lines

# Sums of the same numbers in another order differ in the last bits of a float32 loss around 5.
ROUNDING = 2e-6
CHECKS = "tests.trainers.strategies.checks"
NOTING = f"{CHECKS}:train_and_note_norms"

WORLDS = [
    (2, "ddp", []),
    pytest.param(3, "allreduce", [], marks=long),
    (2, "allreduce", ["--allreduce.algorithm", "ring", "--allreduce.bucket_mib", "0.01"]),
    pytest.param(2, "fsdp", [], marks=exhaustive),
    pytest.param(2, "fsdp", ["--fsdp.reshard", "never", "--fsdp.prefetch", "1"], marks=long),
    (3, "fsdp", []),  # shares of 2, 3 and 3 samples
    pytest.param(2, "zero1", [], marks=exhaustive),  # `HANDED_ON` compares both with one process, too
    pytest.param(3, "zero2", [], marks=long),
    (2, "tensor", []),
    pytest.param(2, "context", [], marks=long),
    pytest.param(2, "pipeline", ["--pipeline.schedule", "gpipe"], marks=exhaustive),
    (2, "pipeline", []),
    pytest.param(3, "parameter_server", [], marks=long),
    pytest.param(4, "hsdp", ["--mesh", "2x2"], marks=long),
    pytest.param(4, "pipeline+fsdp", ["--mesh", "2x2"], marks=exhaustive),
    pytest.param(4, "fsdp+tensor", ["--mesh", "2x*"], marks=long),
    pytest.param(4, "allreduce+tensor", ["--mesh", "2x2"], marks=exhaustive),
    pytest.param(4, "pipeline+tensor", ["--mesh", "2x2"], marks=exhaustive),
    pytest.param(4, "allreduce+pipeline", ["--mesh", "2x2"], marks=exhaustive),
    pytest.param(4, "tensor+pipeline", ["--mesh", "2x2"], marks=exhaustive),
    pytest.param(4, "context", ["--recompute", "full"], marks=exhaustive),
    pytest.param(4, "fsdp+context", ["--mesh", "2x2"], marks=long),
    pytest.param(4, "ddp+context", ["--mesh", "2x2"], marks=exhaustive),
    pytest.param(4, "pipeline+context", ["--mesh", "2x2"], marks=exhaustive),
    pytest.param(4, "context+tensor", ["--mesh", "2x2"], marks=exhaustive),
    pytest.param(4, "pipeline+zero1", ["--mesh", "2x2"], marks=exhaustive),
    pytest.param(4, "zero2+pipeline", ["--mesh", "2x2"], marks=exhaustive),
    pytest.param(8, "pipeline+fsdp+tensor", ["--mesh", "2x2x2"], marks=exhaustive),
    pytest.param(8, "pipeline+hsdp", ["--mesh", "2x2x2", "--train.micro_batch", "1"], marks=exhaustive),
]


@pytest.fixture(scope="module")
def norms_alone(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The norms of the gradients of one process."""
    path = tmp_path_factory.mktemp("norms")
    worlds.train(path, "ddp", ranks=1, function=NOTING)
    return read_norms(path)


def read_norms(path: Path) -> list[float]:
    return [float(line) for line in (path / "norms").read_text().splitlines()]


@pytest.mark.parametrize(("ranks", "strategy", "flags"), WORLDS, ids=str)
def test_losses_and_gradients_are_those_of_one_process(
    worlds: Worlds,
    alone: dict[int, float],
    norms_alone: list[float],
    tmp_path: Path,
    ranks: int,
    strategy: str,
    flags: list[str],
) -> None:
    """AdamW's steps are the same for gradients that are all twice as large: losses alone would not show it."""
    losses = worlds.train(tmp_path, strategy, *flags, ranks=ranks, function=NOTING)
    assert len(norms_alone) == TOTAL and read_norms(tmp_path) == pytest.approx(norms_alone, rel=1e-4)
    assert sorted(losses) == list(range(1, TOTAL + 1))
    assert {step: each[0] for step, each in losses.items()} == pytest.approx(alone, abs=ROUNDING)
    assert losses[TOTAL][0] < losses[1][0] - 0.1


@long
def test_pipelines_with_shares_of_different_sizes_count_each_sample_once(worlds: Worlds, tmp_path: Path) -> None:
    """Shares of 1 and 2 samples make two passes each; the first one repeats its sample, which must not count again."""
    flags = ("--train.batch", "3", "--train.micro_batch", "1")
    expected = worlds.train(tmp_path / "alone", "ddp", *flags, ranks=1, function=NOTING)
    flags = (*flags, "--mesh", "2x2")
    found = worlds.train(tmp_path / "split", "allreduce+pipeline", *flags, ranks=4, function=NOTING)
    assert read_norms(tmp_path / "split") == pytest.approx(read_norms(tmp_path / "alone"), rel=1e-4)
    assert [each[0] for each in found.values()] == pytest.approx([each[0] for each in expected.values()], abs=ROUNDING)


@pytest.mark.long
def test_interleaved_pipeline_of_four_stages_on_two_ranks(worlds: Worlds, tmp_path: Path) -> None:
    flags = ("--model.depth", "5")  # stages of unequal length
    expected = worlds.train(tmp_path / "alone", "ddp", *flags, ranks=1)
    found = worlds.train(tmp_path / "split", "pipeline", *flags, "--pipeline.schedule", "interleaved", ranks=2)
    assert [each[0] for each in found.values()] == pytest.approx([each[0] for each in expected.values()], abs=ROUNDING)


@long
def test_grouped_heads_and_rotary_positions_of_a_shared_sequence(worlds: Worlds, tmp_path: Path) -> None:
    flags = ("--model.kind", "llama", "--model.key_value_heads", "2")
    expected = worlds.train(tmp_path / "alone", "ddp", *flags, ranks=1)
    found = worlds.train(tmp_path / "shared", "context", *flags, "--evaluate.every_steps", "4", ranks=2)
    assert [each[0] for each in found.values()] == pytest.approx([each[0] for each in expected.values()], abs=ROUNDING)


@pytest.mark.long
def test_half_precision_stays_close_to_full_precision(worlds: Worlds, alone: dict[int, float], tmp_path: Path) -> None:
    flags = ("--fsdp.param_dtype", "bfloat16", "--fsdp.reduce_dtype", "float32")
    losses = worlds.train(tmp_path, "fsdp", *flags, ranks=2)
    found = {step: each[0] for step, each in losses.items()}
    # bfloat16 has 8 bits: 0.4 % of a loss around 5.
    assert found == pytest.approx(alone, abs=0.02) and found != alone


RESUMED = [
    (2, "fsdp", []),
    (2, "allreduce", ["--allreduce.algorithm", "ring"]),
    pytest.param(2, "zero1", [], marks=exhaustive),
    pytest.param(2, "zero2", [], marks=exhaustive),  # `HANDED_ON` kills and continues both, with other ranks
    pytest.param(2, "tensor", [], marks=exhaustive),
    pytest.param(2, "context", [], marks=exhaustive),
    pytest.param(2, "pipeline", [], marks=long),
    pytest.param(3, "parameter_server", [], marks=long),
    pytest.param(2, "diloco", ["--diloco.every_steps", "3"], marks=long),
    pytest.param(3, "gossip", [], marks=exhaustive),
    pytest.param(4, "fsdp+tensor", ["--mesh", "2x2"], marks=exhaustive),
    pytest.param(2, "pipeline", ["--pipeline.schedule", "interleaved", "--model.depth", "4"], marks=exhaustive),
    pytest.param(4, "hsdp", ["--mesh", "2x2"], marks=exhaustive),
    pytest.param(4, "pipeline+fsdp", ["--mesh", "2x2"], marks=exhaustive),
    pytest.param(4, "diloco+fsdp", ["--mesh", "2x2", "--diloco.every_steps", "3"], marks=exhaustive),
    pytest.param(4, "diloco+pipeline", ["--mesh", "2x2", "--diloco.every_steps", "3"], marks=exhaustive),
    pytest.param(8, "pipeline+fsdp+tensor", ["--mesh", "2x2x2"], marks=exhaustive),
]


@pytest.mark.parametrize(("ranks", "strategy", "flags"), RESUMED, ids=str)
def test_killed_run_resumes_bit_identically(
    worlds: Worlds, tmp_path: Path, ranks: int, strategy: str, flags: list[str]
) -> None:
    """With dropout, so that the random numbers of every rank must be right too."""
    flags = [*flags, "--model.dropout", "0.1"]
    whole = worlds.train(tmp_path / "whole", strategy, *flags, ranks=ranks)
    worlds.train(tmp_path / "broken", strategy, *flags, ranks=ranks, kill_after=6)
    broken = worlds.train(tmp_path / "broken", strategy, *flags, ranks=ranks, attempt=2)
    resumed = [line["step"] for line in read_lines(tmp_path / "broken") if line["event"] == "resumed"]
    assert len(resumed) == 1 and resumed[0] in (2, 4, 6)
    assert sorted(broken) == list(range(1, TOTAL + 1))
    for step, losses in broken.items():
        assert [each.hex() for each in losses] == [whole[step][0].hex()] * len(losses), f"step {step}"


HANDED_ON = [
    pytest.param((2, "fsdp", []), (1, "ddp", []), marks=exhaustive),
    pytest.param((2, "ddp", []), (2, "fsdp", []), marks=exhaustive),
    pytest.param((3, "zero2", []), (2, "zero1", []), marks=exhaustive),
    ((2, "zero1", []), (3, "fsdp", [])),
    pytest.param((2, "pipeline", []), (2, "tensor", []), marks=long),
    pytest.param((2, "tensor", []), (3, "parameter_server", []), marks=long),
    pytest.param((3, "parameter_server", []), (2, "pipeline", []), marks=exhaustive),
    pytest.param((4, "fsdp+tensor", ["--mesh", "2x2"]), (2, "allreduce", []), marks=exhaustive),
    pytest.param((1, "ddp", []), (4, "pipeline+fsdp", ["--mesh", "2x2"]), marks=exhaustive),
    pytest.param((8, "pipeline+fsdp+tensor", ["--mesh", "2x2x2"]), (3, "hsdp", ["--mesh", "1x3"]), marks=exhaustive),
]


@pytest.mark.parametrize(("before", "after"), HANDED_ON, ids=str)
def test_other_world_sizes_and_strategies_continue_with_the_same_losses(
    worlds: Worlds,
    alone: dict[int, float],
    tmp_path: Path,
    before: tuple[int, str, list[str]],
    after: tuple[int, str, list[str]],
) -> None:
    """Whatever wrote the checkpoint: batch, data order, weights, moments and schedule are kept."""
    worlds.train(tmp_path, before[1], *before[2], ranks=before[0], kill_after=6)
    losses = worlds.train(tmp_path, after[1], *after[2], ranks=after[0], attempt=2)
    assert any(line["event"] == "resumed" for line in read_lines(tmp_path))
    assert sorted(losses) == list(range(1, TOTAL + 1))
    assert {step: each[-1] for step, each in losses.items()} == pytest.approx(alone, abs=ROUNDING)


def test_ranks_of_another_strategy_do_not_drop_different_parts_under_tensor(worlds: Worlds, tmp_path: Path) -> None:
    """Their random numbers differ, and under `tensor` ranks must drop the same activations of what they all hold."""
    dropout = ("--model.dropout", "0.1")
    worlds.train(tmp_path, "allreduce", *dropout, ranks=2, kill_after=6)
    check = f"{CHECKS}:train_with_equal_common_parts"
    losses = worlds.train(tmp_path, "tensor", *dropout, ranks=2, attempt=2, function=check)
    assert sorted(losses) == list(range(1, TOTAL + 1))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        *spread(
            [
                ((2, "diloco", []), (1, "ddp", [])),
                ((2, "ddp", []), (2, "diloco", [])),
                ((3, "gossip", []), (2, "diloco", [])),
            ],
            every=3,
        ),
        # As many ranks, but each saved half of a model, and needs a whole one.
        pytest.param((4, "diloco+fsdp", ["--mesh", "2x2"]), (4, "diloco", []), marks=long),
    ],
    ids=str,
)
def test_islands_receive_from_and_pass_on_to_others(
    worlds: Worlds,
    alone: dict[int, float],
    tmp_path: Path,
    before: tuple[int, str, list[str]],
    after: tuple[int, str, list[str]],
) -> None:
    """One island's model stands for all, so losses are near those of one process, not equal."""
    flags = ("--diloco.every_steps", "2")
    worlds.train(tmp_path, before[1], *before[2], *flags, ranks=before[0], kill_after=6)
    losses = worlds.train(tmp_path, after[1], *after[2], *flags, ranks=after[0], attempt=2)
    assert sorted(losses) == list(range(1, TOTAL + 1))
    # A sample of the batch is a quarter of an island's share; its mean loss scatters by about 0.1 around 5.
    assert losses[TOTAL][-1] == pytest.approx(alone[TOTAL], abs=0.25)
    assert losses[TOTAL][-1] < losses[1][0]


def test_asynchronous_workers_learn_and_resume(worlds: Worlds, alone: dict[int, float], tmp_path: Path) -> None:
    """Which gradient comes first is chance, so only the way down is the same."""
    flags = ("--parameter_server.staleness_max", "2")
    worlds.train(tmp_path, "parameter_server", *flags, ranks=3, kill_after=6)
    losses = worlds.train(tmp_path, "parameter_server", *flags, ranks=3, attempt=2)
    assert next(line["step"] for line in read_lines(tmp_path) if line["event"] == "resumed") in (2, 4, 6)
    assert sorted(losses) == list(range(1, TOTAL + 1))
    assert losses[TOTAL][-1] == pytest.approx(alone[TOTAL], abs=0.25)


@pytest.mark.parametrize(
    ("ranks", "strategy", "flags"),
    [(2, "pipeline", []), (3, "parameter_server", ["--parameter_server.staleness_max", "1"]), (3, "gossip", [])],
    ids=str,
)
def test_requested_stop_ends_all_ranks_after_one_step(
    worlds: Worlds, tmp_path: Path, ranks: int, strategy: str, flags: list[str]
) -> None:
    """Every rank commits the same checkpoint, at a step that all could still agree on."""
    (tmp_path / "preempted").touch()
    arguments = [
        "--strategy",
        strategy,
        "--train.steps",
        "50",
        "--train.batch",
        "8",
        "--train.micro_batch",
        "2",
        *flags,
    ]
    small = ["--model.depth", "2", "--model.width", "16", "--model.context", "16"]
    ended = worlds.call(tmp_path, "trainers.lm:main", [*arguments, *small], ranks=ranks)
    assert ended.codes == [143] * ranks, ended.errors
    last = read_lines(tmp_path)[-1]
    assert last["event"] == "preempted, checkpoint committed" and last["checkpoint_step"] == last["step"]
    assert int(str(last["step"])) <= 3


@pytest.mark.parametrize(
    ("strategy", "flags", "reason"),
    [
        ("pipeline", ["--train.micro_batch", "3"], "micro-batches of equal size"),
        ("pipeline", ["--train.micro_batch", "16"], "at least 2 micro-batches"),
        ("context", ["--model.context", "30"], "sequences of 30 tokens cannot be cut into 4 equal chunks"),
        ("zero1+tensor", ["--mesh", "2x1"], "`zero1` can be combined with pipeline only"),
        ("pipeline", ["--model.depth", "1"], "1 blocks cannot be cut into 2 stages"),
        ("tensor", ["--model.heads", "1"], "`query_key_value` has 1 pieces"),
        ("ddp+tensor", ["--mesh", "1x2"], "needs the whole model"),
        ("fsdp", ["--mesh", "3"], "is for 3 ranks and there are 2"),
    ],
)
def test_indivisible_configuration_is_a_one_line_error(
    worlds: Worlds, tmp_path: Path, strategy: str, flags: list[str], reason: str
) -> None:
    ended = worlds.call(tmp_path, "trainers.lm:main", ["--strategy", strategy, *flags], ranks=2)
    assert ended.codes == [1, 1], ended.errors
    assert reason in ended.errors and "Traceback" not in ended.errors
    assert ended.errors.count("error:") == 1  # both ranks made it; it is reported once
