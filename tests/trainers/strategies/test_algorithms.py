"""The parts we wrote ourselves, against their papers and the library."""

from pathlib import Path

import pytest
import torch

from tests.tiers import spread
from trainers.config import TrainConfig
from trainers.optimizer import Optimizer

from .conftest import Worlds

CHECKS = "tests.trainers.strategies.checks"


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ring_sums_as_the_library_does(worlds: Worlds, tmp_path: Path, ranks: int) -> None:
    ended = worlds.call(tmp_path, f"{CHECKS}:ring_is_the_librarys_sum", [], ranks=ranks)
    assert ended.codes == [0] * ranks, ended.errors


def test_strategies_in_a_grid_average_along_their_own_axis(worlds: Worlds, tmp_path: Path) -> None:
    check = "tests.trainers.strategies.grid_checks:parts_average_along_their_own_axis"
    ended = worlds.call(tmp_path, check, [], ranks=4)
    assert ended.codes == [0] * 4, ended.errors


def test_a_server_clips_the_mean_of_its_workers_without_those_that_skip(worlds: Worlds, tmp_path: Path) -> None:
    check = "tests.trainers.strategies.grid_checks:server_clips_the_mean_of_its_workers"
    ended = worlds.call(tmp_path, check, [], ranks=3)
    assert ended.codes == [0] * 3, ended.errors


def test_parameters_that_single_ranks_use_get_their_own_gradients(worlds: Worlds, tmp_path: Path) -> None:
    """Gradients of layers that other ranks did not use must not be added to those of other layers."""
    ended = worlds.call(tmp_path, f"{CHECKS}:branches_of_single_ranks_are_averaged", [], ranks=2)
    assert ended.codes == [0] * 2, ended.errors


@pytest.mark.parametrize(("strategy", "ranks"), [("zero1", 2), ("zero2", 2), ("zero2", 3), ("allreduce", 2)])
def test_parameters_that_no_rank_used_are_not_updated(
    worlds: Worlds, tmp_path: Path, strategy: str, ranks: int
) -> None:
    """`zero1` and `zero2` gave them a gradient of zero, so that they decayed."""
    ended = worlds.call(tmp_path, f"{CHECKS}:parameters_without_gradient_are_left_alone", [strategy], ranks=ranks)
    assert ended.codes == [0] * ranks, ended.errors


@pytest.mark.parametrize(("strategy", "mesh", "ranks"), [("fsdp", "", 2), ("hsdp", "2x1", 2)])
def test_ranks_that_use_different_layers_are_noticed_where_gradients_would_be_mixed(
    worlds: Worlds, tmp_path: Path, strategy: str, mesh: str, ranks: int
) -> None:
    ended = worlds.call(tmp_path, f"{CHECKS}:different_layers_are_noticed", [strategy, mesh], ranks=ranks)
    assert ended.codes == [0] * ranks, ended.errors


@pytest.mark.parametrize(("ranks", "key_heads"), [(2, 4), (3, 2), (4, 1)])
def test_attention_in_a_ring_is_attention(worlds: Worlds, tmp_path: Path, ranks: int, key_heads: int) -> None:
    ended = worlds.call(tmp_path, f"{CHECKS}:ring_attention_is_attention", [str(key_heads)], ranks=ranks)
    assert ended.codes == [0] * ranks, ended.errors


@pytest.mark.parametrize(("strategy", "ranks"), [("diloco", 2), ("diloco", 3), ("gossip", 2), ("gossip", 3)])
def test_islands_move_as_a_simulation_of_all_of_them(worlds: Worlds, tmp_path: Path, strategy: str, ranks: int) -> None:
    ended = worlds.call(tmp_path, f"{CHECKS}:islands_follow_the_algorithm", [strategy], ranks=ranks)
    assert ended.codes == [0] * ranks, ended.errors


