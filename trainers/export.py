"""Writes the weights of a checkpoint as one safetensors file: `python -m trainers.export model.safetensors`.

Reads the newest complete checkpoint, whatever strategy and number of ranks wrote it, in one process.
"""

import argparse
import json
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainers.environment import read_environment
from trainers.errors import TrainerError

# The format's own names, https://github.com/huggingface/safetensors.
DTYPE_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
ALIGNMENT = 8
PREFIX = "model."


def main(arguments: Sequence[str]) -> int:
    """Read the flags, write the file; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainers.export", description="Write a checkpoint's weights.")
    parser.add_argument("output", metavar="FILE", help="safetensors file to write")
    parser.add_argument(
        "--checkpoint", metavar="FOLDER", help="folder of checkpoints (default: $BROKER_CHECKPOINT_DIR)"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="as what to write"
    )
    options = parser.parse_args(arguments)
    try:
        export(options.checkpoint or read_environment().checkpoint_url, Path(options.output), options.dtype)
    except (TrainerError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def export(url: str, output: Path, dtype: str) -> None:
    """Write the newest complete checkpoint's weights; none there is a TrainerError."""
    import torch

    from trainers.manifest import find_newest, read_index
    from trainers.storage import open_storage
    from trainers.verified_reader import VerifiedReader

    if "://" not in url and not Path(url).is_dir():
        raise TrainerError(f"`{url}` is no folder; name one with `--checkpoint`")
    storage = open_storage(url)
    found = find_newest(storage)
    if found is None:
        raise TrainerError(f"no complete checkpoint is in `{url}`")
    name, contents = found
    reader = VerifiedReader(storage, name, contents, read_index(storage, name, contents))
    tensors = read_weights(reader)
    if reader.problem is not None:
        raise TrainerError(f"checkpoint `{name}` cannot be read: {reader.problem}")
    wanted = getattr(torch, dtype)
    converted = {key: each.to(wanted) if each.is_floating_point() else each for key, each in tensors.items()}
    write_safetensors(output, converted, {"format": "pt", "step": str(name.step)})
    count = sum(each.numel() for each in tensors.values())
    print(f"{count:,} weights of step {name.step} are in `{output}`")


def read_weights(reader: Any) -> dict[str, Any]:
    """All tensors of the model, whole, by the names they have in it."""
    import torch
    import torch.distributed.checkpoint as dcp

    entries = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if key.startswith(PREFIX) and hasattr(entry, "size")
    }
    if not state:
        raise TrainerError("the checkpoint holds no model")
    dcp.load(state, storage_reader=reader, no_dist=True)
    return {key.removeprefix(PREFIX): each for key, each in state.items()}


def write_safetensors(output: Path, tensors: Mapping[str, Any], about: Mapping[str, str]) -> None:
    """Eight bytes with the length of a JSON header, the header, the tensors' bytes; it appears when it is whole."""
    import torch

    header: dict[str, Any] = {"__metadata__": dict(about)}
    place = 0
    for name, tensor in sorted(tensors.items()):
        size = tensor.numel() * tensor.element_size()
        dtype_name = DTYPE_NAMES[str(tensor.dtype).removeprefix("torch.")]
        header[name] = {"dtype": dtype_name, "shape": list(tensor.shape), "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(output.name + ".partial")
    with partial.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, tensor in sorted(tensors.items()):
            # By bytes, because numpy has no bfloat16.
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    partial.replace(output)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
