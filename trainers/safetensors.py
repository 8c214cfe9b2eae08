"""Read and write safetensors files: a JSON header, then the bytes of the tensors.

Format: https://github.com/huggingface/safetensors.
"""

import json
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainers.errors import TrainerError

# The dtype names of the format.
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
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


class SafetensorsFolder:
    """The memory-mapped tensors of `model.safetensors` in a folder, or of the files that its index names."""

    def __init__(self, folder: Path) -> None:
        """Read all headers. Raises TrainerError for a folder without safetensors files."""
        self._folder = folder
        self._places: dict[str, tuple[mmap.mmap, int, Mapping[str, Any]]] = {}
        try:
            for name in self._find_files():
                self._add(folder / name)
        except (OSError, ValueError, KeyError, struct.error) as error:
            raise TrainerError(f"`{folder}` holds no readable safetensors: {error}") from error

    def __contains__(self, name: str) -> bool:
        """Return whether a tensor has this name."""
        return name in self._places

    def read(self, name: str) -> Tensor:
        """Return a tensor that shares the pages of the file."""
        if name not in self._places:
            raise TrainerError(f"`{self._folder}` has no tensor `{name}`")
        content, start, entry = self._places[name]
        begin, end = entry["data_offsets"]
        dtypes = {short: getattr(torch, long) for long, short in DTYPE_NAMES.items()}
        dtype = dtypes[entry["dtype"]]
        if begin == end:
            return torch.empty(entry["shape"], dtype=dtype)
        count = (end - begin) // dtype.itemsize
        return torch.frombuffer(content, dtype=dtype, count=count, offset=start + begin).view(entry["shape"])

    def _find_files(self) -> list[str]:
        index = self._folder / INDEX_FILE
        # If a model was exported over a larger one, both are there. `from_pretrained` prefers the single file, too.
        if (self._folder / SINGLE_FILE).exists() or not index.exists():
            return [SINGLE_FILE]
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))

    def _add(self, path: Path) -> None:
        with path.open("rb") as file:
            # Private and writable: torch has no read-only tensors, and warns about read-only mappings.
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        (length,) = struct.unpack_from("<Q", content)
        header = json.loads(content[8 : 8 + length])
        for name, entry in header.items():
            if name != "__metadata__":
                if 8 + length + entry["data_offsets"][1] > len(content):
                    raise ValueError(f"`{path.name}` is cut off in `{name}`")
                self._places[name] = content, 8 + length, entry


def write_safetensors(output: Path, tensors: Mapping[str, Any], about: Mapping[str, str]) -> None:
    """Write the tensors to one file, which gets its name once it is complete."""
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
            # As bytes, because numpy has no bfloat16.
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    partial.replace(output)
