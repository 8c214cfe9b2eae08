"""Copies of each rank's part of the state in the memory of another node."""

import itertools
import os
import random
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tiers import spread
from trainers.config import CheckpointConfig, Config, find_problem
from trainers.peer_checkpoint import PeerCheckpoint, choose_targets
from trainers.peer_memory import Box, Header, PartMemory, open_memory
from trainers.peer_transfer import Kept, find_newest_version, plan_moves
from trainers.ranks import Ranks

from .conftest import STEADY, Start, TrainingFolder, await_line, await_step, count_lost_steps
from .strategies.conftest import Worlds

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")
CHECKS = "tests.trainers.peer_checks"


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_copy_is_on_another_node_if_there_is_one(nodes: list[int]) -> None:
    targets = choose_targets([str(node) for node in nodes])
    if len(nodes) == 1:
        assert targets == []
        return
    for rank, target in enumerate(targets):
        assert target != rank
        assert nodes[target] != nodes[rank] or len(set(nodes)) == 1


def test_copies_are_distributed_equally() -> None:
    assert choose_targets(["a", "b", "c"]) == [1, 2, 0]
    assert choose_targets(["a", "a", "b", "b"]) == [2, 3, 0, 1]
    assert sorted(choose_targets(["a", "a", "a"])) == [0, 1, 2]


@pytest.mark.parametrize(("ranks", "due"), [(1, []), (2, [4, 8])])
def test_state_is_copied_after_every_few_steps_of_several_ranks(ranks: int, due: list[int]) -> None:
    peers = PeerCheckpoint.__new__(PeerCheckpoint)
    peers._ranks, peers._every_steps = Ranks(rank=0, world_size=ranks, device=torch.device("cpu")), 4
    assert [step for step in range(1, 10) if peers.is_due(step)] == due


