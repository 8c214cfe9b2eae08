"""Convert samples of a node between its agent's JSON, which is not trusted, and `NodeSample`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from broker.runtime.channels import Channels
from broker.types import GpuSample, Node, NodeSample

GPUS_MAX, XIDS_MAX = 16, 16
NUMBER_MAX = 1e18
GPU_FIELDS = tuple(field.name for field in fields(GpuSample))
NUMBERS = tuple(field.name for field in fields(NodeSample) if field.name not in ("time_s", "gpus", "xids"))


def gather_samples(
    channels: Channels | None, live: Sequence[Node], run_id: int, answers: Mapping[int, Mapping[str, Any] | None]
) -> tuple[tuple[int, NodeSample], ...]:
    """Return the samples from channels and from the answers of plain calls, by rank."""
    found: list[tuple[int, object]] = []
    for node in live:
        channel = channels.find(node, run_id) if channels else None
        answered = (answers.get(node.rank) or {}).get("samples")
        found += [(node.rank, data) for data in (channel.take_samples() if channel else ())]
        found += [(node.rank, data) for data in (answered if isinstance(answered, list) else ())]
    return tuple((rank, sample) for rank, data in found if (sample := parse_sample(data)) is not None)


def parse_sample(data: Any) -> NodeSample | None:
    """Parse a sample, ignoring invalid and unknown fields; None without a valid time."""
    if not isinstance(data, Mapping) or (time_s := _read_number(data.get("time_s"))) is None:
        return None
    gpus, xids = data.get("gpus"), data.get("xids")
    return NodeSample(
        time_s=time_s,
        gpus=tuple(map(_parse_gpu, gpus[:GPUS_MAX])) if isinstance(gpus, list) else (),
        xids=_parse_xids(xids) if isinstance(xids, Mapping) else {},
        **{name: number for name in NUMBERS if (number := _read_number(data.get(name))) is not None},
    )


def encode_sample(sample: NodeSample) -> dict[str, Any]:
    """Return a sample in the agent's form: without missing values, and with each GPU as a list."""
    data: dict[str, Any] = {"time_s": sample.time_s}
    data.update({name: number for name in NUMBERS if (number := getattr(sample, name)) is not None})
    if sample.gpus:
        data["gpus"] = [[getattr(gpu, name) for name in GPU_FIELDS] for gpu in sample.gpus]
    return {**data, "xids": dict(sample.xids)} if sample.xids else data


def _parse_gpu(values: Any) -> GpuSample:
    numbers = [_read_number(value) for value in values] if isinstance(values, list) else []
    return GpuSample(**dict(zip(GPU_FIELDS, numbers, strict=False)))


def _parse_xids(xids: Mapping[Any, Any]) -> dict[str, int]:
    pairs = [(str(number), _read_number(count)) for number, count in list(xids.items())[:XIDS_MAX]]
    return {number: int(count) for number, count in pairs if number.isdecimal() and len(number) <= 4 and count}


def _read_number(value: Any) -> float | None:
    """Return a finite number that is not negative; booleans are not numbers."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= NUMBER_MAX:
        return None
    return value if math.isfinite(value) else None
