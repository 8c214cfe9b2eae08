"""A language model with a cache of keys and values, for prompts and for batches of single tokens.

The networks in `trainers/models` are unchanged; this module calls their layers and computes attention over the cache.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainers.config import LoraConfig, ModelConfig
from trainers.errors import TrainerError
from trainers.models import create_language_model
from trainers.models.experts import Router
from trainers.tokenizers import find_tokenizer


class CachedModel:
    """A GPT or Llama, with or without experts, and a cache of `slots` sequences of up to `context` tokens each."""

    def __init__(self, model: nn.Module, config: ModelConfig, *, slots: int, device: torch.device) -> None:
        """Allocate the caches of keys and values, each `[depth, slots, heads, context, head width]`."""
        self._model = cast(Any, model.eval().to(device))  # a Decoder with all of its layers
        for module in model.modules():
            if isinstance(module, Router):
                module.capacity = 0.0  # the result of one request must not depend on the others in its batch
        self.device, self.context = device, config.context
        self.vocabulary: int = self._model.vocabulary
        is_llama = config.kind == "llama"
        heads = (config.key_value_heads or config.heads) if is_llama else config.heads
        width = config.find_head_width() if is_llama else config.width // config.heads
        dtype = next(model.parameters()).dtype
        shape = (config.depth, slots, heads, config.context, width)
        self._keys = torch.zeros(shape, dtype=dtype, device=device)
        self._values = torch.zeros(shape, dtype=dtype, device=device)

    @torch.no_grad()
    def forward(self, tokens: Sequence[Sequence[int]], starts: Sequence[int], slots: Sequence[int]) -> Tensor:
        """Append rows of tokens, equally long, to the sequences in `slots`; return the logits after the last token.

        `starts` is the number of tokens that each sequence already has. The result is `[rows, vocabulary]`, on the CPU.
        """
        ids = torch.tensor(tokens, device=self.device)
        rows = torch.tensor(slots, device=self.device)
        time = ids.shape[1]
        positions = torch.tensor(starts, device=self.device)[:, None] + torch.arange(time, device=self.device)
        end = max(starts) + time
        mask = torch.arange(end, device=self.device) <= positions[:, :, None]
        hidden = self._model.token_embedding(ids)
        if hasattr(self._model, "position_embedding"):
            hidden = hidden + self._model.position_embedding(positions)
        for layer, block in enumerate(self._model.blocks):
            query, key, value = _project(block.attention, block.attention_norm(hidden), positions)
            self._keys[layer, rows[:, None], :, positions] = key.transpose(1, 2)
            self._values[layer, rows[:, None], :, positions] = value.transpose(1, 2)
            keys, values = self._keys[layer, rows, :, :end], self._values[layer, rows, :, :end]
            is_grouped = query.shape[1] != keys.shape[1]
            mixed = functional.scaled_dot_product_attention(
                query, keys, values, attn_mask=mask[:, None], enable_gqa=is_grouped
            )
            hidden = hidden + block.attention.project(mixed.transpose(1, 2).flatten(2))
            hidden = hidden + block.perceptron(block.perceptron_norm(hidden))
        logits: Tensor = self._model.head(self._model.norm(hidden[:, -1]))
        return logits.float().cpu()


def _project(attention: Any, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values `[rows, heads, time, width]`; those of Llama are rotated by position."""
    if hasattr(attention, "query_key_value"):
        rows, time, _ = hidden.shape
        packed = attention.query_key_value(hidden).view(rows, time, attention.heads, 3, attention.head_width)
        query, key, value = packed.permute(3, 0, 2, 1, 4)
        return query, key, value
    query, key, value = (
        layer(hidden).unflatten(2, (-1, attention.head_width)).transpose(1, 2)
        for layer in (attention.query, attention.key, attention.value)
    )
    if attention.query_norm is not None:
        query, key = attention.query_norm(query), attention.key_norm(key)
    cosines, sines = (wave.to(hidden.device)[positions][:, None] for wave in attention.waves)
    return _turn(query, cosines, sines), _turn(key, cosines, sines), value


def _turn(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    left, right = heads.float().chunk(2, dim=-1)
    return torch.cat([left * cosines - right * sines, right * cosines + left * sines], dim=-1).to(heads.dtype)


def load_model(source: str, *, dtype: torch.dtype) -> tuple[nn.Module, ModelConfig, str]:
    """Load the newest checkpoint of `trainers.lm` or a Hugging Face folder; return model, config and tokenizer name.

    Raises TrainerError if the source cannot be read.
    """
    if "://" not in source and (Path(source) / "config.json").is_file():
        return _load_hugging_face(Path(source), dtype)
    from trainers.export import read_checkpoint

    step, about, tensors = read_checkpoint(source)
    if "model" not in about:
        raise TrainerError(
            f"the checkpoint of step {step} does not state its model's shape: it was not written by `trainers.lm`"
        )
    tensors = _merge(about, tensors)
    config = ModelConfig(**{**about["model"], "dropout": 0.0})
    _check_writes(config)
    model = create_language_model(config.kind, config)
    model.load_state_dict(tensors)
    return model.to(dtype), config, find_tokenizer(about)


def _merge(about: Mapping[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    from trainers.lora import merge_adapters

    lora = LoraConfig(**about.get("lora", {}))
    return merge_adapters(tensors, scale=lora.alpha / lora.rank) if lora.rank else tensors


def _check_writes(config: ModelConfig) -> None:
    if config.bidirectional:
        raise TrainerError("an encoder generates no text: `trainers.serve` serves decoders only")


def _load_hugging_face(folder: Path, dtype: torch.dtype) -> tuple[nn.Module, ModelConfig, str]:
    import json

    from trainers.hugging_face import find_window, load_weights, read_shape

    try:
        content = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise TrainerError(f"cannot read `{folder / 'config.json'}`: {error}") from error
    shape = read_shape(content, context=0)
    # Beyond a sliding window, attention to all tokens would be another model.
    context = min(shape["positions"], find_window(content) or shape["positions"])
    config = ModelConfig(**{**shape, "context": context, "dropout": 0.0})
    _check_writes(config)
    model = create_language_model(config.kind, config)
    load_weights(model, config, folder)
    return model.to(dtype), config, str(folder)
