"""Flags, environment and launch plans."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainers.config import Config, ModelConfig, TrainConfig, iterate_knobs, parse_config, to_arguments
from trainers.environment import read_environment
from trainers.errors import TrainerError
from trainers.launch import read_plan, split_arguments
from trainers.strategies import STRATEGIES, create_strategy


@given(
    depth=st.integers(1, 99), rate=st.floats(1e-9, 1e3), precision=st.sampled_from(["float32", "bfloat16"]),
    strategy=st.text(min_size=1),
)  # fmt: skip
def test_config_survives_the_way_through_flags(depth: int, rate: float, precision: str, strategy: str) -> None:
    config = Config(
        strategy=strategy,
        model=ModelConfig(depth=depth),
        train=TrainConfig(learning_rate=rate, precision=precision),
    )
    assert parse_config(to_arguments(config)) == config


def test_no_flags_are_the_defaults_and_every_knob_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_config([]) == Config()
    with pytest.raises(SystemExit):
        parse_config(["--help"])
    text = capsys.readouterr().out
    for name, field in iterate_knobs(Config):
        assert f"--{name}" in text and field.metadata["help"]


@pytest.mark.parametrize(
    "flags",
    [["--model.dept", "3"], ["--train.steps", "0"], ["--model.width", "7"], ["--train.precision", "int8"]],
)
def test_flags_that_cannot_work_exit_with_code_2(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_config(flags)
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().train.steps = 3  # type: ignore[misc]


def test_environment_has_defaults_and_reads_the_contract() -> None:
    assert read_environment({}).checkpoint_url == "./checkpoints"
    found = read_environment({"BROKER_ATTEMPT": "4", "BROKER_CHECKPOINT_DIR": "/c", "BROKER_PROGRESS_FILE": ""})
    assert (found.attempt, found.checkpoint_url, found.progress_file) == (4, "/c", None)


def test_ranks_follow_node_order() -> None:
    plan = read_plan(
        {
            "SKYPILOT_NODE_RANK": "1",
            "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
            "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NUM_GPUS_PER_NODE": "4",
            "BROKER_MASTER_PORT": "1234",
        }
    )
    assert plan.worker_variables(3, 1234) == {
        "RANK": "7",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "3",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "1234",
    }


def test_node_without_gpus_gets_one_worker() -> None:
    assert read_plan({"SKYPILOT_NUM_GPUS_PER_NODE": "0"}).workers == 1


def test_launch_flags_stop_where_the_command_begins() -> None:
    assert split_arguments(["--workers", "2", "-m", "a", "-x"]) == (2, ["-m", "a", "-x"])
    with pytest.raises(SystemExit):
        split_arguments(["a"])


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_wraps_clips_and_leaves_the_mean_gradient(name: str) -> None:
    import torch

    from trainers.ranks import Ranks

    strategy = create_strategy(name, Ranks(rank=0, world_size=1, device=torch.device("cpu")))
    model = torch.nn.Linear(2, 1, bias=False)
    wrapped = strategy.wrap(model)
    for last in (False, True):
        with strategy.micro_step(wrapped, last=last):
            wrapped(torch.tensor([[3.0, 4.0]])).sum().backward()
    assert strategy.clip(wrapped, 1.0) == pytest.approx(10.0)
    assert float(model.weight.grad.norm()) == pytest.approx(1.0, abs=1e-4)


def test_unknown_strategy_names_the_known_ones() -> None:
    with pytest.raises(TrainerError, match="known: ddp"):
        create_strategy("dpd", None)  # type: ignore[arg-type]
