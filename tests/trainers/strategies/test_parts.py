"""The parts of the strategies without peers: positions, shards, turns of a ring, dropout, clipping and memory."""

import contextlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.tiers import examples
from trainers.config import TrainConfig
from trainers.errors import TrainerError
from trainers.optimizer import Optimizer
from trainers.ranks import Ranks
from trainers.session import Session
from trainers.strategies import STRATEGIES, create_strategy, find_axes
from trainers.strategies.base import MicroBatch, Passes, Strategy
from trainers.strategies.combined import Combined
from trainers.strategies.diloco import Outer
from trainers.strategies.gradients import clip_gradients
from trainers.strategies.grid import Grid, Part
from trainers.strategies.options import (
    DilocoOptions,
    FsdpOptions,
    GossipOptions,
    ParameterServerOptions,
    PipelineOptions,
    StrategyOptions,
    find_problem,
)
from trainers.strategies.ring_attention import Ring, drop, expand_heads, find_runs, score
from trainers.strategies.zero import own_rows

CPU = torch.device("cpu")


def place(rank: int, world_size: int) -> Ranks:
    return Ranks(rank=rank, world_size=world_size, device=CPU)


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_ranks_count_through_the_grid_as_through_digits(sizes: list[int]) -> None:
    axes = ("island", "replicate", "tensor")[: len(sizes)]
    mesh = "x".join(map(str, sizes))
    for rank, digits in enumerate(itertools.product(*map(range, sizes))):
        grid = Grid(place(rank, math.prod(sizes)), axes, mesh)
        assert tuple(grid.index(axis) for axis in axes) == digits
        assert tuple(grid.size(axis) for axis in axes) == tuple(sizes)
        assert (grid.index("pipeline"), grid.size("pipeline")) == (0, 1), "an axis that it lacks"


@given(sizes=st.lists(st.integers(1, 3), min_size=3, max_size=3), at=st.integers(0, 2))
def test_ranks_hold_the_same_part_if_they_differ_in_the_replica_only(sizes: list[int], at: int) -> None:
    axes = ["shard", "tensor"]
    axes.insert(at, "replicate")
    parts: dict[tuple[int, ...], set[int]] = {}
    for rank, digits in enumerate(itertools.product(*map(range, sizes))):
        grid = Grid(place(rank, math.prod(sizes)), tuple(axes), "x".join(map(str, sizes)))
        part = grid.find_part()
        assert part is not None and part.count == math.prod(sizes) // sizes[at] and not grid.is_whole
        parts.setdefault(tuple(digit for place, digit in enumerate(digits) if place != at), set()).add(part.index)
    assert all(len(each) == 1 for each in parts.values())
    assert sorted(next(iter(each)) for each in parts.values()) == list(range(len(parts)))


