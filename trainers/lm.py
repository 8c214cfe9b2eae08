"""Trains a language model: `python -m trainers.lm --strategy ddp`, alone, on the broker's nodes or under torchrun.

Run again after any end but success, it goes on from the newest complete checkpoint.
"""

import dataclasses
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from trainers.config import Config, parse_config
from trainers.errors import TrainerError
from trainers.launch import end_process, launch_if_needed
from trainers.session import run_session
from trainers.study import Study

if TYPE_CHECKING:  # torch is imported when flags are known to be right and SIGTERM is heard
    import torch

    from trainers.tokens import Tokens


def main(arguments: Sequence[str]) -> int:
    """Train as the flags and the environment say; return the exit code."""
    config = parse_config(arguments)
    code = launch_if_needed("trainers.lm", arguments, elastic=config.elastic)
    return run_session(config, partial(bring, config)) if code is None else code


def bring(config: Config, device: "torch.device", is_spread: bool = False) -> Study:
    """The text, the network, and the loss."""
    import torch

    from trainers.losses import next_token_loss
    from trainers.models import create_language_model
    from trainers.tokens import open_corpora, open_tokens

    tokens = open_tokens(config.data)
    training, validation = open_corpora(config.data, tokens, config.model.context)
    vocabulary = config.model.vocabulary or tokens.vocabulary
    if vocabulary < tokens.vocabulary:
        raise TrainerError(f"the data has {tokens.vocabulary} token ids, `--model.vocabulary {vocabulary}` too few")
    # Without memory until it is known to suffice. Only a tied weight, once spread over ranks, cannot be tied again.
    is_empty = not (is_spread and config.model.tie_embeddings)
    with torch.device("meta") if is_empty else device:
        model = create_language_model(config.model.kind, dataclasses.replace(config.model, vocabulary=vocabulary))
    return Study(
        model=model,
        training=training,
        validation=validation,
        loss_of=next_token_loss(config.train.z_loss),
        unit="tokens",
        units_per_sample=config.model.context,
        flops_per_sample=count_flops(config, sum(each.numel() for each in model.parameters()), vocabulary),
        fill=model.fill if is_empty else None,
        demonstrate=partial(write_sample, config, tokens, device) if config.sample.tokens else None,
    )


def count_flops(config: Config, parameter_count: int, vocabulary: int) -> float:
    """Of one sample, forward and backward: 6 a weight and token, and attention's (arXiv:2204.02311, appendix B).

    An embedding is looked up, not multiplied with; tied to the last layer, it is both.
    """
    model = config.model
    looked_up = 0 if model.tie_embeddings else vocabulary * model.width
    if model.kind == "gpt":
        looked_up += model.context * model.width
    attention = 12 * model.depth * model.width * model.context
    return float(model.context * (6 * (parameter_count - looked_up) + attention))


def write_sample(config: Config, tokens: "Tokens", device: "torch.device", model: "torch.nn.Module") -> str:
    """What the model writes, or why it cannot be shown."""
    from trainers.generate import write_text
    from trainers.tokenizers import create_tokenizer

    try:
        tokenizer = create_tokenizer(tokens.tokenizer)
    except TrainerError as error:
        return f"no sample text: {error}"
    return "sample: " + repr(write_text(model, tokenizer, config.sample, config.model.context, device))


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
