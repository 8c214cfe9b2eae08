"""Causal attention over a sharded sequence: keys and values travel around a ring of ranks (arXiv:2310.01889).

The sequence is split into 2n chunks, and rank r has chunks r and 2n - 1 - r (zigzag), so all ranks have equal work.
Example with two ranks: the turn in which each chunk of queries attends to each chunk of keys:

    rank  queries   keys: 0  1  2  3
    0     0               1
    1     1               2  1
    1     2               2  1  1
    0     3               1  2  2  1

Partial results are merged by their log-sum-exp, as flash attention does with blocks (arXiv:2205.14135).
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Above this size, scores are computed for one run of queries at a time.
SCORE_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class Ring:
    """The position of one rank in the ring."""

    group: Any
    rank: int
    count: int

    def find_positions(self, length: int, device: torch.device) -> Tensor:
        """Return the positions of this rank's `length` tokens."""
        chunk = length // 2
        first, last = self.rank, 2 * self.count - 1 - self.rank
        steps = torch.arange(chunk, device=device)
        return torch.cat([first * chunk + steps, last * chunk + steps])

    def find_block(self, turn: int, length: int) -> tuple[slice, slice, bool]:
        """Return the queries and keys of this rank in a turn, and whether their attention is causal."""
        whole, chunk = slice(0, length), length // 2
        source = self.find_source(turn)
        if source == self.rank:
            return whole, whole, True  # both pairs of chunks are in sequence order
        if source < self.rank:
            return whole, slice(0, chunk), False
        return slice(chunk, length), whole, False

    def find_source(self, turn: int) -> int:
        """Return the rank whose keys this rank holds in a turn."""
        return (self.rank - turn) % self.count

    def pass_on(self, tensor: Tensor) -> "Passing":
        """Start sending a tensor to the next rank, and receiving one of the same shape from the previous rank."""
        group: Any = self.group or dist.group.WORLD
        to, source = (dist.get_global_rank(group, (self.rank + way) % self.count) for way in (1, -1))
        arriving = torch.empty_like(tensor)
        operations = [
            dist.P2POp(dist.isend, tensor, to, group=group),
            dist.P2POp(dist.irecv, arriving, source, group=group),
        ]
        return Passing(tensor, arriving, dist.batch_isend_irecv(operations))


@dataclass(frozen=True)
class Passing:
    """A tensor in transit."""

    leaving: Tensor  # referenced until it is sent
    arriving: Tensor
    works: list[Any]

    def wait(self) -> Tensor:
        """Wait for the received tensor and return it."""
        for work in self.works:
            work.wait()
        return self.arriving


def attend_in_ring(query: Tensor, key: Tensor, value: Tensor, ring: Ring, *, dropout_rate: float = 0.0) -> Tensor:
    """Attend from this rank's `[batch, heads, time, width]` to all earlier positions. A collective call."""
    # Drawn here, so that a resumed run draws the same one, and both passes drop the same values.
    seed = int(torch.randint(2**48, ())) if dropout_rate else 0
    attend: Any = RingAttention.apply
    mixed: Tensor = attend(query, key, value, ring, dropout_rate, seed)
    return mixed


