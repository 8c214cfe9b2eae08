"""Masked language modelling: hide some tokens of a window and predict them from both sides (arXiv:1810.04805)."""

import hashlib

import torch
from torch import Tensor

from trainers.data import Batch, Samples
from trainers.losses import Loss, next_token_loss

UNTOUCHED = -100  # the target of a token that was not hidden; torch's own `ignore_index`
# Shares of the hidden tokens that are replaced by the mask or a random token; others stay visible (section 3.1).
MASKED, RANDOM = 0.8, 0.1


def count_hidden(context: int, share: float) -> int:
    """Return the number of hidden tokens per window. It is constant so that micro-batches have equal weight."""
    return max(1, round(context * share))


class MaskedBatches:
    """Windows with hidden tokens, which depend only on the seed and the global index of the sample."""

    def __init__(self, samples: Samples, *, share: float, mask_id: int, vocabulary: int, seed: int) -> None:
        """Wrap samples whose inputs are windows `[count, context]`; random tokens are drawn below `vocabulary`."""
        self._samples, self._share, self._mask_id = samples, share, mask_id
        self._vocabulary, self._seed = vocabulary, seed
        self.fingerprint = f"{samples.fingerprint}/masked/{share}/{mask_id}/{seed}"

    def read(self, sample_first: int, sample_count: int) -> Batch:
        """Return windows with hidden tokens, and targets: the token where one was hidden, else `UNTOUCHED`."""
        windows, _ = self._samples.read(sample_first, sample_count)
        inputs, targets = windows.clone(), torch.full_like(windows, UNTOUCHED)
        for row in range(sample_count):
            self._hide(inputs[row], targets[row], sample_first + row)
        return inputs, targets

    def _hide(self, inputs: Tensor, targets: Tensor, sample: int) -> None:
        digest = hashlib.blake2b(f"{self._seed}/{sample}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        count = count_hidden(len(inputs), self._share)
        places = torch.randperm(len(inputs), generator=generator)[:count]
        chances = torch.rand(count, generator=generator)
        others = torch.randint(self._vocabulary, (count,), generator=generator)
        targets[places] = inputs[places]
        shown = torch.where(chances < MASKED + RANDOM, others, inputs[places])
        inputs[places] = torch.where(chances < MASKED, self._mask_id, shown)


def masked_loss(z_weight: float, hidden_count: int) -> Loss:
    """Return the cross entropy of the hidden tokens, `hidden_count` in each window, in nats."""
    measure = next_token_loss(z_weight)

    def measure_hidden(logits: Tensor, targets: Tensor) -> Tensor:
        # Sorting has a result of known size; a search (`nonzero`) would wait for the device.
        is_hidden = (targets.flatten() != UNTOUCHED).to(torch.uint8)
        rows = is_hidden.argsort(descending=True, stable=True)[: hidden_count * len(targets)]
        return measure(logits.flatten(0, 1)[rows].unsqueeze(0), targets.flatten()[rows].unsqueeze(0))

    return measure_hidden
