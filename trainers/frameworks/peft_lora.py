"""PEFT: low-rank adapters on a frozen GPT-2, trained by the Trainer. Checkpoints contain only the adapters."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model

from trainers.frameworks.hf_trainer import main, make_model


def make_adapted_model() -> torch.nn.Module:
    """Return the model with adapters. Load yours with `from_pretrained`: frozen weights must be the same every time."""
    config = LoraConfig(
        task_type="CAUSAL_LM", r=8, lora_alpha=16, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True
    )
    return get_peft_model(make_model(), config)


if __name__ == "__main__":
    main(make_adapted_model)
