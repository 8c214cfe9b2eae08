"""Hugging Face Trainer: a small GPT-2 with dropout and random weights, so nothing is downloaded."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from trainers import bridge
from trainers.bridge_hugging_face import BridgeTrainerCallback, find_checkpoint
from trainers.frameworks.points import SAVE_STEPS, STEP_S, STEPS

CONTEXT, VOCABULARY = 32, 64


class Lines(torch.utils.data.Dataset):
    """Arithmetic sequences of tokens; each sample depends only on its index."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(STEP_S / 8)
        tokens = (index + torch.arange(CONTEXT) * (index % 7 + 1)) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


def make_model() -> torch.nn.Module:
    """Return a small GPT-2 with random weights."""
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "n_positions": CONTEXT, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def make_arguments() -> TrainingArguments:
    """Return the trainer's arguments; checkpoints go to broker's folder."""
    has_gpu = torch.cuda.is_available()
    return TrainingArguments(
        output_dir=str(bridge.checkpoint_folder()),
        max_steps=STEPS,
        save_steps=SAVE_STEPS,
        save_total_limit=3,
        logging_steps=1,
        logging_nan_inf_filter=False,
        per_device_train_batch_size=8,
        use_cpu=not has_gpu,
        ddp_backend="nccl" if has_gpu else "gloo",
        report_to=[],
        disable_tqdm=True,
    )


def main(model_of: object = make_model) -> None:
    """Train the model that `model_of` makes, from the newest checkpoint to the last step."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    set_seed(0)
    model = model_of()  # type: ignore[operator]
    callback, arguments = BridgeTrainerCallback(), make_arguments()
    trainer = Trainer(model=model, args=arguments, train_dataset=Lines(), callbacks=[callback])
    trainer.train(resume_from_checkpoint=find_checkpoint(bridge.checkpoint_folder()))
    callback.leave_if_asked()
    if trainer.is_world_process_zero():
        bridge.finish(STEPS, [value.detach().cpu().numpy() for value in model.state_dict().values()])
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
