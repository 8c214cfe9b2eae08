"""Generate text with a language model."""

import torch
from torch import nn

from trainers.config import SampleConfig
from trainers.tokenizers import Tokenizer


def write_text(model: nn.Module, tokenizer: Tokenizer, config: SampleConfig, context: int, device: torch.device) -> str:
    """Generate a continuation of the prompt; return the prompt and its continuation.

    All ranks must call this together and return the same text, because some hold only a part of the model.
    """
    generator = torch.Generator().manual_seed(config.seed)
    ids = list(tokenizer.encode(config.prompt.encode())) or list(tokenizer.separator)
    model.eval()
    try:
        with torch.no_grad():
            for _ in range(config.tokens):
                recent = ids[-context:]
                # Always of full length, so that a compiled model is not recompiled for each length; tokens after a
                # position do not affect it.
                padded = torch.tensor([recent + [0] * (context - len(recent))], device=device)
                logits = model(padded)[0, len(recent) - 1, : tokenizer.vocabulary].float().cpu()
                ids.append(_choose(logits, config.temperature, generator))
    finally:
        model.train()
    return tokenizer.decode(ids)


def _choose(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature <= 0.0:
        return int(logits.argmax())
    chances = torch.softmax(logits / temperature, dim=-1)
    return int(torch.multinomial(chances, 1, generator=generator))
