"""Where ranks stand, which samples they read, and how gradients are packed: all without peers."""

import itertools
import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainers.errors import TrainerError
from trainers.ranks import Ranks
from trainers.strategies import create_strategy
from trainers.strategies.allreduce import fill_buckets
from trainers.strategies.grid import Grid, parse_mesh
from trainers.strategies.options import AllReduceOptions, DilocoOptions, StrategyOptions


def place(rank: int, world_size: int) -> Ranks:
    return Ranks(rank=rank, world_size=world_size, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("text", "axes", "world_size", "node", "expected"),
    [
        ("", ("shard",), 6, 3, (6,)),
        ("", ("replicate", "shard"), 8, 4, (2, 4)),  # shards stay within a node
        ("", ("pipeline", "shard", "tensor"), 8, 4, (2, 1, 4)),
        ("", ("replicate", "shard"), 3, 1, (3, 1)),
        ("2x3", ("replicate", "shard"), 6, 1, (2, 3)),
        ("*x3", ("replicate", "shard"), 12, 1, (4, 3)),
        ("2x*x2", ("pipeline", "shard", "tensor"), 12, 1, (2, 3, 2)),
    ],
)
def test_ranks_of_a_mesh_are_laid_out_as_documented(
    text: str, axes: tuple[str, ...], world_size: int, node: int, expected: tuple[int, ...]
) -> None:
    assert parse_mesh(text, axes, world_size, node) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [("2", "has 1 axes, but the strategy has 2: replicate x shard"), ("2x3", "for 6 ranks and there are 4"),
     ("*x3", "a multiple of 3"), ("*x*", "is not like"), ("0x4", "is not like"), ("ax4", "is not like")],
)  # fmt: skip
def test_mesh_that_does_not_fit_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(TrainerError, match=reason.replace("*", r"\*")):
        parse_mesh(text, ("replicate", "shard"), 4, 1)


@given(sizes=st.lists(st.integers(1, 4), min_size=3, max_size=3), batch=st.integers(64, 100))
def test_every_sample_is_read_by_one_share_and_its_loss_is_counted_once(sizes: list[int], batch: int) -> None:
    axes, world_size = ("pipeline", "shard", "tensor"), math.prod(sizes)
    mesh = "x".join(str(size) for size in sizes)
    shares = [Grid(place(rank, world_size), axes, mesh).find_share() for rank in range(world_size)]
    read = [sample for share in shares if share.is_counted for sample in share.find_samples(1000, batch)]
    assert sorted(read) == list(range(1000, 1000 + batch))
    # Only slices of one layer draw equal random numbers.
    assert len({share.draw for share in shares}) == world_size // sizes[2]


@given(world_size=st.integers(1, 9), batch=st.integers(9, 60), micro_batch=st.integers(1, 12))
def test_all_ranks_make_equal_numbers_of_passes_that_add_up(world_size: int, batch: int, micro_batch: int) -> None:
    shares = [Grid(place(rank, world_size), ("shard",), "").find_share() for rank in range(world_size)]
    passes = [share.find_passes(100, batch, micro_batch) for share in shares]
    assert len({len(each) for each in passes}) == 1
    flat = [one for each in passes for one in each]
    assert all(0 < len(samples) <= micro_batch for samples, _ in flat)
    assert sum(part for _, part in flat) == pytest.approx(1.0)
    assert [sample for samples, part in flat if part for sample in samples] == list(range(100, 100 + batch))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fsdp+dpd", "unknown strategy `dpd`"),
        ("ddp+hsdp", "uses an axis twice: replicate x replicate x shard"),
        ("fsdp+parameter_server", "cannot be combined"),
    ],
)
def test_contradictory_combination_is_refused(name: str, reason: str) -> None:
    with pytest.raises(TrainerError, match=reason):
        create_strategy(name, place(0, 4))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (StrategyOptions(diloco=DilocoOptions(every_steps=0)), "`--diloco.every_steps` must be at least 1, not 0"),
        (StrategyOptions(diloco=DilocoOptions(momentum=1.0)), "`--diloco.momentum` must be in"),
        (StrategyOptions(allreduce=AllReduceOptions(bucket_mib=0.0)), "`--allreduce.bucket_mib` must be above 0"),
    ],
)
def test_knob_that_cannot_work_is_named(options: StrategyOptions, reason: str) -> None:
    with pytest.raises(TrainerError, match=re.escape(reason)):
        create_strategy("ddp", place(0, 1), options)


@pytest.mark.parametrize("name", ["fsdp+tensor", "pipeline+hsdp", "diloco+fsdp", "allreduce+tensor+pipeline"])
def test_combination_on_one_process_is_plain_training(name: str) -> None:
    axes = {"pipeline+hsdp": 3, "allreduce+tensor+pipeline": 3}.get(name, 2)
    strategy = create_strategy(name, place(0, 1), StrategyOptions(mesh="x".join("1" * axes)))
    model = torch.nn.Linear(2, 1, bias=False)
    wrapped = strategy.wrap(model)
    with strategy.micro_step(wrapped, last=True):
        wrapped(torch.tensor([[3.0, 4.0]])).sum().backward()
    assert strategy.clip(wrapped, 1.0) == pytest.approx(5.0)
    assert float(model.weight.grad.norm()) == pytest.approx(1.0, abs=1e-4)


@given(counts=st.lists(st.integers(1, 50), max_size=30), bytes_max=st.integers(1, 200))
def test_buckets_keep_order_and_size(counts: list[int], bytes_max: int) -> None:
    tensors = [torch.zeros(count) for count in counts]
    buckets = fill_buckets(tensors, bytes_max)
    assert [id(each) for bucket in buckets for each in bucket] == [id(each) for each in tensors]
    for bucket in buckets:
        assert bucket and (len(bucket) == 1 or sum(each.nbytes for each in bucket) <= bytes_max)
    # No bucket could have taken the first of the next.
    for one, other in itertools.pairwise(buckets):
        assert sum(each.nbytes for each in one) + other[0].nbytes > bytes_max


def test_a_bucket_has_one_dtype() -> None:
    kinds = [torch.float32, torch.bfloat16, torch.bfloat16, torch.float32]
    tensors = [torch.zeros(2, dtype=kind) for kind in kinds]
    assert [[each.dtype for each in bucket] for bucket in fill_buckets(tensors, 1000)] == [
        [torch.float32], [torch.bfloat16, torch.bfloat16], [torch.float32],
    ]  # fmt: skip
    assert fill_buckets([], 1000) == []
