"""Data for torchtitan without a download. To train on your own, name it in torchtitan's configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer


class Bytes(BaseTokenizer):
    """A token is a byte, so no tokenizer has to be downloaded."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """No settings."""

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int], **_: Any) -> str:
        return bytes(tokens).decode(errors="replace")

    def get_vocab_size(self) -> int:
        return 256


class Sequences(BaseDataLoader):
    """Arithmetic sequences of bytes. A batch depends only on the replica and its number, which checkpoints store."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """No settings."""

    def __init__(self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any) -> None:
        self.replica, self.length, self.size, self.count = dp_rank, seq_len, local_batch_size, 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            start, stride = np.random.default_rng([self.replica, self.count]).integers(256, size=(2, self.size, 1))
            tokens = torch.from_numpy((start + (stride % 7 + 1) * np.arange(self.length + 1)) % 256)
            positions = torch.arange(self.length, dtype=torch.int32).repeat(self.size, 1)
            self.count += 1
            yield {"input": tokens[:, :-1].contiguous(), "positions": positions}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]