@pytest.mark.parametrize(
    ("ranks", "schedule", "batch", "micro_batch", "size"),
    [
        (8, "1f1b", 8, 2, 1),  # four replicas with two samples each: a pipeline of two ranks needs two passes
        (6, "1f1b", 8, 2, 1),  # after the loss of one, 2, 3 and 3 samples
        (4, "1f1b", 8, 2, 2),
        (4, "1f1b", 12, 4, 3),
        (6, "interleaved", 12, 4, 2),
        (2, "interleaved", 3, 2, 2),  # impossible: the run ends with an error
        (8, "gpipe", 2, 2, 2),  # also: a replica would have no samples
    ],
)
def test_pipelines_of_elastic_runs_choose_passes_of_equal_size(
    ranks: int, schedule: str, batch: int, micro_batch: int, size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run of four replicas ended with an error about its flags when one was lost."""
    options = StrategyOptions(mesh="*x2", pipeline=PipelineOptions(schedule=schedule))
    strategy = create_strategy("allreduce+pipeline", place(0, ranks), options)
    session: Any = SimpleNamespace(
        config=SimpleNamespace(train=TrainConfig(batch=batch, micro_batch=micro_batch)), ranks=place(0, ranks)
    )
    for session.member, chosen in ((None, micro_batch), ("a member", size)):
        assert Session._choose_train(session, strategy).micro_batch == chosen
        assert ("note:" in capsys.readouterr().err) == (chosen != micro_batch)
    if size != micro_batch:
        shares = [replace(strategy.share, index=index) for index in range(ranks // 2)]
        passes = [[len(some) for some, _ in share.find_passes(0, batch, size)] for share in shares]
        assert len({tuple(each) for each in passes}) == len(set(passes[0])) == 1


def test_without_replicas_no_part_is_held_twice() -> None:
    assert Grid(place(1, 4), ("shard", "tensor"), "2x2").find_part() is None
    whole = Grid(place(1, 4), ("replicate",), "")
    assert whole.find_part() == Part(index=0, count=1) and whole.is_whole


@pytest.mark.parametrize(
    ("name", "mesh", "part"),
    [("ddp", "4", True), ("allreduce", "4", True), ("hsdp", "2x2", True), ("fsdp", "4", False), ("zero1", "4", False),
     ("allreduce+tensor", "2x2", True), ("allreduce+pipeline", "2x2", True), ("allreduce+context", "2x2", False),
     ("allreduce+expert", "2x2", False), ("diloco+fsdp", "2x2", False)],
)  # fmt: skip
def test_state_comes_from_a_replica_only_if_replicas_move_alike(name: str, mesh: str, part: bool) -> None:
    strategy = create_strategy(name, place(3, 4), StrategyOptions(mesh=mesh))
    assert (strategy.find_part() is not None) is part


def test_islands_find_their_own_tensors_only_in_the_layout_that_saved_them() -> None:
    """With as many ranks, but other parts on each, all would otherwise load those of others, or none that fit."""
    model = nn.Linear(2, 2)
    optimizer = Optimizer(model.named_parameters(), TrainConfig())
    layouts = [("diloco", "4"), ("diloco+fsdp", "2x2"), ("fsdp+diloco", "2x2"), ("diloco+pipeline", "2x2")]
    found = [
        tuple(create_strategy(name, place(3, 4), StrategyOptions(mesh=mesh)).own_state(model, optimizer))
        for name, mesh in [*layouts, ("gossip", "4"), ("diloco+fsdp", "4x1"), ("gossip+hsdp", "2x1x2")]
    ]
    names = [name for each in found[:4] for name in each]
    assert all(found) and len(set(names)) == len(names)
    assert found[4:] == [found[0], found[0], found[1]], "the same parts under other names"


@pytest.mark.parametrize(
    ("name", "mesh", "is_equal", "is_last"),
    [("ddp", "2", True, True), ("allreduce", "2", True, True), ("zero1", "2", True, True), ("zero2", "2", True, False),
     ("fsdp", "2", True, False), ("tensor", "2", True, False), ("expert", "2", True, False),
     ("context", "2", True, False), ("pipeline", "2", False, False), ("pipeline", "1", True, False),
     ("diloco", "2", True, True), ("gossip", "2", True, True), ("diloco+pipeline", "2x2", False, False),
     ("diloco+allreduce", "2x2", True, True), ("diloco+fsdp", "2x2", True, False)],
)  # fmt: skip
def test_own_time_is_compared_only_where_work_is_equal(name: str, mesh: str, is_equal: bool, is_last: bool) -> None:
    world_size = math.prod(int(each) for each in mesh.split("x"))
    strategy = create_strategy(name, place(0, world_size), StrategyOptions(mesh=mesh))
    assert (strategy.has_equal_work(), strategy.exchanges_last()) == (is_equal, is_last)


@pytest.mark.parametrize(
    ("name", "offload", "expected"),
    [("ddp", "none", 16.0), ("ddp", "optimizer", 24.0), ("zero1", "none", 4 + 4 + 8 / 4), ("zero2", "none", 4 + 12 / 4),
     ("zero1", "optimizer", 8 + 16 / 4), ("zero2", "optimizer", 4 + 20 / 4), ("pipeline+zero1", "none", 8 + 8 / 2)],
)  # fmt: skip
def test_bytes_of_an_element_are_those_that_a_rank_holds(name: str, offload: str, expected: float) -> None:
    mesh = "2x2" if "+" in name else ""
    strategy = create_strategy(name, place(0, 4), StrategyOptions(mesh=mesh, offload=offload))
    assert strategy.count_state_bytes() == expected


def test_strategies_on_a_gpu_keep_offloaded_moments_elsewhere() -> None:
    on_gpu = Ranks(rank=0, world_size=4, device=torch.device("cuda", 0))
    assert create_strategy("ddp", on_gpu, StrategyOptions(offload="optimizer")).count_state_bytes() == 8.0
    assert create_strategy("zero2", on_gpu, StrategyOptions(offload="optimizer")).count_state_bytes() == 4 + 4 / 4


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (StrategyOptions(fsdp=FsdpOptions(prefetch=-1)), "`--fsdp.prefetch` must be at least 0, not -1"),
        (StrategyOptions(pipeline=PipelineOptions(stages_per_rank=0)), "`--pipeline.stages_per_rank` must be at least"),
        (
            StrategyOptions(parameter_server=ParameterServerOptions(staleness_max=-1)),
            "`--parameter_server.staleness_max` must be at least 0",
        ),
        (StrategyOptions(gossip=GossipOptions(every_steps=0)), "`--gossip.every_steps` must be at least 1"),
        (StrategyOptions(diloco=DilocoOptions(momentum=-0.1)), "`--diloco.momentum` must be in [0, 1), not -0.1"),
        *(
            (StrategyOptions(strategy=name, offload="optimizer"), f"with `--strategy {name.partition('+')[0]}`")
            for name in ("diloco+fsdp", "gossip", "parameter_server")
        ),
    ],
)  # fmt: skip
def test_a_problem_is_reported_by_its_flag(options: StrategyOptions, problem: str) -> None:
    assert problem in (find_problem(options) or "")


def test_the_lowest_values_are_allowed() -> None:
    lowest = StrategyOptions(
        strategy="fsdp", offload="optimizer", fsdp=FsdpOptions(prefetch=0), pipeline=PipelineOptions(stages_per_rank=1),
        parameter_server=ParameterServerOptions(staleness_max=0), gossip=GossipOptions(every_steps=1),
        diloco=DilocoOptions(every_steps=1, momentum=0.0),
    )  # fmt: skip
    assert find_problem(lowest) is None and find_problem(StrategyOptions()) is None


def test_axes_are_those_of_the_parts_in_their_order() -> None:
    assert find_axes("pipeline+hsdp+tensor") == ("pipeline", "replicate", "shard", "tensor")
    assert find_axes("hsdp+pipeline") == ("replicate", "shard", "pipeline")
    for name in STRATEGIES:
        assert find_axes(name)
    with pytest.raises(TrainerError, match="known: ddp, allreduce"):
        find_axes("pipeline+nothing")
    with pytest.raises(TrainerError, match="`zero1` can be combined with pipeline only"):
        create_strategy("zero1+pipeline+tensor", place(0, 1), StrategyOptions(mesh="1x1x1"))


@given(length=st.integers(1, 20), count=st.integers(1, 7), width=st.integers(1, 3))
def test_rows_are_shared_out_as_torch_chunks_them(length: int, count: int, width: int) -> None:
    whole = torch.arange(length * width).reshape(length, width)
    parts = [own_rows(whole, count=count, place=place) for place in range(count)]
    expected = list(whole.chunk(count))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(parts, expected, strict=False))
    assert all(len(rest) == 0 for rest in parts[len(expected) :]) and torch.equal(torch.cat(parts), whole)
    parts[0].add_(1000)
    assert int(whole[0, 0]) == 1000, "an update of the shard is one of the parameter"


@given(count=st.integers(1, 5), chunk=st.integers(1, 3))
def test_every_pair_of_positions_meets_once_in_the_ring(count: int, chunk: int) -> None:
    """Each query sees each key up to its own position in exactly one turn, and no later one in any."""
    length, total = 2 * chunk, 2 * chunk * count
    rings = [Ring(group=None, rank=rank, count=count) for rank in range(count)]
    positions = [ring.find_positions(length, CPU).tolist() for ring in rings]
    assert sorted(itertools.chain.from_iterable(positions)) == list(range(total))
    seen = torch.zeros(total, total, dtype=torch.int64)
    for ring, turn in itertools.product(rings, range(count)):
        rows, columns, is_causal = ring.find_block(turn, length)
        queries, keys = positions[ring.rank][rows], positions[ring.find_source(turn)][columns]
        for q, k in itertools.product(range(len(queries)), range(len(keys))):
            seen[queries[q], keys[k]] += not is_causal or k <= q
    assert torch.equal(seen, torch.ones(total, total, dtype=torch.int64).tril())


@settings(max_examples=examples(25))
@given(length=st.integers(1, 9), first=st.integers(0, 5), step=st.integers(1, 9))
def test_scores_of_a_run_are_rows_of_the_whole_triangle(length: int, first: int, step: int) -> None:
    first = min(first, length - 1)
    generator = torch.Generator().manual_seed(length)
    query, keys = torch.randn(2, 1, 1, length, 4, generator=generator)
    whole = (query @ keys.transpose(2, 3)) / math.sqrt(4)
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    run = slice(first, min(first + step, length))
    found = score(query[:, :, run], keys, is_causal=True, first=first)
    torch.testing.assert_close(found, whole.masked_fill(hidden, -torch.inf)[:, :, run])
    torch.testing.assert_close(score(query[:, :, run], keys, is_causal=False, first=first), whole[:, :, run])


@pytest.mark.parametrize(("batch", "heads", "keys"), [(1, 1, 1), (2, 4, 12), (8, 16, 4096)])
def test_runs_cover_all_queries_within_the_memory(
    batch: int, heads: int, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key = torch.empty(batch, heads, 40, 1), torch.empty(batch, heads, keys, 1)
    for bytes_max in (1, 4 * batch * heads * keys * 3, 4 * batch * heads * keys * 3 + 1, 2**60):
        monkeypatch.setattr("trainers.strategies.ring_attention.SCORE_BYTES", bytes_max)
        runs = list(find_runs(query, slice(7, 40), key))
        assert [at for run in runs for at in range(run.start, run.stop)] == list(range(7, 40))
        longest = max(run.stop - run.start for run in runs)
        assert longest == {1: 1, 2**60: 33}.get(bytes_max, 3)


def test_keys_of_grouped_heads_are_repeated_in_their_order() -> None:
    pair = torch.arange(2 * 1 * 2 * 3).float().reshape(2, 1, 2, 3, 1)
    keys, values = expand_heads(pair, 6)
    assert torch.equal(keys[0, :, :, 0], pair[0, 0, [0, 0, 0, 1, 1, 1], :, 0])
    assert torch.equal(values[0, :, :, 0], pair[1, 0, [0, 0, 0, 1, 1, 1], :, 0])


def test_dropout_depends_on_its_name_only_and_keeps_the_mean() -> None:
    ones = torch.ones(200, 100)
    first = drop(ones, 0.25, "7/0/0")
    torch.manual_seed(1)
    assert torch.equal(first, drop(ones, 0.25, "7/0/0")) and drop(ones, 0.0, "7/0/0") is ones
    assert first.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert first.mean().item() == pytest.approx(1.0, abs=0.02)
    for other in ("8/0/0", "7/1/0", "7/0/1"):
        both = (first > 0) & (drop(ones, 0.25, other) > 0)
        assert both.float().mean().item() == pytest.approx(0.75**2, abs=0.02), "independent of another run"


@given(
    shapes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=4),
    norm_max=st.sampled_from([0.01, 0.5, 1.0, 1e6]), seed=st.integers(0, 99),
)  # fmt: skip
def test_clipping_is_that_of_torch(shapes: list[tuple[int, int]], norm_max: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ours = [nn.Parameter(torch.zeros(shape)) for shape in (*shapes, (2, 2))]
    for parameter in ours[:-1]:  # the last took no part in the loss
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    theirs = [nn.Parameter(torch.zeros_like(each)) for each in ours]
    for mine, other in zip(ours, theirs, strict=True):
        other.grad = None if mine.grad is None else mine.grad.clone()
    found = clip_gradients(ours, norm_max, device=CPU)
    expected = nn.utils.clip_grad_norm_(theirs, norm_max)
    assert found.dtype == torch.float64 and found.item() == pytest.approx(expected.item(), rel=1e-5)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.grad is None) == (other.grad is None)
        if mine.grad is not None and other.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad)


def test_without_gradients_the_norm_is_zero() -> None:
    assert clip_gradients([], 1.0, device=CPU).item() == 0.0


def test_the_weight_of_a_micro_batch_scales_its_loss() -> None:
    parts = [MicroBatch(inputs=None, targets=None, weight=weight) for weight in (0.125, 0.25)]
    passes = Passes(
        micro_batches=parts, forward=lambda model, inputs: inputs, loss=lambda outputs, targets: outputs,
        precision=lambda: torch.autocast("cpu", enabled=False), share_count=2, device=CPU, loss_scale=8.0,
    )  # fmt: skip
    assert passes.weight == 0.375 and [passes.scale(part) for part in parts] == [2.0, 4.0]


def make_part(axis: str, log: list[object], *, has_schedule: bool = False) -> type[Strategy]:
    """Make a strategy that notes what is called."""

    class Noting(Strategy):
        AXES = (axis,)

        def wrap(self, model: nn.Module) -> nn.Module:
            log.append(axis)
            return model

        @contextlib.contextmanager
        def micro_step(self, model: nn.Module, *, last: bool) -> Iterator[None]:
            log.append((axis, last))
            yield
            log.append(f"after {axis}")

    class Scheduled(Noting):
        @property
        def has_own_schedule(self) -> bool:
            return True

        def run_schedule(self, model: nn.Module, passes: Passes) -> torch.Tensor:
            log.append("run")
            return torch.tensor(3.0)

    return Scheduled if has_schedule else Noting


def test_parts_are_wrapped_from_the_inside_out_and_enclose_a_schedule_as_the_last_micro_step() -> None:
    axes = ("pipeline", "tensor", "context", "expert", "replicate", "shard", "island")
    log: list[object] = []
    for order in (axes, axes[::-1]):
        log.clear()
        ranks, options = place(0, 1), StrategyOptions()
        grid = Grid(ranks, order, "x".join("1" * len(order)))
        kinds = [make_part(axis, log, has_schedule=axis == "pipeline") for axis in order]
        combined = Combined(ranks, grid, options, [kind(ranks, grid, options) for kind in kinds])
        model = nn.Linear(1, 1)
        assert combined.wrap(model) is model and log == list(axes)
        log.clear()
        passes = Passes(
            micro_batches=[], forward=lambda model, inputs: inputs, loss=lambda outputs, targets: outputs,
            precision=contextlib.nullcontext, share_count=1, device=CPU,
        )  # fmt: skip
        assert combined.has_own_schedule and combined.run_schedule(model, passes).item() == 3.0
        assert log == [*((axis, True) for axis in axes), "run", *(f"after {axis}" for axis in axes[::-1])]
        log.clear()
        with combined.micro_step(model, last=False):
            pass
        assert (axes[0], False) in log


def test_anchor_and_momentum_of_islands_survive_a_checkpoint() -> None:
    outer, other = Outer(nn.Linear(2, 3)), Outer(nn.Linear(2, 3))
    for number, tensor in enumerate(part for kind in outer.state_dict().values() for part in kind.values()):
        tensor.fill_(number + 1.0)
    saved = {kind: {name: part.clone() for name, part in parts.items()} for kind, parts in outer.state_dict().items()}
    assert sorted(each.unique().item() for parts in saved.values() for each in parts.values()) == [1.0, 2.0, 3.0, 4.0]
    other.load_state_dict(saved)
    assert other.is_begun, "the anchor is not that of the present model"
    for kind, parts in other.state_dict().items():
        assert all(torch.equal(part, saved[kind][name]) for name, part in parts.items())
