"""Extra state of modules (`get_extra_state`), as one value of bytes in checkpoints and in the memory of elastic runs.

It may be any object: a tensor whose length changes, as in TransformerEngine, or a dict that grows. Stored by its parts,
it would have to be read into parts that a new module does not have yet. Encoding it also makes the copy of a step:
passes may change the object while the rest of the state is copied in the background.
"""

import io
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

SUFFIX = "_extra_state"  # the end of torch's names for it (torch.nn.modules.module)
MARK = b"extra state\n"


def pack_extra_state(state: Any) -> Any:
    """Return the state with each module's extra state encoded, as of now."""
    if not isinstance(state, dict):
        return state
    return {key: _pack(part) if str(key).endswith(SUFFIX) else pack_extra_state(part) for key, part in state.items()}


def unpack_extra_state(state: Any) -> Any:
    """Return a state from `pack_extra_state` with the extra state decoded; other values are kept."""
    if isinstance(state, dict):
        return {key: unpack_extra_state(part) for key, part in state.items()}
    return unpack(state[len(MARK) :]) if isinstance(state, bytes) and state.startswith(MARK) else state


def read_extra_state(module: nn.Module, state: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the module's present extra state, encoded, for the names of it in the module's state dict."""
    found = {}
    for name in state:
        if name.endswith(SUFFIX):
            with suppress(AttributeError):  # renamed by a hook: it keeps its first value
                found[name] = _pack(find_owner(module, name).get_extra_state())
    return found


def find_owner(module: nn.Module, name: str) -> nn.Module:
    """Return the submodule of an extra state, given its name in the module's state dict."""
    return module.get_submodule(name.removesuffix(SUFFIX).rstrip("."))


def pack(value: Any) -> bytes:
    """Encode a value that `torch.save` accepts."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def unpack(content: bytes) -> Any:
    """Decode a value. Tensors of a GPU are placed on this rank's, which may have another number."""
    # Written by `pack` on a rank of this run, like the other objects in a checkpoint.
    return torch.load(io.BytesIO(content), map_location=_place, weights_only=False)


def _place(storage: Any, place: str) -> Any:
    return storage if place == "cpu" else storage.cuda()


def _pack(value: Any) -> bytes:
    is_packed = isinstance(value, bytes) and value.startswith(MARK)
    return value if is_packed else MARK + pack(value)
