"""Export the weights of a checkpoint: `python -m trainers.export model.safetensors`, or `--format hf FOLDER`.

One process reads the newest complete checkpoint, regardless of the strategy and the number of ranks that wrote it.
"""

import argparse
import json
import shutil
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainers.config import LoraConfig, ModelConfig
from trainers.environment import read_environment
from trainers.errors import TrainerError
from trainers.hugging_face import rename, write_shape
from trainers.tokenizers import ByteTokenizer, create_tokenizer, find_tokenizer

PREFIX = "model."
# Those of tiktoken's tables, which it would download.
TIKTOKEN_ENDS = {"gpt2": 50256, "gpt4": 100257, "cl100k_base": 100257, "gpt4o": 199999, "o200k_base": 199999}
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# The files of a tokenizer in a Hugging Face folder.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model", "vocab.json", "merges.txt",
    "added_tokens.json", "chat_template.jinja", "generation_config.json",
)  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Parse the flags and write the files; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainers.export", description="Write a checkpoint's weights.")
    parser.add_argument("output", metavar="PATH", help="safetensors file to write, or a folder with `--format hf`")
    parser.add_argument(
        "--checkpoint", metavar="FOLDER", help="folder of checkpoints (default: $BROKER_CHECKPOINT_DIR)"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="dtype of the exported weights"
    )
    parser.add_argument(
        "--format",
        choices=("safetensors", "hf"),
        default="safetensors",
        help="one file with the trainers' names, or a folder that Hugging Face's `from_pretrained` reads",
    )
    parser.add_argument(
        "--tokenizer", metavar="FOLDER", help="copy the tokenizer from here (default: the checkpoint's)"
    )
    options = parser.parse_args(arguments)
    try:
        url, output = options.checkpoint or read_environment().checkpoint_url, Path(options.output)
        if options.format == "hf":
            export_hugging_face(url, output, options.dtype, tokenizer=options.tokenizer)
        else:
            export(url, output, options.dtype)
    except (TrainerError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def export(url: str, output: Path, dtype: str) -> None:
    """Write the weights of the newest complete checkpoint to a safetensors file; TrainerError if there is none."""
    from trainers.safetensors import write_safetensors

    step, _, tensors = read_checkpoint(url)
    write_safetensors(output, convert(tensors, dtype), {"format": "pt", "step": str(step)})
    print(f"{sum(tensor.numel() for tensor in tensors.values()):,} weights of step {step} are in `{output}`")


def export_hugging_face(url: str, output: Path, dtype: str, *, tokenizer: str | None) -> None:
    """Write a Hugging Face folder: `config.json`, weights with merged adapters, and the tokenizer."""
    from trainers.lora import merge_adapters
    from trainers.safetensors import SINGLE_FILE, write_safetensors

    step, about, tensors = read_checkpoint(url)
    if "model" not in about:
        raise TrainerError(
            f"the checkpoint of step {step} does not describe its model: it was not written by `trainers.lm`, or was "
            "written before this release\n\nhint: resume the run for one step, or export without `--format hf`"
        )
    model, lora = ModelConfig(**about["model"]), LoraConfig(**about["lora"])
    if lora.rank:
        tensors = merge_adapters(tensors, scale=lora.alpha / lora.rank)
    shape = write_shape(model, dtype=dtype, mask_id=about.get("mask_id"))
    if not model.bidirectional:
        shape |= find_special_ids(about, tokenizer or find_tokenizer(about))
    output.mkdir(parents=True, exist_ok=True)
    about_file = {"format": "pt", "step": str(step)}
    write_safetensors(output / SINGLE_FILE, convert(rename(tensors, model), dtype), about_file)
    (output / "config.json").write_text(json.dumps(shape, indent=2) + "\n")
    copied = copy_tokenizer(tokenizer or find_tokenizer(about), output)
    print(f"step {step} is in `{output}` ({'with' if copied else 'without'} a tokenizer)")
    if model.expert_capacity:
        print("note: Transformers has no equivalent of `--model.expert_capacity`: there, no token skips its experts")


def find_special_ids(about: Mapping[str, Any], tokenizer: str) -> dict[str, Any]:
    """Return the ids that begin and end a text, as in the original's `config.json`, or as the tokenizer has them.

    Without them, Transformers would end a text at its default id for this type of model, which may be any other token.
    """
    original = Path(str(about.get("init_from") or "")) / "config.json"
    if about.get("init_from") and original.is_file():
        content = json.loads(original.read_text())
        return {name: content[name] for name in SPECIAL_IDS if name in content}
    separator: Sequence[int] = ()
    if tokenizer == ByteTokenizer.name or Path(tokenizer).is_dir():
        with suppress(TrainerError):  # its package is not installed
            separator = create_tokenizer(tokenizer).separator
    end = separator[0] if len(separator) == 1 else TIKTOKEN_ENDS.get(tokenizer)
    return {**dict.fromkeys(SPECIAL_IDS), "eos_token_id": end}


def copy_tokenizer(source: str | None, output: Path) -> bool:
    """Copy the files of a tokenizer; return whether there were any."""
    names = [name for name in TOKENIZER_FILES if source and (Path(source) / name).is_file()]
    for name in names:
        shutil.copyfile(Path(str(source)) / name, output / name)
    return any(name.startswith("tokenizer") for name in names)


def convert(tensors: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return the tensors with those of floating-point type converted to `dtype`."""
    import torch

    target = getattr(torch, dtype)
    return {name: value.to(target) if value.is_floating_point() else value for name, value in tensors.items()}


def read_checkpoint(url: str) -> tuple[int, Mapping[str, Any], dict[str, Any]]:
    """Return step, description and weights of the newest complete checkpoint. Raises TrainerError if there is none."""
    from trainers.manifest import find_newest, read_index
    from trainers.storage import open_storage
    from trainers.verified_reader import VerifiedReader

    if "://" not in url and not Path(url).is_dir():
        raise TrainerError(f"`{url}` is not a folder; name one with `--checkpoint`")
    storage = open_storage(url)
    newest = find_newest(storage)
    if newest is None:
        raise TrainerError(f"no complete checkpoint is in `{url}`")
    name, contents = newest
    reader = VerifiedReader(storage, name, contents, read_index(storage, name, contents))
    tensors = read_weights(reader)
    if reader.problem is not None:
        raise TrainerError(f"checkpoint `{name}` cannot be read: {reader.problem}")
    return name.step, contents.about, tensors


def read_weights(reader: Any) -> dict[str, Any]:
    """Return the unsharded tensors of the model by parameter name."""
    import torch
    import torch.distributed.checkpoint as dcp

    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as intended
    entries = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if key.startswith(PREFIX) and hasattr(entry, "size")
    }
    if not state:
        raise TrainerError("the checkpoint contains no model")
    dcp.load(state, storage_reader=reader, no_dist=True)
    return {key.removeprefix(PREFIX): value for key, value in state.items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