class RingAttention(torch.autograd.Function):
    """Saves inputs, outputs and one number per query; the backward pass recomputes the scores."""

    @staticmethod
    def forward(
        context: Any, query: Tensor, key: Tensor, value: Tensor, ring: Ring, dropout_rate: float, seed: int
    ) -> Tensor:
        """Merge the partial results of all turns."""
        length = query.shape[2]
        mixed = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
        log_sums = mixed.new_full((*query.shape[:3], 1), -torch.inf)
        with torch.autocast(query.device.type, enabled=False):
            pair = torch.stack([key, value])
            for turn in range(ring.count):
                coming = ring.pass_on(pair) if turn + 1 < ring.count else None
                rows, columns, is_causal = ring.find_block(turn, length)
                keys, values = expand_heads(pair[:, :, :, columns], query.shape[1])
                for run in find_runs(query, rows, keys):
                    scores = score(query[:, :, run], keys, is_causal=is_causal, first=run.start - rows.start)
                    sums = scores.logsumexp(dim=-1, keepdim=True)
                    shares = drop(torch.exp(scores - sums), dropout_rate, f"{seed}/{turn}/{run.start}")
                    merged = torch.logaddexp(log_sums[:, :, run], sums)
                    mixed[:, :, run] *= torch.exp(log_sums[:, :, run] - merged)
                    mixed[:, :, run] += torch.exp(sums - merged) * (shares.to(values.dtype) @ values).float()
                    log_sums[:, :, run] = merged
                pair = coming.wait() if coming else pair
        context.save_for_backward(query, key, value, mixed, log_sums)
        context.ring, context.dropout_rate, context.seed = ring, dropout_rate, seed
        return mixed.to(query.dtype)

    @staticmethod
    def backward(context: Any, outer: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        """Send keys and values around again with their gradients, which return to their rank after the last turn."""
        query, key, value, mixed, log_sums = context.saved_tensors
        ring, rate, length = context.ring, context.dropout_rate, query.shape[2]
        slopes = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
        with torch.autocast(query.device.type, enabled=False):
            outer = outer.to(query.dtype)
            # Row sums of probability x its gradient over all turns, for the gradient of the softmax.
            means = (outer.float() * mixed).sum(dim=-1, keepdim=True)
            pair = torch.stack([key, value])
            pair_slopes = torch.zeros(pair.shape, dtype=torch.float32, device=pair.device)
            for turn in range(ring.count):
                coming = ring.pass_on(pair) if turn + 1 < ring.count else None
                rows, columns, is_causal = ring.find_block(turn, length)
                keys, values = expand_heads(pair[:, :, :, columns], query.shape[1])
                for run in find_runs(query, rows, keys):
                    scores = score(query[:, :, run], keys, is_causal=is_causal, first=run.start - rows.start)
                    shares = torch.exp(scores - log_sums[:, :, run])
                    name = f"{context.seed}/{turn}/{run.start}"
                    value_slopes = drop(shares, rate, name).to(outer.dtype).transpose(2, 3) @ outer[:, :, run]
                    share_slopes = drop((outer[:, :, run] @ values.transpose(2, 3)).float(), rate, name)
                    score_slopes = (shares * (share_slopes - means[:, :, run]) / math.sqrt(query.shape[3])).to(
                        query.dtype
                    )
                    slopes[:, :, run] += (score_slopes @ keys).float()
                    key_slopes = score_slopes.transpose(2, 3) @ query[:, :, run]
                    both = torch.stack([key_slopes, value_slopes]).float()
                    pair_slopes[:, :, :, columns] += both.unflatten(2, (key.shape[1], -1)).sum(3)
                pair_slopes = ring.pass_on(pair_slopes).wait()
                pair = coming.wait() if coming else pair
        key_slopes, value_slopes = pair_slopes.to(key.dtype)
        return slopes.to(query.dtype), key_slopes, value_slopes, None, None, None


def expand_heads(pair: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Return keys and values with as many heads as the queries."""
    keys, values = pair.repeat_interleave(heads // pair.shape[2], dim=2)
    return keys, values


def find_runs(query: Tensor, rows: slice, keys: Tensor) -> Iterator[slice]:
    """Split the queries into runs whose float32 scores take at most `SCORE_BYTES`."""
    row_bytes = 4 * query.shape[0] * query.shape[1] * keys.shape[2]
    step = max(1, SCORE_BYTES // row_bytes)
    for start in range(rows.start, rows.stop, step):
        yield slice(start, min(start + step, rows.stop))


def score(query: Tensor, keys: Tensor, *, is_causal: bool, first: int) -> Tensor:
    """Return scaled scores `[batch, heads, queries, keys]` in float32.

    `first` is the position of the first query among the keys.

    Matrix products have the dtype of the inputs, as in torch's own attention.
    """
    scores = (query @ keys.transpose(2, 3)).float() / math.sqrt(query.shape[3])
    if is_causal:
        places = torch.arange(first, first + query.shape[2], device=query.device)
        later = torch.arange(keys.shape[2], device=query.device) > places[:, None]
        scores = scores.masked_fill(later, -torch.inf)
    return scores


def drop(values: Tensor, rate: float, name: str) -> Tensor:
    """Apply dropout that depends only on the name: the same name drops the same values."""
    if not rate:
        return values
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")
    generator = torch.Generator(values.device).manual_seed(seed)
    is_kept = torch.rand(values.shape, generator=generator, device=values.device) >= rate
    return values * is_kept.to(values.dtype) / (1.0 - rate)
