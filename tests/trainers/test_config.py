"""Flags, environment and launch plans."""

import dataclasses
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainers import image_config
from trainers.config import Config, ModelConfig, TrainConfig, iterate_knobs, parse_config, to_arguments
from trainers.environment import read_environment
from trainers.errors import TrainerError
from trainers.launch import launch_if_needed, read_plan, split_arguments
from trainers.presets import PRESETS
from trainers.strategies import STRATEGIES, create_strategy


@given(
    depth=st.integers(1, 99), rate=st.floats(1e-9, 1e3), dtype=st.sampled_from(["float32", "bfloat16"]),
    strategy=st.text(min_size=1), is_compiled=st.booleans(),
)  # fmt: skip
def test_config_survives_the_conversion_to_flags(
    depth: int, rate: float, dtype: str, strategy: str, is_compiled: bool
) -> None:
    config = Config(
        strategy=strategy,
        model=ModelConfig(depth=depth),
        train=TrainConfig(learning_rate=rate),
        dtype=dtype,
        compile=is_compiled,
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
    [
        ["--model.dept", "3"],
        ["--train.steps", "0"],
        ["--model.width", "7"],
        ["--dtype", "int8"],
        ["--preset", "gpt3"],
        ["--compile", "maybe"],
        ["--model.kind", "llama", "--model.dropout", "0.1"],
        ["--model.key_value_heads", "3"],
        ["--dtype", "float16", "--strategy", "diloco+fsdp"],
    ],
)
def test_flags_that_cannot_work_exit_with_code_2(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_config(flags)
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err


def explain(flags: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        parse_config(flags)
    assert caught.value.code == 2
    return capsys.readouterr().err.partition("error: ")[2].strip()


@pytest.mark.parametrize(
    ("flag", "meant"), [("--model.dept", "--model.depth"), ("--steps", "--train.steps"), ("--lr=3", "")]
)
def test_unknown_flag_names_the_near_miss(flag: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = f"; did you mean `{meant}`?" if meant else ""
    assert explain([flag], capsys) == f"unknown flag `{flag.partition('=')[0]}`{message}"


def test_flag_beats_file_beats_preset_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('preset = "gpt2"\ncompile = true\n[train]\nsteps = 7\nbatch = 24\nlearning_rate = 1\n')
    config = parse_config(["--config", str(file), "--train.batch", "48", "--compile=false"])
    assert (config.train.batch, config.compile) == (48, False)  # flag
    assert (config.train.steps, config.train.learning_rate) == (7, 1.0)  # file
    assert (config.model.depth, config.model.tie_embeddings, config.dtype) == (12, True, "bfloat16")  # preset
    assert config.train.weight_decay == TrainConfig().weight_decay  # default
    other = parse_config(["--config", str(file), "--preset", "gpt2-xl", "--compile"])
    assert (other.model.depth, other.train.steps, other.compile) == (48, 7, True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[model]\ndept = 3", "`model.dept` is unknown; did you mean `model.depth`?"),
        ("[model]\ndepth = 3.5", "`model.depth` must be a whole number, not 3.5"),
        ("[model]\ndepth = true", "`model.depth` must be a whole number, not True"),
        ("compile = 1", "`compile` must be true or false, not 1"),
        ('dtype = "int8"', "`dtype` must be one of float32, bfloat16, float16, float8, not 'int8'"),
        ("[model", "is not valid TOML"),
        ('preset = "gpt3"', "unknown preset `gpt3`; known: gpt-1m"),
        (None, "cannot read"),
    ],
)
def test_config_file_that_cannot_work_says_what_is_wrong(
    tmp_path: Path, content: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    if content is not None:
        file.write_text(content)
    assert message in explain(["--config", str(file)], capsys)


# Parameters of the published models, to the last one; ours of the same shape must agree.
PARAMETER_COUNTS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama3-1b": 1_235_814_400,
    "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "mixtral-8x7b": 46_702_792_704,
}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_its_stated_size(name: str) -> None:
    import torch

    from trainers.models import create_language_model

    known = dict(iterate_knobs(Config))
    assert all(type(value) is type(known[key].default) for key, value in PRESETS[name].items())
    config = parse_config(["--preset", name])
    with torch.device("meta"):
        model = create_language_model(config.model.kind, config.model)
    count = sum(parameter.numel() for parameter in model.parameters())
    if name in PARAMETER_COUNTS:
        assert count == PARAMETER_COUNTS[name]
    else:
        assert count == pytest.approx(int(name.rpartition("-")[2].rstrip("m")) * 1e6, rel=0.1)


@pytest.mark.parametrize("name", image_config.PRESETS)
def test_every_preset_of_the_classifier_is_a_config(name: str) -> None:
    config = image_config.parse_config(["--preset", name])
    assert config != image_config.ImageConfig()


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().train.steps = 3  # type: ignore[misc]


def test_environment_has_defaults_and_follows_the_contract() -> None:
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


def test_elastic_run_with_fewer_ranks_than_its_minimum_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other node can join the rendezvous of a single one, so that it would wait forever, without a word."""
    for name in ("RANK", "BROKER_ELASTIC_AT", "SKYPILOT_NODE_IPS", "SKYPILOT_NUM_NODES", "SKYPILOT_NUM_GPUS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        SystemExit, match=r"`--elastic 2:8` requires 2 ranks, and this node starts 1\n\nhint: .*workers 2"
    ):
        launch_if_needed(None, ["--elastic", "2:8"], elastic="2:8")


def test_plain_start_on_the_brokers_nodes_learns_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setenv("SKYPILOT_NODE_RANK", "1")
    monkeypatch.setenv("SKYPILOT_NODE_IPS", "10.0.0.1\n10.0.0.2")
    monkeypatch.setenv("SKYPILOT_NUM_GPUS_PER_NODE", "0")
    assert launch_if_needed("trainers.lm", []) is None
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"]) == ("1", "2", "10.0.0.1")
    # What torchrun says counts more.
    monkeypatch.setenv("RANK", "5")
    assert launch_if_needed("trainers.lm", []) is None and os.environ["RANK"] == "5"


def test_launch_flags_end_where_the_command_begins() -> None:
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