def test_kept_memory_is_not_written_to_when_it_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another loss at that moment executes the next program, which found memory without its description."""
    header = Header(world="w", step=3, index=0, count=1, pieces=(), others={("position", "steps_done"): 3})
    first = PartMemory(64)
    first.complete(header.encode())

    def fail(*_: object) -> None:
        raise AssertionError("written")

    for name in ("ftruncate", "pwrite"):
        monkeypatch.setattr(os, name, fail)
    for _ in range(2):
        assert open_memory(os.dup(first.descriptor)).header == header


def keep(step: int, index: int, *, world: str = "w", count: int = 2, is_own: bool = True) -> Kept:
    return Kept(world=world, step=step, index=index, count=count, boxes=(), is_own=is_own)


def test_newest_version_has_all_parts_of_one_world() -> None:
    copy = keep(6, 1, is_own=False)
    assert find_newest_version([keep(6, 0), copy, keep(7, 0)]) == (6, "w", 2)
    assert find_newest_version([keep(6, 0), keep(6, 1, world="other")]) is None
    assert find_newest_version([copy, keep(6, 0, is_own=False)]) is None, "values that are not sent are missing"
    assert find_newest_version([]) is None


@given(data=st.data(), rows=st.integers(1, 9), columns=st.integers(1, 3))
def test_moves_fill_each_element_once(data: st.DataObject, rows: int, columns: int) -> None:
    """A tensor is held in as many row blocks as there were ranks, and wanted in as many as there are now."""
    ranks, former = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    held = {
        box: data.draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=2, unique=True))
        for box in split_rows(rows, columns, former)
        if box is not None
    }
    wanted = split_rows(rows, columns, ranks)
    counts = [torch.zeros(rows, columns) for _ in range(ranks)]
    whole = Box(offset=(0, 0), shape=(rows, columns))
    for move in plan_moves(held, wanted):
        assert move.source in held[move.held], "the source has it"
        assert move.source == move.target or move.target not in held[move.held], "nothing is sent that is there"
        counts[move.target][move.box.slice(whole)] += 1
    for rank, box in enumerate(wanted):
        expected = torch.zeros(rows, columns)
        if box is not None:
            expected[box.slice(whole)] = 1
        assert torch.equal(counts[rank], expected)


def split_rows(rows: int, columns: int, count: int) -> list[Box | None]:
    """Return the rows of each of `count` ranks, as torch.chunk splits them."""
    size = -(-rows // count)
    starts = [min(rank * size, rows) for rank in range(count + 1)]
    return [
        Box(offset=(start, 0), shape=(end - start, columns)) if end > start else None
        for start, end in itertools.pairwise(starts)
    ]


@pytest.mark.parametrize(
    "former", spread(["0,2", "0,-,2", "2,0,-,-"], every=3, more=2), ids=lambda text: f"ranks {text}"
)
@pytest.mark.parametrize("strategy", spread(["zero1", "fsdp", "zero2"], every=3))
def test_state_is_restored_without_a_lost_rank(worlds: Worlds, tmp_path: Path, strategy: str, former: str) -> None:
    """Rank 1 of three is lost; the others continue alone, with a new one in its place, or with two new ones."""
    keep_three(worlds, tmp_path, strategy)
    restore(worlds, tmp_path, strategy, former, step=3)


def test_one_rank_continues_with_the_parts_of_two(worlds: Worlds, tmp_path: Path) -> None:
    keep_parts(worlds, tmp_path, "fsdp", ranks=2)
    restore(worlds, tmp_path, "fsdp", "1", step=3)
    keep_parts(worlds, tmp_path, "fsdp", ranks=1)
    restore(worlds, tmp_path, "fsdp", "0,-", step=3)


def test_state_is_not_restored_after_the_loss_of_a_part_and_its_copy(worlds: Worlds, tmp_path: Path) -> None:
    keep_three(worlds, tmp_path, "fsdp")
    restore(worlds, tmp_path, "fsdp", "0,-,-", step=None)


def test_copy_before_is_complete_if_the_loss_interrupts_a_copy(worlds: Worlds, tmp_path: Path) -> None:
    """Rank 1 was lost before its part of step 3 reached rank 2."""
    keep_three(worlds, tmp_path, "fsdp")
    dropped = [file for file in tmp_path.glob("2.*") if (read_step(file), read_index(file)) == (3, 1)]
    assert len(dropped) == 1
    dropped[0].unlink()
    restore(worlds, tmp_path, "fsdp", "0,2", step=2)


def keep_three(worlds: Worlds, path: Path, strategy: str) -> None:
    keep_parts(worlds, path, strategy, ranks=3)


def keep_parts(worlds: Worlds, path: Path, strategy: str, *, ranks: int) -> None:
    ended = worlds.call(path, f"{CHECKS}:keep_parts", [strategy, str(path)], ranks=ranks)
    assert ended.codes == [0] * ranks, ended.errors


def restore(worlds: Worlds, path: Path, strategy: str, former: str, *, step: int | None) -> None:
    ranks = len(former.split(","))
    ended = worlds.call(path, f"{CHECKS}:restore_parts", [strategy, str(path), former, str(step)], ranks=ranks)
    assert ended.codes == [0] * ranks, ended.errors


def read_step(file: Path) -> int:
    header = open_memory(os.open(file, os.O_RDWR)).header
    assert header is not None
    return header.step


def read_index(file: Path) -> int:
    header = open_memory(os.open(file, os.O_RDWR)).header
    assert header is not None
    return header.index


def test_interval_must_not_be_negative() -> None:
    problem = find_problem(Config(checkpoint=CheckpointConfig(peer_every_steps=-1)))
    assert problem == "`--checkpoint.peer_every_steps` must be at least 0, not -1"


def test_copies_need_an_elastic_run(worlds: Worlds, folder: TrainingFolder) -> None:
    ended = folder.fork(worlds, "--checkpoint.peer_every_steps", "1", strategy="fsdp")
    assert ended.codes == [1] and "requires an elastic run" in ended.errors


@pytest.mark.long
@pytest.mark.slow
def test_lost_node_costs_one_step_of_a_sharded_run(
    worlds: Worlds, folder: TrainingFolder, tmp_path: Path, start_node: Start
) -> None:
    """Three ranks, two after kill -9 of any node, and three again with a new one; no checkpoint is ever read."""
    lose_nodes(start_node, "fsdp", kills=1, seed=5)
    assert max(count_lost_steps(folder)) <= 1
    check_exact(worlds, folder, tmp_path / "chain", strategy="fsdp", gaps_max=1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["fsdp", "zero1", "zero2"])
def test_lost_nodes_cost_one_step_each(
    worlds: Worlds, folder: TrainingFolder, tmp_path: Path, start_node: Start, strategy: str
) -> None:
    """As above, several times at random steps; the lost nodes include the first."""
    lose_nodes(start_node, strategy, kills=4, seed=11)
    assert max(count_lost_steps(folder)) <= 1
    check_exact(worlds, folder, tmp_path / "chain", strategy=strategy, gaps_max=4)


@pytest.mark.exhaustive
def test_node_is_replaced_and_costs_at_most_the_steps_since_the_last_copy(
    worlds: Worlds, folder: TrainingFolder, tmp_path: Path, start_node: Start
) -> None:
    """Three ranks of three: the others wait for the new node. A copy may be under way until the next one is due."""
    flags = ("--checkpoint.peer_every_steps", "3", "--elastic", "3:3", "--warm")
    lose_nodes(start_node, "fsdp", *flags, kills=2, seed=7)
    assert max(count_lost_steps(folder)) <= 5
    check_exact(worlds, folder, tmp_path / "chain", strategy="fsdp", gaps_max=2)


def lose_nodes(start_node: Start, strategy: str, *flags: str, kills: int, seed: int) -> None:
    """Run on three nodes; kill one, replace it, and so on; end the run when all nodes are asked to leave."""
    draw = random.Random(seed)
    flags = ("--checkpoint.every_steps", "0", "--checkpoint.peer_every_steps", "1", *flags)
    is_fixed = "3:3" in flags
    nodes = [(rank, start_node(rank, *flags, strategy=strategy)) for rank in range(3)]
    await_step(nodes[0][1], 3)
    for _ in range(kills):
        await_losses(nodes[0][1], draw.randint(1, 9))
        place, victim = nodes.pop(draw.randrange(3))
        os.killpg(victim.pid, signal.SIGKILL)
        if not is_fixed:
            await_line(nodes[0][1], "resumed from memory  ranks 2")
            await_losses(nodes[0][1], 2)
        nodes.append((place, start_node(place, *flags, strategy=strategy)))
        await_line(nodes[0][1], "resumed from memory  ranks 3")
        await_losses(nodes[0][1], 2)
    for _, node in nodes:
        node.terminate()
    assert [node.wait(timeout=300) for _, node in nodes] == [143] * 3


def await_losses(process: "subprocess.Popen[str]", count: int) -> None:
    """Read the run's output until it has reported the losses of this many steps."""
    assert process.stdout is not None
    losses = (line for line in process.stdout if "loss" in line)
    assert len(list(itertools.islice(losses, count))) == count, process.stderr and process.stderr.read()


def check_exact(worlds: Worlds, folder: TrainingFolder, path: Path, *, strategy: str, gaps_max: int) -> None:
    """Check that every step has the bits of undisturbed runs with as many ranks, each continuing from the last.

    The first rank may lose a peer before it has received the others' losses: that step is taken, its loss not reported.
    """
    found = {step: losses[-1] for step, losses in folder.losses().items()}
    last = max(found)
    begins = [(int(str(line["step"])), int(str(line["ranks"]))) for line in folder.lines() if line.get("ranks")]
    path.mkdir()
    chain = TrainingFolder(path=path)
    for attempt, ((begin, ranks), (end, _)) in enumerate(itertools.pairwise([*begins, (last, 0)]), start=1):
        if end > begin:
            flags = ("--train.steps", str(end), "--checkpoint.every_steps", "0", *STEADY)
            ended = chain.fork(worlds, *flags, workers=ranks, attempt=attempt, strategy=strategy)
            assert ended.codes == [0] * ranks, ended.errors
    expected = {step: losses[0] for step, losses in chain.losses().items()}
    assert set(found) <= set(expected) and len(set(expected) - set(found)) <= gaps_max
    assert found == {step: expected[step] for step in found}
