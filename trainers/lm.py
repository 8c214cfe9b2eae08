"""Train a language model: `python -m trainers.lm --strategy ddp`, in one process, on broker's nodes or under torchrun.

Run the same command again after a preemption or a failure: it resumes from the newest complete checkpoint.
"""

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainers.config import Config, LoraConfig, ModelConfig, parse_config, to_arguments
from trainers.errors import TrainerError
from trainers.hugging_face import adopt_shape, load_weights
from trainers.launch import launch_if_needed, run_process
from trainers.recipe import Forward, Loss, Recipe, call_model
from trainers.scale_report import report_scaling
from trainers.session import run_session

if TYPE_CHECKING:  # torch is imported after the flags are checked and SIGTERM is handled
    import torch

    from trainers.data import Samples
    from trainers.models.decoder import Decoder
    from trainers.tokens import Tokens

# Axes of strategies under which each rank calls the whole model with whole samples.
WHOLE_SAMPLE_AXES = {"replicate", "shard", "island", "server"}
# Fields of ModelConfig that change what weights compute, but not their shapes.
MEANING = ("heads", "norm_epsilon", "bidirectional")
MEANING_BY_KIND = {"gpt": ("activation",), "llama": ("rope_theta", "rope_scaling")}


def main(arguments: Sequence[str]) -> int:
    """Train as the flags and the environment specify; return the exit code."""
    try:
        config = adopt_shape(parse_config(arguments))  # the shape of `--init-from`
    except TrainerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if config.scale_report:
        return report_scaling(to_arguments(dataclasses.replace(config, scale_report=False)), batch=config.train.batch)
    # Start one process per GPU, unless this process is one of them.
    exit_code = launch_if_needed("trainers.lm", arguments, elastic=config.elastic, is_warm=config.warm)
    if exit_code is not None:
        return exit_code
    # Join the other ranks, build the recipe, resume, train (trainers/loop.py), save.
    return run_session(config, partial(build, config))


