"""Megatron Core: a GPT with tensor parallelism (`TENSOR`), stages (`PIPELINE`) and replicas on the other GPUs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from trainers import bridge
from trainers.bridge_torch import agree
from trainers.frameworks.points import SAVE_STEPS, STEPS

TENSOR, PIPELINE = int(os.environ.get("TENSOR") or 2), int(os.environ.get("PIPELINE") or 2)
CONTEXT, VOCABULARY, MICRO_BATCH, MICRO_BATCHES = 64, 256, 2, 4
PEER_MINUTES = 2  # a rank whose peer is silent ends after this time; Megatron's default is 30


def make_model() -> GPTModel:
    """Return this rank's part of the model. Weights drawn on the CPU depend on the stage, not on `TENSOR`."""
    torch.manual_seed(parallel_state.get_pipeline_model_parallel_rank())
    layout = {"tensor_model_parallel_size": TENSOR, "pipeline_model_parallel_size": PIPELINE}
    sizes = {"num_layers": 4, "hidden_size": 128, "num_attention_heads": 8}
    config = TransformerConfig(**sizes, **layout, pipeline_dtype=torch.float32, use_cpu_initialization=True)
    config.deterministic_mode, config.finalize_model_grads_func = True, finalize_model_grads
    ends = (parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage())
    return GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, CONTEXT, *ends).cuda()


def read_batches(step: int) -> Iterator[torch.Tensor]:
    """Yield this replica's micro-batches of `step`, tokens (MICRO_BATCH, CONTEXT + 1): a function of the step only."""
    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    size = MICRO_BATCH * MICRO_BATCHES
    starts = np.random.default_rng(step).integers(VOCABULARY, size=(replicas, size, 2, 1))[replica]
    lines = (starts[:, 0] + (starts[:, 1] % 7 + 1) * np.arange(CONTEXT + 1)) % VOCABULARY
    yield from torch.from_numpy(lines).cuda().split(MICRO_BATCH)


def forward(batches: Iterator[torch.Tensor], model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
    """Run one micro-batch through this stage, as Megatron's schedules call it."""
    tokens = next(batches)
    positions = torch.arange(CONTEXT, device=tokens.device).expand(MICRO_BATCH, CONTEXT)
    output = model(tokens[:, :-1].contiguous(), positions, None, labels=tokens[:, 1:].contiguous())
    return output, lambda losses: (losses.mean(), losses.detach().mean())


def share_loss(losses: list[torch.Tensor]) -> float:
    """Return the mean loss of all replicas, on every rank; only the last stage has `losses`."""
    loss = torch.stack(losses).mean() if losses else torch.zeros((), device="cuda")
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    dist.broadcast(loss, last, group=parallel_state.get_pipeline_model_parallel_group())
    dist.all_reduce(loss, group=parallel_state.get_data_parallel_group())
    return float(loss) / parallel_state.get_data_parallel_world_size()


def main() -> None:
    """Train from the newest checkpoint to the last step."""
    bridge.listen()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("nccl", timeout=timedelta(minutes=PEER_MINUTES))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parallel_state.initialize_model_parallel(TENSOR, PIPELINE, distributed_timeout_minutes=PEER_MINUTES)
    model_parallel_cuda_manual_seed(1)
    model = make_model()
    replica = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3, weight_decay=0.0, clip_grad=1.0), [replica])
    run = partial(get_forward_backward_func(), forward_step_func=forward, model=replica, num_microbatches=MICRO_BATCHES)

    def get_state(*, is_loading: bool = False) -> dict[str, Any]:
        weights = model.sharded_state_dict()
        return {"model": weights, "optimizer": optimizer.sharded_state_dict(weights, is_loading=is_loading)}

    step, folder = bridge.resume()
    if folder:
        saved = dist_checkpointing.load(get_state(is_loading=True), str(folder))
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    while step < STEPS:
        # Dropout depends on the step only. Ranks of a tensor group share the seed: Megatron adds the rank where needed.
        model_parallel_cuda_manual_seed(1 + (step * ranks + rank) // TENSOR)
        replica.zero_grad_buffer()
        optimizer.zero_grad()
        loss = share_loss(run(data_iterator=read_batches(step), seq_length=CONTEXT, micro_batch_size=MICRO_BATCH))
        optimizer.step()
        step += 1
        is_leaving = agree(bridge.preempted())
        if is_leaving or step % SAVE_STEPS == 0 or step == STEPS:
            dist_checkpointing.save(get_state(), str(bridge.folder_of(step)))  # every rank writes its shards
            if rank == 0:
                bridge.commit(step)
            dist.barrier()  # no rank leaves before the checkpoint is complete
        bridge.progress(step, STEPS, loss)
        if is_leaving:
            bridge.leave()
    own = hashlib.sha256(b"".join(value.detach().cpu().numpy().tobytes() for value in model.parameters()))
    digests: list[Any] = [b""] * ranks
    dist.all_gather_object(digests, own.digest())
    if rank == 0:
        bridge.finish(STEPS, digests)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
