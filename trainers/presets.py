"""Presets of shapes from 1 million to 8 billion parameters: `--preset gpt2`.

A preset maps dotted names of options to values. Batches are in samples. Learning rates are those published with the
shape; those of the small shapes are our own.
"""

from collections.abc import Mapping
from typing import Any


def _shape(depth: int, width: int, heads: int, context: int, **more: Any) -> dict[str, Any]:
    values = {"depth": depth, "width": width, "heads": heads, "context": context, **more}
    return {f"model.{name}": value for name, value in values.items()}


def _optimisation(steps: int, batch: int, micro_batch: int, peak: float, warmup_steps: int) -> dict[str, Any]:
    return {
        "train.steps": steps,
        "train.batch": batch,
        "train.micro_batch": micro_batch,
        "train.learning_rate": peak,
        "train.learning_rate_min": peak / 10,
        "train.warmup_steps": warmup_steps,
        # As rare as possible while a loss costs at most about an hour on one GPU of the A100 generation.
        "checkpoint.every_steps": 250,
        "log.every_steps": 10,
    }


# GPT-2, "Language Models are Unsupervised Multitask Learners", table 2. Learning rates: GPT-3, arXiv:2005.14165,
# table 2.1, for the nearest sizes. Half a million tokens per step.
_GPT2 = {"vocabulary": 50257, "tie_embeddings": True}
# Llama 2, arXiv:2307.09288, and Llama 3, arXiv:2407.21783, table 3.
_LLAMA3 = {"kind": "llama", "key_value_heads": 8, "vocabulary": 128256, "rope_theta": 500000.0}
# Mixtral 8x7B, arXiv:2401.04088, table 1. Its batch and learning rate are not published: those of Llama 2 7B.
_MIXTRAL = {"kind": "llama", "key_value_heads": 8, "hidden_width": 14336, "vocabulary": 32000, "rope_theta": 1000000.0}
# Under FSDP parameters are gathered in bfloat16, and gradients summed in float32 (torchtitan's defaults).
_BFLOAT16 = {"dtype": "bfloat16", "fsdp.param_dtype": "bfloat16", "fsdp.reduce_dtype": "float32"}
_LARGE = {**_BFLOAT16, "recompute": "selective"}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "gpt-1m": _shape(4, 144, 4, 128) | _optimisation(2000, 32, 32, 2e-3, 100),
    "gpt-10m": _shape(6, 384, 6, 256) | _optimisation(5000, 64, 64, 1e-3, 100),
    "llama-10m": _shape(6, 384, 6, 256, kind="llama", hidden_width=1024) | _optimisation(5000, 64, 64, 1e-3, 100),
    "encoder-10m": _shape(6, 384, 6, 256, kind="llama", hidden_width=1024, bidirectional=True)
    | _optimisation(5000, 64, 64, 1e-3, 100)
    | {"data.mask_share": 0.3},
    "gpt2": _shape(12, 768, 12, 1024, **_GPT2) | _optimisation(600_000, 480, 12, 6e-4, 2000) | _BFLOAT16,
    "gpt2-medium": _shape(24, 1024, 16, 1024, **_GPT2) | _optimisation(600_000, 480, 8, 3e-4, 2000) | _LARGE,
    "gpt2-large": _shape(36, 1280, 20, 1024, **_GPT2) | _optimisation(600_000, 480, 8, 2.5e-4, 2000) | _LARGE,
    "gpt2-xl": _shape(48, 1600, 25, 1024, **_GPT2) | _optimisation(600_000, 480, 4, 2e-4, 2000) | _LARGE,
    "llama3-1b": _shape(16, 2048, 32, 8192, hidden_width=8192, tie_embeddings=True, **_LLAMA3)
    | _optimisation(200_000, 128, 1, 4e-4, 2000)
    | _LARGE,
    "llama2-7b": _shape(32, 4096, 32, 4096, kind="llama", hidden_width=11008, vocabulary=32000)
    | _optimisation(500_000, 1024, 1, 3e-4, 2000)
    | _LARGE
    | {"strategy": "fsdp"},
    "llama3-8b": _shape(32, 4096, 32, 8192, hidden_width=14336, **_LLAMA3)
    | _optimisation(500_000, 512, 1, 3e-4, 2000)
    | _LARGE
    | {"strategy": "fsdp"},
    "mixtral-8x7b": _shape(32, 4096, 32, 4096, experts=8, experts_per_token=2, **_MIXTRAL)
    | _optimisation(500_000, 1024, 1, 3e-4, 2000)
    | _LARGE
    | {"strategy": "fsdp", "model.router_z_weight": 1e-3},
}
