"""Several documents in one window: attention stays within a document, and positions restart at each."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainers.data import Batch, Samples


class Packing(NamedTuple):
    """The positions of documents in the windows of a batch. A tuple, so that compiled and recomputed blocks take it."""

    mask: Tensor  # bool `[batch, 1, time, time]`: which position may read which
    positions: Tensor  # `[batch, time]`, from 0 in each document


def find_packing(tokens: Tensor, separator: int) -> Packing:
    """Find the documents of windows `[batch, time]`; a separator belongs to the document that it ends.

    With separator 9, the window 5 9 7 8 has the positions 0 1 0 1, and 7 and 8 do not read 5 and 9.
    """
    ends = (tokens == separator).long()
    documents = ends.cumsum(1) - ends
    places = torch.arange(tokens.shape[1], device=tokens.device)
    starts = torch.zeros_like(documents)
    starts[:, 1:] = ends[:, :-1] * places[1:]
    mask = (documents[:, :, None] == documents[:, None, :]) & (places[:, None] >= places)
    return Packing(mask=mask[:, None], positions=places - starts.cummax(1).values)


class NamedBatches:
    """Samples of inputs and targets as a dict, where the model itself needs the targets."""

    def __init__(self, samples: Samples) -> None:
        """Wrap samples whose batches are pairs."""
        self._samples = samples
        self.fingerprint = samples.fingerprint

    def read(self, sample_first: int, sample_count: int) -> Batch:
        """Return `tokens` and `targets`."""
        inputs, targets = self._samples.read(sample_first, sample_count)
        return {"tokens": inputs, "targets": targets}


class LanguageForward:
    """The call of a language model: with the documents of each window, and with targets if it returns its loss."""

    def __init__(self, *, separator: int | None, z_weight: float) -> None:
        """`separator`: id that ends a document, None for windows that are one document each."""
        self._separator, self._z_weight = separator, z_weight

    def __call__(self, model: nn.Module, inputs: Any) -> Any:
        """Return logits of a tensor of tokens, and the mean loss of a dict of tokens and targets."""
        more: dict[str, Any] = {}
        tokens = inputs
        if isinstance(inputs, Mapping):
            tokens, more = inputs["tokens"], {"targets": inputs["targets"], "z_weight": self._z_weight}
        if self._separator is not None:
            more["packing"] = find_packing(tokens, self._separator)
        return model(tokens, **more)


def take_loss(outputs: Tensor, targets: Any) -> Tensor:
    """Return the loss that the model computed itself."""
    return outputs
