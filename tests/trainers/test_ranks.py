"""Process groups: their timeouts, and the calls that only a GPU needs."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trainers.ranks import Ranks, abort_collectives, join_ranks, make_timeout


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """Rank 0 of two, with process groups of its own: no other rank is needed to create them."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        background = dist.new_group(backend="gloo", timeout=make_timeout(500.0))
        yield Ranks(rank=0, world_size=2, device=torch.device("cpu"), background_group=background)
    finally:
        dist.destroy_process_group()


def read_timeout_s(group: Any) -> float:
    seconds: float = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return seconds


def test_limit_of_steps_spares_the_groups_of_large_transfers(ranks: Ranks) -> None:
    """The copies of shards on other nodes may take longer than a step may wait for a peer."""
    slow, quick = ranks.open_group(700.0), dist.new_group(backend="gloo")
    ranks.limit_steps(60.0)
    groups = [ranks.background_group, slow, quick, dist.group.WORLD]
    assert [read_timeout_s(group) for group in groups] == [500.0, 700.0, 60.0, 60.0]


def test_device_is_waited_for_only_if_it_can_be_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: waited.append(device))
    )
    for device in (torch.device("cpu"), torch.device("cuda", 1)):
        Ranks(rank=0, world_size=1, device=device).wait_for_device()
    assert waited == [torch.device("cuda", 1)]


def test_collectives_without_nccl_are_not_aborted(ranks: Ranks) -> None:
    abort_collectives()
    dist.all_reduce(torch.ones(1))


def test_rank_of_a_gpu_joins_nccl_with_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("set", device)))
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **named: calls.append((backend, named["device_id"]))
    )
    monkeypatch.setattr(dist, "new_group", lambda **named: named["backend"])
    ranks = join_ranks()
    device = torch.device("cuda", 1)
    assert calls == [("set", device), ("nccl", device)], "the device is chosen before NCCL connects"
    assert (ranks.device, ranks.background_group) == (device, "gloo")


def test_group_for_checkpoints_can_be_created_beside_nccl(ranks: Ranks) -> None:
    """With `device_id`, torch connects each new group at once if its backend can be split: gloo's must bear that."""
    backend = ranks.background_group._get_backend(torch.device("cpu"))
    if backend.supports_splitting:
        backend.eager_connect_single_device(torch.device("cuda", 0))