def build(config: Config, device: "torch.device", is_spread: bool = False) -> Recipe:
    """Build the data, the model and the loss. `is_spread`: the strategy accepts a model on the `meta` device."""
    import torch

    from trainers.lora import add_adapters, check_strategy
    from trainers.models import create_language_model
    from trainers.models.experts import count_idle_parameters
    from trainers.tokenizers import warn_of_other_tokenizer
    from trainers.tokens import open_corpora, open_tokens

    # Data.
    tokens = open_tokens(config.data)
    if config.init_from and os.environ.get("RANK", "0") == "0":
        warn_of_other_tokenizer(tokens.tokenizer, Path(config.init_from), is_gpt2=config.model.kind == "gpt")
    training, validation = open_corpora(config.data, tokens, config.model.context)

    forward, loss = choose_forward(config, tokens.separator)
    mask_id = find_mask(config, tokens.vocabulary)
    shape_batches = partial(make_batches, config, mask_id=mask_id, vocabulary=tokens.vocabulary)
    ids = max(tokens.vocabulary, mask_id + 1)

    # Model. On the `meta` device it takes no memory until memory is known to suffice. Tied weights are excluded: once
    # they are sharded, they cannot be tied again.
    vocabulary = config.model.vocabulary or ids
    if vocabulary < ids:
        mask = ", the mask included" if ids > tokens.vocabulary else ""
        raise TrainerError(f"the data has {ids} token ids{mask}, more than `--model.vocabulary {vocabulary}` allows")
    vocabulary = -(-vocabulary // config.model.vocabulary_multiple) * config.model.vocabulary_multiple
    is_empty = not (is_spread and config.model.tie_embeddings)
    shape = dataclasses.replace(config.model, vocabulary=vocabulary)
    check_strategy(config.lora, config.strategy)
    with torch.device("meta") if is_empty else device:
        model = create_language_model(shape.kind, shape)
        add_adapters(model, config.lora)
    initialize = partial(initialize_weights, config, shape, model)
    if not is_empty:
        initialize(device, is_allocated=True)
    parameter_count = sum(parameter.numel() for parameter in model.parameters()) - count_idle_parameters(shape)

    writes_text = config.sample.tokens and not config.model.bidirectional
    return Recipe(
        model=model,
        training=shape_batches(training, seed=config.data.seed),
        validation=None if validation is None else shape_batches(validation, seed=0),
        loss=loss,
        forward=forward,
        unit="tokens",
        units_per_sample=config.model.context,
        flops_per_sample=count_flops(config, parameter_count, vocabulary),
        fill=initialize if is_empty else None,
        demonstrate=partial(write_sample, config, tokens, device) if writes_text else None,
        about=describe(config, shape, mask_id, tokens.tokenizer),
        find_conflict=partial(find_conflict, shape, config.lora),
    )


def find_mask(config: Config, vocabulary: int) -> int:
    """Return the id that replaces a hidden token, by default the one after those of the data; -1 if none is hidden."""
    if not config.data.mask_share:
        return -1
    return vocabulary if config.data.mask_id < 0 else config.data.mask_id


def make_batches(config: Config, samples: "Samples", *, mask_id: int, vocabulary: int, seed: int) -> "Samples":
    """Wrap samples of windows and next tokens as the loss requires: masked, packed into documents, or unchanged."""
    from trainers.masking import MaskedBatches
    from trainers.packing import NamedBatches

    if config.data.mask_share:
        share = config.data.mask_share
        return MaskedBatches(samples, share=share, mask_id=mask_id, vocabulary=vocabulary, seed=seed)
    return NamedBatches(samples) if config.fused_loss else samples


def choose_forward(config: Config, separator: int | None) -> "tuple[Forward, Loss]":
    """Return the forward function and the loss. Raises TrainerError if the strategy does not support them."""
    from trainers.losses import next_token_loss
    from trainers.masking import count_hidden, masked_loss
    from trainers.packing import LanguageForward, take_loss
    from trainers.strategies import find_axes

    axes = set(find_axes(config.strategy)) - WHOLE_SAMPLE_AXES
    if config.fused_loss and axes:
        raise TrainerError(
            f"`--fused_loss` needs the whole last layer on each rank, which `{config.strategy}` does not have"
        )
    if config.data.document_mask and axes - {"tensor"}:
        raise TrainerError(
            f"`--data.document_mask` needs whole windows on each rank, which `{config.strategy}` does not have"
        )
    if config.data.document_mask and separator is None:
        raise TrainerError(
            "the token data does not name the id that separates documents\n\n"
            'hint: add `"separator": ID` to tokens.json, or prepare the data again'
        )
    if config.data.mask_share:
        if "context" in axes:
            raise TrainerError("`--data.mask_share` needs whole windows on each rank, which `context` does not have")
        return call_model, masked_loss(config.train.z_loss, count_hidden(config.model.context, config.data.mask_share))
    if not config.fused_loss and not config.data.document_mask:
        return call_model, next_token_loss(config.train.z_loss)
    forward = LanguageForward(separator=separator if config.data.document_mask else None, z_weight=config.train.z_loss)
    return forward, take_loss if config.fused_loss else next_token_loss(config.train.z_loss)


def initialize_weights(
    config: Config, shape: ModelConfig, model: "Decoder", device: "torch.device", is_allocated: bool = False
) -> None:
    """Draw all weights at random, then load those of `--init-from` over them."""
    if not is_allocated:
        model.fill(device)
    elif config.lora.rank:
        model.draw_weights()  # the adapters were added later
    if config.init_from:
        load_weights(model, shape, Path(config.init_from))


def describe(config: Config, shape: ModelConfig, mask_id: int, tokenizer: str) -> dict[str, Any]:
    """Return the description of the model that is stored with each checkpoint, for `trainers.export` and `.serve`."""
    return {
        "model": dataclasses.asdict(shape),
        "lora": dataclasses.asdict(config.lora),
        **({"mask_id": mask_id} if mask_id >= 0 else {}),
        "init_from": str(Path(config.init_from).resolve()) if config.init_from else "",
        "tokenizer": tokenizer,
    }


def find_conflict(model: ModelConfig, lora: LoraConfig, about: Mapping[str, Any]) -> str:
    """Return which flags would give the weights of a checkpoint another meaning, though their shapes fit; "" if none.

    `about` is that of the checkpoint.
    """
    mine = {"model": dataclasses.asdict(model), "lora": dataclasses.asdict(lora)}
    names = [("model", name) for name in (*MEANING, *MEANING_BY_KIND[model.kind])]
    names += [("model", "experts_per_token")] if model.experts else []
    names += [("lora", "alpha")] if lora.rank and about.get("lora", {}).get("rank") == lora.rank else []
    changed = [
        f"`--{group}.{name}` was `{about[group][name]}` and is `{mine[group][name]}`"
        for group, name in names
        if name in about.get(group, {}) and about[group][name] != mine[group][name]
    ]
    return ", ".join(changed)


def count_flops(config: Config, parameter_count: int, vocabulary: int) -> float:
    """Return the FLOPs of one sample, forward and backward; of experts, count those that a token uses.

    6 per weight and token, plus attention (arXiv:2204.02311, appendix B). An embedding is looked up, not multiplied,
    unless it is tied to the last layer.
    """
    model = config.model
    looked_up = 0 if model.tie_embeddings else vocabulary * model.width
    if model.kind == "gpt":
        looked_up += model.context * model.width
    attention = 12 * model.depth * model.width * model.context
    return float(model.context * (6 * (parameter_count - looked_up) + attention))


def write_sample(config: Config, tokens: "Tokens", device: "torch.device", model: "torch.nn.Module") -> str:
    """Return text generated by the model, or the reason why there is none."""
    from trainers.generate import write_text
    from trainers.tokenizers import create_tokenizer

    try:
        tokenizer = create_tokenizer(tokens.tokenizer)
    except TrainerError as error:
        return f"no sample text: {error}"
    return "sample: " + repr(write_text(model, tokenizer, config.sample, config.model.context, device))


if __name__ == "__main__":
    run_process(partial(main, sys.argv[1:]))