@pytest.mark.parametrize(("strategy", "ranks"), [("diloco", 2), ("gossip", 2), ("gossip", 4), ("allreduce", 2)])
def test_all_ranks_learn_of_a_stop_in_time(worlds: Worlds, tmp_path: Path, strategy: str, ranks: int) -> None:
    ended = worlds.call(tmp_path, f"{CHECKS}:stop_is_heard_by_all_at_one_step", [strategy], ranks=ranks)
    assert ended.codes == [0] * ranks, ended.errors


@pytest.mark.parametrize(("mesh", "ranks"), [("2x2", 4), ("1x2", 2)])
def test_all_ranks_of_gossiping_islands_learn_of_a_stop_in_time(
    worlds: Worlds, tmp_path: Path, mesh: str, ranks: int
) -> None:
    """Each rank of an island exchanges with another rank, and only one of them is asked."""
    check = f"{CHECKS}:stop_is_heard_by_all_at_one_step"
    ended = worlds.call(tmp_path, check, ["gossip+allreduce", mesh], ranks=ranks)
    assert ended.codes == [0] * ranks, ended.errors


@pytest.mark.parametrize("strategy", ["diloco", "gossip"])
@pytest.mark.parametrize("ranks", spread([3, 1, 2], every=3))
def test_island_restores_its_own_optimizer_state(worlds: Worlds, tmp_path: Path, strategy: str, ranks: int) -> None:
    """With equally many ranks its own weights and moments; otherwise both are the first island's, never a mixture."""
    island_checks = "tests.trainers.strategies.island_checks"
    ended = worlds.call(tmp_path, f"{island_checks}:save_islands", [strategy, str(tmp_path)], ranks=2)
    assert ended.codes == [0] * 2, ended.errors
    ended = worlds.call(tmp_path, f"{island_checks}:restore_islands", [strategy, str(tmp_path), "2"], ranks=ranks)
    assert ended.codes == [0] * ranks, ended.errors


@pytest.mark.parametrize("strategy", ["diloco", "gossip"])
def test_islands_exchange_trained_parameters_only(worlds: Worlds, tmp_path: Path, strategy: str) -> None:
    check = "tests.trainers.strategies.island_checks:only_trained_parameters_travel"
    ended = worlds.call(tmp_path, check, [strategy], ranks=3)
    assert ended.codes == [0] * 3, ended.errors


def test_checkpoint_of_asynchronous_workers_is_a_clean_cut(worlds: Worlds, tmp_path: Path) -> None:
    ended = worlds.call(tmp_path, f"{CHECKS}:checkpoint_is_a_clean_cut", [], ranks=3)
    assert ended.codes == [0] * 3, ended.errors


def test_partial_moves_of_a_step_add_up_to_a_whole_one() -> None:
    """Under a gradient that stays the same, Adam moves by its learning rate; the decay is set aside."""
    config = TrainConfig(steps=10, warmup_steps=0, learning_rate=0.1, weight_decay=0.0)
    whole, parts = torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(2, 2))
    one, other = Optimizer([("weight", whole)], config), Optimizer([("weight", parts)], config)
    for step in range(4):
        whole.grad = torch.full((2, 2), 3.0)
        one.step()
        for _ in range(5):
            parts.grad = torch.full((2, 2), 3.0)
            other.step(schedule_step=step, rate_share=0.2)
    torch.testing.assert_close(whole, parts)
    assert one.steps_done == other.steps_done == 4


def test_no_worker_runs_further_ahead_than_the_staleness_allows(worlds: Worlds, tmp_path: Path) -> None:
    ended = worlds.call(tmp_path, f"{CHECKS}:no_worker_is_more_than_two_steps_ahead", [], ranks=4)
    assert ended.codes == [0] * 4, ended.errors


@pytest.mark.parametrize("ranks", [2, 3])
def test_dropout_in_a_ring_is_the_same_in_both_passes(worlds: Worlds, tmp_path: Path, ranks: int) -> None:
    ended = worlds.call(tmp_path, f"{CHECKS}:dropout_in_a_ring_has_its_own_gradients", [], ranks=ranks)
    assert ended.codes == [0] * ranks, ended.errors
