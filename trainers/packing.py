"""Several documents in one window: attention stays within a document, and positions restart in each."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainers.data import Batch, Samples


class Packing(NamedTuple):
    """The documents in the windows of a batch. A tuple, because compiled and recomputed blocks accept tuples."""

    mask: Tensor  # bool `[batch, 1, time, time]`: whether a position attends to another
    positions: Tensor  # `[batch, time]`, from 0 in each document


def find_packing(tokens: Tensor, separator: int) -> Packing:
    """Find the documents of windows `[batch, time]`; a separator belongs to the document that it ends.

    With separator 9, the window 5 9 7 8 has the positions 0 1 0 1, and 7 and 8 do not attend to 5 and 9.
    """
    ends = (tokens == separator).long()
    documents = ends.cumsum(1) - ends
    places = torch.arange(tokens.shape[1], device=tokens.device)
    starts = torch.zeros_like(documents)
    starts[:, 1:] = ends[:, :-1] * places[1:]
    mask = (documents[:, :, None] == documents[:, None, :]) & (places[:, None] >= places)
    return Packing(mask=mask[:, None], positions=places - starts.cummax(1).values)


class NamedBatches:
    """Samples as a dict of tokens and targets, for a model that computes its own loss."""

    def __init__(self, samples: Samples) -> None:
        """Wrap samples whose batches are pairs."""
        self._samples = samples
        self.fingerprint = samples.fingerprint

    def read(self, sample_first: int, sample_count: int) -> Batch:
        """Return a dict of `tokens` and `targets`, both `[sample_count, context]`."""
        inputs, targets = self._samples.read(sample_first, sample_count)
        return {"tokens": inputs, "targets": targets}


class LanguageForward:
    """Calls a language model, with the documents of each window, and with targets if it returns its loss."""

    def __init__(self, *, separator: int | None, z_weight: float) -> None:
        """Set the id that ends a document; None if each window is one document."""
        self._separator, self._z_weight = separator, z_weight

    def __call__(self, model: nn.Module, inputs: Any) -> Any:
        """Return logits for a tensor of tokens, or the mean loss for a dict of tokens and targets."""
        more: dict[str, Any] = {}
        tokens = inputs
        if isinstance(inputs, Mapping):
            tokens, more = inputs["tokens"], {"targets": inputs["targets"], "z_weight": self._z_weight}
        if self._separator is not None:
            more["packing"] = find_packing(tokens, self._separator)
        return model(tokens, **more)


def take_loss(outputs: Tensor, targets: Any) -> Tensor:
    """Return the loss, which the model has computed."""
    return outputs
