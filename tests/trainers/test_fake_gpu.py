"""Steps on a GPU that does not exist: torch's fake tensors have a device but no values.

They raise an error where tensors of two devices meet, and where the host asks for a value and would have to wait.
Autograd accepts only devices that torch was built for, or `meta`, which here stands for the GPU.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from trainers.config import Config, parse_config
from trainers.lm import choose_forward, find_mask, make_batches
from trainers.loop import Position, StepReport, Work, iterate_steps
from trainers.lora import add_adapters
from trainers.models import create_language_model
from trainers.models.decoder import Decoder, allocate
from trainers.models.llama import Attention, make_waves
from trainers.optimizer import Optimizer
from trainers.ranks import Ranks
from trainers.recipe import Count
from trainers.scaling import LossScale
from trainers.strategies import create_strategy

GPU = torch.device("meta")
CONTEXT = 32
FLAGS = ["--model.depth", "2", "--model.width", "32", "--model.heads", "4", "--model.context", str(CONTEXT)]
LLAMA = ["--model.kind", "llama", "--model.key_value_heads", "2"]


@pytest.fixture(autouse=True)
def autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch has no autocast for `meta`."""
    monkeypatch.setattr(torch, "autocast", lambda device, **_: nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)


class Samples:
    fingerprint = "fake"

    def read(self, sample_first: int, sample_count: int) -> Any:
        windows = torch.zeros(sample_count, CONTEXT + 1, dtype=torch.int64)
        return windows[:, :-1], windows[:, 1:]


def make_model(config: Config) -> Decoder:
    """Allocate a model on the GPU; drawing weights would require its generator."""
    with torch.device("meta"):
        model: Decoder = create_language_model(config.model.kind, config.model)
        add_adapters(model, config.lora)
    allocate(model, GPU)
    for module in model.modules():
        if isinstance(module, Attention):
            with GPU:
                module.waves = make_waves(CONTEXT, module.head_width, config.model.rope_theta)
    return model


def take_steps(flags: list[str], *, count: Count | None = None) -> Iterator[StepReport]:
    config = parse_config([*FLAGS, "--train.batch", "4", "--train.micro_batch", "2", *flags])
    ranks = Ranks(rank=0, world_size=1, device=GPU)
    model = make_model(config)
    forward, loss = choose_forward(config, separator=0)
    samples = make_batches(config, Samples(), mask_id=find_mask(config, 255), vocabulary=255, seed=0)
    return iterate_steps(
        config.train,
        model=model,
        strategy=create_strategy("ddp", ranks),
        optimizer=Optimizer(model.named_parameters(), config.train),
        work=Work(samples=samples, loss=loss, precision=nullcontext, forward=forward, count=count),
        position=Position("fake"),
        ranks=ranks,
        is_stop_asked=lambda: False,
        before_change=lambda: None,
        scaling=LossScale("float32"),
        is_read_due=lambda step: False,
    )


@pytest.mark.parametrize(
    "flags",
    [
        [],
        LLAMA,
        ["--fused_loss", "--data.document_mask", *LLAMA],
        ["--model.bidirectional", "--data.mask_share", "0.3"],
        ["--lora.rank", "2", "--train.z_loss", "1e-4"],
    ],
    ids=["gpt", "llama", "documents", "encoder", "adapters"],
)
def test_steps_stay_on_the_device_and_the_host_does_not_wait(flags: list[str]) -> None:
    with FakeTensorMode():
        steps = take_steps(flags)
        reports = [next(steps) for _ in range(2)]
    assert [report.step for report in reports] == [1, 2] and all(report.reading is None for report in reports)


def test_host_does_not_wait_for_the_numbers_of_labels() -> None:
    with FakeTensorMode():
        report = next(take_steps([], count=lambda targets: (targets > 0).sum()))
    assert report.step == 1 and report.reading is None


def test_wait_for_the_device_would_be_detected() -> None:
    """A mixture of experts waits for the numbers of rows."""
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        next(take_steps(["--model.experts", "4"]))


class Attended(TorchFunctionMode):
    """Notes the numbers of heads of each attention."""

    def __init__(self) -> None:
        super().__init__()
        self.heads: list[tuple[int, int]] = []

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if function is functional.scaled_dot_product_attention:
            query, key, *_ = arguments
            self.heads.append((query.shape[1], key.shape[1]))
        return function(*arguments, **(named or {}))


@pytest.mark.parametrize(
    ("dtype", "is_masked", "heads"),
    [(torch.bfloat16, False, (4, 2)), (torch.bfloat16, True, (4, 4)), (torch.float32, False, (4, 4))],
)
def test_shared_heads_are_repeated_where_no_kernel_accepts_them(
    dtype: torch.dtype, is_masked: bool, heads: tuple[int, int]
) -> None:
    """Otherwise torch would choose the kernel that holds all scores in memory."""
    from trainers.models.attention import WholeSequence

    def make(count: int) -> Tensor:
        return torch.empty(1, count, CONTEXT, 8, dtype=dtype, device="cuda")

    with FakeTensorMode():
        mask = torch.empty(1, 1, CONTEXT, CONTEXT, dtype=torch.bool, device="cuda") if is_masked else None
        with Attended() as attended:
            assert WholeSequence().attend(make(4), make(2), make(2), mask=mask).shape == (1, 4, CONTEXT, 8)
    assert attended.heads == [heads]
