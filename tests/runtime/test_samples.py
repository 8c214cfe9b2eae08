"""Samples of nodes: read from what agents send, which is not trusted, and from real agents."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from local_gang import Rig, make_task, wait_for

from broker.runtime.samples import GPUS_MAX, XIDS_MAX, encode_sample, parse_sample
from broker.types import GpuSample, NodeSample

numbers = st.none() | st.floats(min_value=0, max_value=1e18)
gpus = st.builds(GpuSample, ratio=numbers, memory_used_bytes=numbers, power_watts=numbers)
samples = st.builds(
    NodeSample,
    time_s=st.floats(min_value=0, max_value=1e10),
    cpu_ratio=numbers,
    disk_read_bytes_s=numbers,
    gpus=st.lists(gpus, max_size=GPUS_MAX).map(tuple),
    xids=st.dictionaries(st.integers(0, 9999).map(str), st.integers(1, 10**6), max_size=XIDS_MAX),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(samples)
def test_sample_survives_the_form_of_the_agent(sample: NodeSample) -> None:
    assert parse_sample(encode_sample(sample)) == sample


@given(st.dictionaries(st.sampled_from(["time_s", "cpu_ratio", "gpus", "xids", "x"]), json_values) | json_values)
def test_nothing_that_a_node_sends_raises_and_numbers_stay_finite(data: Any) -> None:
    sample = parse_sample(data)
    if sample is not None:
        assert 0 <= sample.time_s < float("inf") and len(sample.gpus) <= GPUS_MAX and len(sample.xids) <= XIDS_MAX
        assert sample.cpu_ratio is None or 0 <= sample.cpu_ratio < float("inf")


def test_sample_of_a_node_is_bounded() -> None:
    """A node cannot fill the store of its broker."""
    many = {"time_s": 5, "gpus": [[0.5]] * 1000, "xids": {str(number): 1 for number in range(1000)}}
    found = parse_sample({**many, "xids": {**many["xids"], "12345": 1}})  # type: ignore[dict-item]
    assert found is not None and (len(found.gpus), len(found.xids)) == (GPUS_MAX, XIDS_MAX)
    found = parse_sample({"time_s": 5, "xids": {"12345": 1, "79": 2}})
    assert found is not None and found.xids == {"79": 2}, "codes of NVIDIA have three digits"


def test_negative_infinite_and_foreign_values_are_left_out() -> None:
    data = {"time_s": 5, "cpu_ratio": -1, "memory_bytes": float("inf"), "disk_bytes": True, "gpus": [[0.5, "x"], 3],
            "xids": {"79": 2, "<b>": 1, "48": -1}}  # fmt: skip
    assert parse_sample(data) == NodeSample(time_s=5, gpus=(GpuSample(ratio=0.5), GpuSample()), xids={"79": 2})
    assert parse_sample({"cpu_ratio": 0.5}) is None


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "nodes")
    yield rig
    rig.end_all()


def test_real_agents_send_what_their_nodes_use_with_the_status_and_through_the_session(rig: Rig) -> None:
    async def act() -> None:
        cluster = await rig.make_cluster(2)
        await rig.start(cluster, make_task("until [ -e $HOME/enough ]; do sleep 0.05; done", num_nodes=2))
        found: dict[int, list[NodeSample]] = {0: [], 1: []}

        async def have_both() -> bool:
            for rank, sample in (await rig.gang.poll(cluster, 1)).samples:
                found[rank].append(sample)
            return all(found.values())

        await wait_for(have_both)  # by plain calls
        for samples in found.values():
            assert (
                0 <= (samples[0].cpu_ratio or 0.0) <= 1 and 0 < samples[0].memory_used_bytes < samples[0].memory_bytes
            )  # type: ignore[operator]
            samples.clear()

        async def have_both_by_channel() -> bool:
            await rig.gang.wait_news(cluster, 1, wake=asyncio.Event(), timeout_s=0.05)
            channels = [rig.gang._channels.find(node, 1) for node in cluster.nodes] if rig.gang._channels else []
            heard = [channel for channel in channels if channel is not None and channel.is_heard()]
            return len(heard) == 2 and all([channel._samples for channel in heard])

        await wait_for(have_both_by_channel)
        calls: list[Any] = []
        rig.transport.run = lambda *arguments, **options: calls.append(arguments)  # type: ignore[method-assign,assignment]
        assert {rank for rank, _ in (await rig.gang.poll(cluster, 1)).samples} == {0, 1} and calls == []

    asyncio.run(act())
