"""torchtitan's Trainer with broker's checkpoints, progress and notices. It takes torchtitan's own flags."""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import torch.distributed as dist
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import BaseLogger, LoggerContainer, MetricsProcessor
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import ConfigManager, DebugConfig, TrainingConfig
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3 import model_registry
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

from trainers import bridge
from trainers.bridge_torch import agree
from trainers.frameworks.points import SAVE_STEPS, STEPS
from trainers.frameworks.torchtitan_bytes import Bytes, Sequences


class LossMeter(BaseLogger):
    """Keeps the loss that torchtitan reported last."""

    loss: float | None = None

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.loss = float(metrics["loss_metrics/global_avg_loss"])


class BridgeTrainer(Trainer):
    """Reports each step to broker. After a notice, it saves and leaves."""

    newest: int | None = None  # checkpoint; before the first step, the one that was loaded

    def should_continue_training(self) -> bool:
        """Report the step that has ended: torchtitan asks before each step, after the save that was due."""
        steps, every = self.config.training.steps, self.config.checkpoint.interval
        if self.newest is None:
            self.newest, self.meter, loggers = self.step, LossMeter(), LoggerContainer()
            loggers.add_logger(self.metrics_processor.logger)
            loggers.add_logger(self.meter)
            self.metrics_processor.logger = loggers
            return super().should_continue_training()
        is_leaving, is_saved = agree(bridge.preempted()), self.step % every == 0 or self.step == steps
        if is_saved or (is_leaving and self.checkpointer.save(self.step, last_step=True)):  # at any step
            self.newest = self.step
        has_loss = not self.parallel_dims.pp_enabled or self.pp_has_last_stage
        bridge.progress(self.step, steps, self.meter.loss if has_loss else None, self.newest or None)
        if is_leaving:
            bridge.leave()
        return super().should_continue_training()


def debug_model() -> Trainer.Config:
    """Return the configuration that flags change: torchtitan's small Llama 3."""
    spec = model_registry("debugmodel")
    loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec))
    return Trainer.Config(
        model_spec=spec,
        dump_folder=str(bridge.checkpoint_folder()),
        tokenizer=Bytes.Config(),
        dataloader=Sequences.Config(),
        optimizer=default_adamw(lr=8e-4),
        loss=ChunkedLossWrapper.Config(loss_fn=loss),
        training=TrainingConfig(local_batch_size=4, seq_len=256, steps=STEPS, disable_cuda_graphs=True),
        metrics=MetricsProcessor.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(enable=True, interval=SAVE_STEPS, last_save_model_only=False),
        debug=DebugConfig(seed=0, deterministic=True),
    )


def main() -> None:
    """Train from torchtitan's newest checkpoint to the last step."""
    bridge.listen()
    init_logger()
    own = ["--module", "trainers.frameworks.torchtitan_llama", "--config", "debug_model"]
    trainer = BridgeTrainer(ConfigManager().parse_args([*own, *sys.argv[1:]]))
    trainer.train()
    values = [each.detach() for part in trainer.model_parts for each in part.parameters()]
    shards = [getattr(each, "to_local", each.cpu)().cpu().numpy().tobytes() for each in values]
    digests: list[Any] = [b""] * dist.get_world_size()
    dist.all_gather_object(digests, hashlib.sha256(b"".join(shards)).digest())
    if dist.get_rank() == 0:
        bridge.finish(trainer.step, digests)
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
